# SPDX-License-Identifier: Apache-2.0
"""Object cache, which contains all LLMServices and all objects with the operator's label, as far as they are known.

It is filled by reflectors, by kopf's events and from responses to writes. Each object is stored as compact JSON, and is
parsed when it is used. As Python objects, the children of 1,000 services would take 60 MB. Fields that are never read
in a pass are removed before an object is stored. The largest of them is metadata.managedFields, which makes up half of
the bytes of most objects.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from quire_operator.kube import resources
from quire_operator.kube.resources import Resource
from quire_operator.render import object_names

ServiceKey = tuple[str, str]
"""Namespace and name of an LLMService."""

LABEL_SELECTOR = f"{object_names.MANAGED_BY}={object_names.MANAGER}"
_VOLATILE_METADATA = (
    "creationTimestamp", "deletionGracePeriodSeconds", "generation", "managedFields", "resourceVersion", "selfLink",
)  # fmt: skip
_DEPLOYMENT_CONTROLLER_PREFIX = "deployment.kubernetes.io/"
"""Prefix of annotations that the Deployment controller writes, such as the revision of the rollout."""


@dataclass(frozen=True, slots=True)
class CachedObject:
    """One object of the cache."""

    resource: Resource
    namespace: str
    name: str
    uid: str
    resource_version: str
    controller_uid: str
    """uid of the owner that controls the object. Empty if the object has no such owner."""
    service_name: str
    """Name of the LLMService to which the object belongs. It comes from the object's label."""
    spec_digest: str
    """Digest of the whole object, except its status and the metadata that the API server maintains."""
    full_digest: str
    """Digest of spec_digest together with the status."""
    deleting: bool
    raw_json: bytes

    @property
    def key(self) -> ServiceKey:
        """Namespace and name of the service to which the object belongs."""
        return (self.namespace, self.service_name)

    @property
    def state(self) -> tuple[str, str, bool]:
        """The values of an object that are important for passes. If an object changes, a pass starts only if one of
        these values has changed.
        """
        return (self.uid, self.full_digest, self.deleting)

    def body(self) -> dict[str, Any]:
        """Return a new copy of the trimmed object."""
        body: dict[str, Any] = orjson.loads(self.raw_json)
        return body


def to_cached_object(resource: Resource, body: Mapping[str, Any]) -> CachedObject:
    """Convert an object to the form in which the cache stores it."""
    trimmed = _trim(resource, body)
    meta = body["metadata"]
    stable_metadata = {key: item for key, item in trimmed["metadata"].items() if key not in _VOLATILE_METADATA}
    if "annotations" in stable_metadata:
        stable_metadata["annotations"] = {
            k: v for k, v in stable_metadata["annotations"].items() if not k.startswith(_DEPLOYMENT_CONTROLLER_PREFIX)
        }
    spec_json = _to_json_bytes({**{k: v for k, v in trimmed.items() if k != "status"}, "metadata": stable_metadata})
    status_json = _to_json_bytes(trimmed.get("status"))
    instance_label = (meta.get("labels") or {}).get(object_names.INSTANCE, "")
    spec_digest = _digest(spec_json)
    return CachedObject(
        resource,
        meta.get("namespace", ""),
        meta["name"],
        meta["uid"],
        meta["resourceVersion"],
        controller_uid(body),
        meta["name"] if resource is resources.LLM_SERVICE else instance_label,
        spec_digest,
        _digest(spec_digest.encode() + status_json),
        "deletionTimestamp" in meta,
        _to_json_bytes(trimmed),
    )


def controller_uid(body: Mapping[str, Any]) -> str:
    """Return the uid of the owner that controls an object. The text is empty if the object has no such owner."""
    owners = body["metadata"].get("ownerReferences") or ()
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


