# SPDX-License-Identifier: Apache-2.0
"""Parts that all manifests have in common: metadata, owner, references to the LLMService, environment
variables. Called by all modules of render/."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_operator.render import object_names
from quire_spec import constants as spec_names
from quire_spec.net.addresses import POD_IP_VARIABLE

Manifest = dict[str, Any]
"""A Kubernetes object, or a part of one, in the form in which the operator applies it."""

NONE: Mapping[str, str] = MappingProxyType({})


def new_manifest(
    api_version: str,
    kind: str,
    service: LLMService,
    name: str,
    component: str = object_names.SERVER,
    labels: Mapping[str, str] = NONE,
    annotations: Mapping[str, str] = NONE,
    **fields: Any,
) -> Manifest:
    """Return an object that belongs to a service. `labels` and `annotations` are those of the object in addition to
    the ones of all objects. objects.py adds the owner reference."""
    namespace = {"namespace": service.namespace} if service.namespace else {}
    meta = {"name": name, **namespace, **metadata(service, component, labels, annotations)}
    return {"apiVersion": api_version, "kind": kind, "metadata": meta, **fields}


def metadata(
    service: LLMService, component: str, labels: Mapping[str, str] = NONE, annotations: Mapping[str, str] = NONE
) -> Manifest:
    """Return the labels and annotations of an object or of a pod template.

    They are those of the spec, which the arguments override. The labels by which the operator and Kubernetes select
    the object override all others.
    """
    spec, own = service.spec, object_names.labels(service, component)
    meta = {
        "labels": {**own, **spec.labels, **labels, **own},
        "annotations": {**spec.annotations, **annotations},
    }
    return {name: values for name, values in meta.items() if values}


def service_reference(name: str) -> Manifest:
    """Return the apiVersion, kind and name of an LLMService, in the form that owner references and scale targets
    require."""
    api_version = f"{spec_names.API_GROUP}/{spec_names.API_VERSION}"
    return {"apiVersion": api_version, "kind": spec_names.KIND, "name": name}


def owner_reference(name: str, uid: str) -> Manifest:
    """Return the owner reference for objects that the LLMService controls."""
    return {**service_reference(name), "uid": uid, "controller": True}


def container_env(service: LLMService, **extra: str) -> list[dict[str, Any]]:
    """Return the environment of a container: the variables that every container has, those in `extra`, and those in
    spec.runtime.env. If a variable occurs more than once, the value in spec.runtime.env is used."""
    configured = extra | {variable.name: variable.value for variable in service.spec.runtime.env}
    defaults = {POD_IP_VARIABLE: {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}}
    values = defaults | {name: {"value": value} for name, value in configured.items()}
    return [{"name": name, **value} for name, value in values.items()]


def container_ports(template: Mapping[str, Any]) -> dict[str, int]:
    """Return the ports of a pod template as a mapping from names to numbers. Ports without a name are omitted."""
    containers = template["spec"].get("containers") or ()
    ports = (port for container in containers for port in container.get("ports") or ())
    return {port["name"]: port["containerPort"] for port in ports if "name" in port}
