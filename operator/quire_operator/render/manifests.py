# SPDX-License-Identifier: Apache-2.0
"""Common parts of manifests: metadata, owner and references to the LLMService. Called by all modules of render/."""

from collections.abc import Mapping
from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_operator.render import object_names
from quire_spec import constants as spec_names

Manifest = dict[str, Any]
"""A Kubernetes object in the form that is applied, or a part of such an object."""

PLACEMENT_FIELDS = (
    "affinity", "imagePullSecrets", "nodeSelector", "priorityClassName", "schedulerName", "securityContext",
    "tolerations",
)  # fmt: skip
"""Fields that are copied from the server's pod spec to a Job's pod spec, so that both run on the same nodes."""


def new_manifest(
    api_version: str, kind: str, service: LLMService, name: str, component: str = object_names.SERVER, **fields: Any
) -> Manifest:
    """Return an object of a service with namespace and labels; objects.py adds the owner reference."""
    meta: Manifest = {"name": name, **({"namespace": service.namespace} if service.namespace else {})}
    meta["labels"] = object_names.labels(service, component)
    return {"apiVersion": api_version, "kind": kind, "metadata": meta, **fields}


def service_reference(name: str) -> Manifest:
    """Return apiVersion, kind and name of an LLMService, for owner references and scale targets."""
    api_version = f"{spec_names.API_GROUP}/{spec_names.API_VERSION}"
    return {"apiVersion": api_version, "kind": spec_names.KIND, "name": name}


def owner_reference(name: str, uid: str) -> Manifest:
    """Return the owner reference for objects that the LLMService controls."""
    return {**service_reference(name), "uid": uid, "controller": True}


def new_job(service: LLMService, name: str, component: str, job_fields: Manifest, pod_spec: Manifest) -> Manifest:
    """Return a Job with one pod."""
    template = {"metadata": {"labels": object_names.labels(service, component)}, "spec": pod_spec}
    return new_manifest("batch/v1", "Job", service, name, component, spec={**job_fields, "template": template})


def container_ports(template: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of the named ports of a pod template, by port name."""
    containers = template["spec"].get("containers") or ()
    ports = (port for container in containers for port in container.get("ports") or ())
    return {port["name"]: port["containerPort"] for port in ports if "name" in port}