class ObjectCache:
    """All cached objects, which can be found by kind, namespace and name, or by service. The cache implements
    ObjectStore, which is the protocol that reflectors use to write objects.
    """

    def __init__(self, on_change: Callable[[ServiceKey], None] = lambda key: None) -> None:
        """When an object is added, changed or removed, `on_change` is called with the key of its service."""
        self._on_change = on_change
        self._objects: dict[tuple[str, str, str], CachedObject] = {}
        self._ids_by_service: dict[ServiceKey, set[tuple[str, str, str]]] = {}

    def get(self, resource: Resource, namespace: str, name: str) -> CachedObject | None:
        """Return one object, or None."""
        return self._objects.get((resource.kind, namespace, name))

    def get_body(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        """Return a copy of one object's body, or None."""
        entry = self.get(resource, namespace, name)
        return entry.body() if entry else None

    def children_of(self, key: ServiceKey, *only_resources: Resource) -> Iterator[CachedObject]:
        """Yield the objects of a service, in no particular order. If `only_resources` are given, yield only objects of
        these kinds.
        """
        kind_names = {resource.kind for resource in only_resources}
        for object_id in self._ids_by_service.get(key, ()):
            if not kind_names or object_id[0] in kind_names:
                yield self._objects[object_id]

    def objects_of_kind(self, resource: Resource) -> list[CachedObject]:
        """Return all objects of a kind."""
        return [entry for object_id, entry in self._objects.items() if object_id[0] == resource.kind]

    def replace(self, resource: Resource, namespace: str | None, bodies: tuple[dict[str, Any], ...]) -> None:
        """Replace all objects of a kind in the namespace. If `namespace` is None, replace them in all namespaces."""
        listed = {(body["metadata"].get("namespace", ""), body["metadata"]["name"]) for body in bodies}
        for entry in self.objects_of_kind(resource):
            if namespace in (None, entry.namespace) and (entry.namespace, entry.name) not in listed:
                self._evict(entry)
        for body in bodies:
            self.upsert(resource, body)

    def upsert(self, resource: Resource, body: Mapping[str, Any]) -> CachedObject:
        """Store an object that comes from a watch or from the response to a write. If the cached version is newer, it
        stays. Return the cached object.
        """
        entry = to_cached_object(resource, body)
        object_id = (resource.kind, entry.namespace, entry.name)
        cached = self._objects.get(object_id)
        if cached and cached.uid == entry.uid and _is_older(entry.resource_version, cached.resource_version):
            return entry
        if cached and cached.key != entry.key:
            self._evict(cached)
        self._objects[object_id] = entry
        self._ids_by_service.setdefault(entry.key, set()).add(object_id)
        if cached is None or cached.state != entry.state:
            self._on_change(entry.key)
        return entry

    def remove(self, resource: Resource, body: Mapping[str, Any]) -> None:
        """Remove a deleted object."""
        meta = body["metadata"]
        cached = self.get(resource, meta.get("namespace", ""), meta["name"])
        if cached is not None and cached.uid == meta["uid"]:
            self._evict(cached)

    def _evict(self, entry: CachedObject) -> None:
        object_id = (entry.resource.kind, entry.namespace, entry.name)
        del self._objects[object_id]
        object_ids = self._ids_by_service[entry.key]
        object_ids.discard(object_id)
        if not object_ids:
            del self._ids_by_service[entry.key]
        self._on_change(entry.key)


def _trim(resource: Resource, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object without the fields that are never used in a pass."""
    meta = {key: item for key, item in body["metadata"].items() if key != "managedFields"}
    trimmed = {**body, "apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta}
    if resource is resources.POD:
        trimmed["spec"] = _trim_pod_spec(body.get("spec", {}))
    if resource is resources.REPLICA_SET:
        spec = body.get("spec", {})
        pod_spec = _trim_pod_spec(spec.get("template", {}).get("spec", {}))
        trimmed["spec"] = {"replicas": spec.get("replicas", 0), "template": {"spec": pod_spec}}
    return trimmed


def _trim_pod_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    containers = [
        {"name": c["name"], "image": c.get("image", ""), "ports": c.get("ports", [])}
        for c in spec.get("containers", ())
    ]
    init_containers = [{"name": c["name"], "args": c.get("args", [])} for c in spec.get("initContainers", ())]
    volumes = [volume for volume in spec.get("volumes", ()) if "configMap" in volume]
    optional = {name: spec.get(name) for name in ("schedulingGates", "nodeName")} | {"initContainers": init_containers}
    return {"containers": containers, "volumes": volumes, **{name: value for name, value in optional.items() if value}}


def _is_older(version: str, cached_version: str) -> bool:
    # Since Kubernetes 1.35, the documentation allows clients to compare resourceVersions. With etcd, the comparison was
    # always correct.
    return version.isdecimal() and cached_version.isdecimal() and int(version) < int(cached_version)


def _to_json_bytes(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()
