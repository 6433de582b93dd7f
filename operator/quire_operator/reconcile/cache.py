# SPDX-License-Identifier: Apache-2.0
"""Cache: the last known state of every object that carries our label, and of every LLMService; filled by watches.

An object is kept as compact JSON and parsed when it is looked at: as Python objects a thousand services' children
would take 60 MB. What no pass reads is dropped before that, above all metadata.managedFields, half of most objects.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from quire_operator.kube import kinds
from quire_operator.kube.kinds import Kind
from quire_operator.render import names

Key = tuple[str, str]
"""Namespace and name of an LLMService."""

SELECTOR = f"{names.MANAGED_BY}={names.MANAGER}"
_VOLATILE = (
    "creationTimestamp", "deletionGracePeriodSeconds", "generation", "managedFields", "resourceVersion", "selfLink",
)  # fmt: skip
_COUNTED = "deployment.kubernetes.io/"
"""Annotations of the Deployment controller: the number of its rollout."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One object."""

    kind: Kind
    namespace: str
    name: str
    uid: str
    version: str
    """resourceVersion."""
    owner: str
    """uid of its controller; empty: it has none."""
    service: str
    """Name of the LLMService that its label names."""
    content: str
    """Digest of all but the status and what the API server counts up: what somebody wants of it."""
    whole: str
    """Digest of content and status."""
    deleting: bool
    raw: bytes

    @property
    def key(self) -> Key:
        """The service that it belongs to."""
        return (self.namespace, self.service)

    def body(self) -> dict[str, Any]:
        """The object, trimmed; a new copy each time."""
        body: dict[str, Any] = orjson.loads(self.raw)
        return body


def entry_of(kind: Kind, body: Mapping[str, Any]) -> Entry:
    """An object as it is kept."""
    trimmed = _trimmed(kind, body)
    meta = body["metadata"]
    lasting = {key: item for key, item in trimmed["metadata"].items() if key not in _VOLATILE}
    if "annotations" in lasting:
        lasting["annotations"] = {k: v for k, v in lasting["annotations"].items() if not k.startswith(_COUNTED)}
    content = _dumped({**{k: v for k, v in trimmed.items() if k != "status"}, "metadata": lasting})
    status = _dumped(trimmed.get("status"))
    service = meta["name"] if kind is kinds.LLM_SERVICE else (meta.get("labels") or {}).get(names.INSTANCE, "")
    digest = _digest(content)
    return Entry(
        kind,
        meta.get("namespace", ""),
        meta["name"],
        meta["uid"],
        meta["resourceVersion"],
        controller(body),
        service,
        digest,
        _digest(digest.encode() + status),
        "deletionTimestamp" in meta,
        _dumped(trimmed),
    )


def controller(body: Mapping[str, Any]) -> str:
    """uid of the controller among an object's owners; empty: it has none."""
    owners = body["metadata"].get("ownerReferences") or ()
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


class Cache:
    """Objects by kind, namespace and name, and by the service that they belong to. A Sink of watches."""

    def __init__(self, changed: Callable[[Key], None] = lambda key: None) -> None:
        """`changed` is told of each service of which an object came, went, or differs from what was known."""
        self._changed = changed
        self._entries: dict[tuple[str, str, str], Entry] = {}
        self._of: dict[Key, set[tuple[str, str, str]]] = {}

    def get(self, kind: Kind, namespace: str, name: str) -> Entry | None:
        """One object, or None."""
        return self._entries.get((kind.name, namespace, name))

    def of(self, key: Key, *wanted: Kind) -> Iterator[Entry]:
        """The objects of a service, of these kinds or of all, in no particular order."""
        only = {kind.name for kind in wanted}
        for place in self._of.get(key, ()):
            if not only or place[0] in only:
                yield self._entries[place]

    def all(self, kind: Kind) -> list[Entry]:
        """All objects of a kind."""
        return [entry for place, entry in self._entries.items() if place[0] == kind.name]

    def replace(self, kind: Kind, namespace: str | None, bodies: tuple[dict[str, Any], ...]) -> None:
        """These are all objects of the namespace (None: of all)."""
        there = {(body["metadata"].get("namespace", ""), body["metadata"]["name"]) for body in bodies}
        for entry in self.all(kind):
            if namespace in (None, entry.namespace) and (entry.namespace, entry.name) not in there:
                self._drop(entry)
        for body in bodies:
            self.put(kind, body)

    def put(self, kind: Kind, body: Mapping[str, Any]) -> None:
        """An object is new or has changed, as a watch or the answer to a write says; the newer of both stays."""
        entry = entry_of(kind, body)
        place = (kind.name, entry.namespace, entry.name)
        known = self._entries.get(place)
        if known and known.uid == entry.uid and _older(entry.version, known.version):
            return
        if known and known.key != entry.key:
            self._drop(known)
        self._entries[place] = entry
        self._of.setdefault(entry.key, set()).add(place)
        if known is None or (known.uid, known.whole, known.deleting) != (entry.uid, entry.whole, entry.deleting):
            self._changed(entry.key)

    def remove(self, kind: Kind, body: Mapping[str, Any]) -> None:
        """An object is gone."""
        meta = body["metadata"]
        known = self.get(kind, meta.get("namespace", ""), meta["name"])
        if known is not None and known.uid == meta["uid"]:
            self._drop(known)

    def _drop(self, entry: Entry) -> None:
        place = (entry.kind.name, entry.namespace, entry.name)
        del self._entries[place]
        places = self._of[entry.key]
        places.discard(place)
        if not places:
            del self._of[entry.key]
        self._changed(entry.key)


def _trimmed(kind: Kind, body: Mapping[str, Any]) -> dict[str, Any]:
    """Without what no pass reads."""
    meta = {key: item for key, item in body["metadata"].items() if key != "managedFields"}
    trimmed = {**body, "apiVersion": kind.api_version, "kind": kind.name, "metadata": meta}
    # Tokens that old API servers make for each account, and add to it.
    if kind is kinds.SERVICE_ACCOUNT:
        trimmed.pop("secrets", None)
    if kind is kinds.POD:
        trimmed["spec"] = _trimmed_pod(body.get("spec", {}))
    if kind is kinds.REPLICA_SET:
        spec = body.get("spec", {})
        pod = _trimmed_pod(spec.get("template", {}).get("spec", {}))
        trimmed["spec"] = {"replicas": spec.get("replicas", 0), "template": {"spec": pod}}
    return trimmed


def _trimmed_pod(spec: Mapping[str, Any]) -> dict[str, Any]:
    containers = [{"name": c["name"], "ports": c.get("ports", [])} for c in spec.get("containers", ())]
    volumes = [volume for volume in spec.get("volumes", ()) if "configMap" in volume]
    return {"containers": containers, "volumes": volumes}


def _older(version: str, known: str) -> bool:
    # Comparing is meant to work from Kubernetes 1.35 on, and always did on etcd.
    return version.isdecimal() and known.isdecimal() and int(version) < int(known)


def _dumped(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()
