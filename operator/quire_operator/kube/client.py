# SPDX-License-Identifier: Apache-2.0
"""Client: what the operator asks of an API server, by kinds of objects, over one Session. Raises ApiError as it does.

Applying is server-side apply by one field manager, forced: fields that we set are ours, all others are not touched.
"""

import logging
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from quire_operator.kube.errors import Missing, Rejected, Stale, Undeclared
from quire_operator.kube.kinds import Kind
from quire_operator.kube.login import Login
from quire_operator.kube.session import Body, Session

log = logging.getLogger(__name__)

_MANAGER = "quire-operator"
"""Of the fields that we set."""
_APPLY = "application/apply-patch+yaml"
_JSON = "application/json"
_JSON_PATCH = "application/json-patch+json"
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=1"
_PAGE = 500
_CONDITIONS = ("uid", "generation", "resourceVersion")


@dataclass(frozen=True, slots=True)
class Listing:
    """The objects of a kind at one moment."""

    items: tuple[Body, ...]
    """Without apiVersion and kind, as the API server lists them."""
    version: str
    """resourceVersion that a watch goes on from."""


class Client(Session):
    """One API server and its objects; an asynchronous context manager."""

    def __init__(self, login: Login) -> None:
        super().__init__(login)
        self._undeclared: dict[Kind, set[tuple[str, ...]]] = {}

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Body:
        """One object; raises Missing."""
        return await self.request("GET", kind.path(namespace, name))

    async def find(self, kind: Kind, namespace: str | None, name: str) -> Body | None:
        """One object, or None."""
        try:
            return await self.get(kind, namespace, name)
        except Missing:
            return None

    async def find_listed(self, kind: Kind, namespace: str, name: str) -> Body | None:
        """One object, or None, by the right to list alone; without apiVersion and kind."""
        found = await self.list(kind, namespace, fields=f"metadata.name={name}")
        return found.items[0] if found.items else None

    async def list(
        self,
        kind: Kind,
        namespace: str | None = None,
        labels: str = "",
        metadata_only: bool = False,
        fields: str = "",
    ) -> Listing:
        """All objects of a kind in a namespace (None: in all), in pages; `labels` and `fields` are selectors."""
        params = {
            "limit": str(_PAGE),
            **({"labelSelector": labels} if labels else {}),
            **({"fieldSelector": fields} if fields else {}),
        }
        items: list[Body] = []
        while True:
            accept = f"{_METADATA_LIST},{_JSON}" if metadata_only else _JSON
            page = await self.request("GET", kind.path(namespace), params=params, accept=accept)
            items += page.get("items") or ()
            if not (more := page["metadata"].get("continue")):
                return Listing(tuple(items), page["metadata"]["resourceVersion"])
            params["continue"] = more

    async def apply(self, kind: Kind, manifest: Mapping[str, Any]) -> Body:
        """Server-side apply; the object as it is then.

        A metadata.uid in the manifest is a condition: another object of that name raises Stale.
        """
        meta = manifest["metadata"]
        path = kind.path(meta.get("namespace"), meta["name"])
        params = {"fieldManager": _MANAGER, "force": "true"}
        unknown = self._undeclared.setdefault(kind, set())
        while True:
            try:
                body = without(manifest, unknown)
                return await self.request("PATCH", path, body, params=params, content_type=_APPLY)
            except Undeclared as error:
                if error.field in unknown:
                    raise
                # Written for a current API server; what an older one lacks it does without.
                log.info("field left out, the API server has none kind=%s field=%s", kind.name, ".".join(error.field))
                unknown.add(error.field)

    def undeclared(self, kind: Kind) -> frozenset[tuple[str, ...]]:
        """Paths of fields that were left out of what was applied: the API server's objects of that kind have none."""
        return frozenset(self._undeclared.get(kind, ()))

    async def set_status(self, kind: Kind, manifest: Mapping[str, Any]) -> Body:
        """Put the manifest's status in the place of the object's whole one; the object as it is then.

        Not server-side apply: API servers before 1.21 leave null where an object within was taken out, and then refuse
        it as no object. metadata's uid, generation and resourceVersion are conditions: another object, spec, or version
        raises Stale.
        """
        meta = manifest["metadata"]
        path = kind.path(meta.get("namespace"), meta["name"], "status")
        patch = [{"op": "test", "path": f"/metadata/{name}", "value": meta[name]} for name in _CONDITIONS]
        patch.append({"op": "add", "path": "/status", "value": manifest["status"]})
        try:
            return await self.request("PATCH", path, patch, params={"fieldManager": _MANAGER}, content_type=_JSON_PATCH)
        except Rejected as error:
            # A test that fails and a status that is wrong are both 422.
            found = await self.find_listed(kind, meta["namespace"], meta["name"])
            if found is None or any(found["metadata"].get(name) != meta[name] for name in _CONDITIONS):
                raise Stale(f"{error} (it has changed, or another object has the name by now)", error.status) from error
            raise

    async def create(self, kind: Kind, manifest: Mapping[str, Any]) -> Body:
        """Make an object that must not be there yet; raises Stale when it is."""
        path = kind.path(manifest["metadata"].get("namespace"))
        return await self.request("POST", path, manifest, params={"fieldManager": _MANAGER})

    async def replace(self, kind: Kind, manifest: Mapping[str, Any]) -> Body:
        """Put an object in the place of the version that it names; raises Stale when there is a newer one."""
        meta = manifest["metadata"]
        path = kind.path(meta.get("namespace"), meta["name"])
        return await self.request("PUT", path, manifest, params={"fieldManager": _MANAGER})

    async def delete(self, kind: Kind, namespace: str | None, name: str, uid: str) -> None:
        """Delete the object of that uid and, by the garbage collector, what it owns; it may be gone already.

        Raises:
            Stale: the name is another object's by now.
        """
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        options["propagationPolicy"] = "Background"
        try:
            await self.request("DELETE", kind.path(namespace, name), options)
        except Missing:
            return

    def watch(
        self, kind: Kind, namespace: str | None, version: str, labels: str, timeout_s: float, answer_s: float = 30.0
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The lines of a watch from a resource version on; the server ends it after `timeout_s`. Else as `stream`."""
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(int(timeout_s)),
            **({"labelSelector": labels} if labels else {}),
        }
        return self.stream(kind.path(namespace), params, answer_s)


def without(value: Any, fields: Collection[tuple[str, ...]]) -> Any:
    """A JSON value without the fields of these paths; entries of lists have no names in a path."""
    if not fields:
        return value
    if isinstance(value, list):
        return [without(item, fields) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: without(item, {path[1:] for path in fields if path[0] == key and len(path) > 1})
        for key, item in value.items()
        if (key,) not in fields
    }
