# SPDX-License-Identifier: Apache-2.0
"""Parts that all manifests have in common: metadata, owner, and references to the LLMService. Called by all modules of
render/."""

from collections.abc import Mapping
from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_operator.render import object_names
from quire_spec import constants as spec_names

Manifest = dict[str, Any]
"""A Kubernetes object, or a part of one, in the form in which the operator applies it."""

PLACEMENT_FIELDS = (
    "affinity", "imagePullSecrets", "nodeSelector", "priorityClassName", "schedulerName", "securityContext",
    "tolerations",
)  # fmt: skip
"""A Job gets these fields from the server's pod spec, so that its pod runs on the same nodes as the server pods."""


def new_manifest(
    api_version: str, kind: str, service: LLMService, name: str, component: str = object_names.SERVER, **fields: Any
) -> Manifest:
    """Return an object that belongs to a service. It has a namespace and labels; objects.py adds the owner
    reference."""
    meta: Manifest = {"name": name, **({"namespace": service.namespace} if service.namespace else {})}
    meta["labels"] = object_names.labels(service, component)
    return {"apiVersion": api_version, "kind": kind, "metadata": meta, **fields}


def service_reference(name: str) -> Manifest:
    """Return the apiVersion, kind and name of an LLMService, in the form that owner references and scale targets
    require."""
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
    """Return the ports of a pod template as a mapping from names to numbers. Ports without a name are omitted."""
    containers = template["spec"].get("containers") or ()
    ports = (port for container in containers for port in container.get("ports") or ())
    return {port["name"]: port["containerPort"] for port in ports if "name" in port}
