# SPDX-License-Identifier: Apache-2.0
"""Client of the API server. It can get, list, watch, apply and delete objects. Raises ApiError.

`apply` sends a forced server-side apply, always with the same field manager. Therefore, the operator owns the fields
that it sets, and it does not change other fields. The client works with objects of any kind; nothing in it is specific
to LLMServices. Called by the controller.
"""

import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from quire_operator.kube.api_session import ApiSession, Body
from quire_operator.kube.cluster_config import ClusterConfig
from quire_operator.kube.errors import ObjectNotFound, UnknownFields
from quire_operator.kube.resources import Resource
from quire_operator.kube.unknown_fields import FieldPath, remove_fields

logger = logging.getLogger(__name__)

_FIELD_MANAGER = "quire-operator"
"""Field manager (owner) of the fields that the operator sets."""
_APPLY_PATCH = "application/apply-patch+yaml"
_JSON = "application/json"
_JSON_PATCH = "application/json-patch+json"
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=1"
_PAGE_SIZE = 500


@dataclass(frozen=True, slots=True)
class ObjectList:
    """The result of a list request: the objects of one resource at one point in time."""

    items: tuple[Body, ...]
    """The objects. They have no apiVersion and no kind, because the API server omits these fields in lists."""
    resource_version: str
    """A watch must continue from this resourceVersion."""


class ApiClient(ApiSession):
    """Client of one API server. It is an asynchronous context manager."""

    def __init__(self, cluster_config: ClusterConfig) -> None:
        super().__init__(cluster_config)
        self.unknown_fields: defaultdict[Resource, frozenset[FieldPath]] = defaultdict(frozenset)
        """For each kind, the fields that the API server does not know. `apply` leaves them out of the manifests."""
        self._schema_versions: dict[Resource, str] = {}
        """For the kinds in `unknown_fields`, the version of the schema that lacks the fields."""

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Body:
        """Return one object; raises ObjectNotFound."""
        return await self.request("GET", resource.path(namespace, name))

    async def get_or_none(self, resource: Resource, namespace: str | None, name: str) -> Body | None:
        """Return one object, or None if it does not exist."""
        try:
            return await self.get(resource, namespace, name)
        except ObjectNotFound:
            return None

    async def list_one(self, resource: Resource, namespace: str, name: str) -> Body | None:
        """Return one object, or None if it does not exist. This method needs only the permission to list, not the
        permission to get. The object does not contain apiVersion and kind."""
        object_list = await self.list(resource, namespace, field_selector=f"metadata.name={name}")
        return object_list.items[0] if object_list.items else None

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        label_selector: str = "",
        metadata_only: bool = False,
        field_selector: str = "",
    ) -> ObjectList:
        """List all objects of a resource in one namespace, or in all namespaces if `namespace` is None. The list is
        requested page by page."""
        params = {"limit": str(_PAGE_SIZE), "labelSelector": label_selector, "fieldSelector": field_selector}
        accept = f"{_METADATA_LIST},{_JSON}" if metadata_only else _JSON
        items: list[Body] = []
        while True:
            page = await self.request("GET", resource.path(namespace), params=params, accept=accept)
            items += page.get("items") or ()
            if not (continue_token := page["metadata"].get("continue")):
                return ObjectList(tuple(items), page["metadata"]["resourceVersion"])
            params["continue"] = continue_token

    async def apply(self, resource: Resource, manifest: Mapping[str, Any]) -> Body:
        """Apply a manifest and return the object.

        If the manifest contains metadata.uid, the object must have this uid. If another object has taken the name, the
        method raises WriteConflict.
        """
        meta = manifest["metadata"]
        path = resource.path(meta.get("namespace"), meta["name"])
        params = {"fieldManager": _FIELD_MANAGER, "force": "true"}
        while True:
            unknown = self.unknown_fields[resource]
            try:
                body = remove_fields(manifest, unknown)
                return await self.request("PATCH", path, body, params=params, content_type=_APPLY_PATCH)
            except UnknownFields as error:
                if error.fields <= unknown:
                    raise
                for field in error.fields - unknown:
                    logger.info("the API server does not know a field kind=%s field=%s", resource.kind, ".".join(field))
                self.unknown_fields[resource] |= error.fields
                self._schema_versions[resource] = await self._schema_version(resource)

    async def forget_unknown_fields(self) -> set[Resource]:
        """Forget the unknown fields of the kinds whose schema has changed since then, and return the kinds. The project
        of a kind may have been upgraded.
        """
        changed = {r for r, old in self._schema_versions.items() if await self._schema_version(r) != old}
        for resource in changed:
            del self.unknown_fields[resource], self._schema_versions[resource]
        return changed

    async def _schema_version(self, resource: Resource) -> str:
        """Return a text that changes with the fields of the kinds of a group and version."""
        paths = (await self.request("GET", "/openapi/v3"))["paths"]
        return str(paths.get(resource.root[1:], {}).get("serverRelativeURL", ""))

    async def set_status(self, resource: Resource, manifest: Mapping[str, Any]) -> Body:
        """Replace the whole status of an object and return the object.

        The object must still have the resourceVersion that the manifest's metadata contains. If it differs, the method
        raises WriteConflict.
        """
        meta = manifest["metadata"]
        path = resource.path(meta.get("namespace"), meta["name"], "status")
        # Not a server-side apply, which would keep the fields that releases with another patch wrote.
        patch = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": meta["resourceVersion"]},
            {"op": "add", "path": "/status", "value": manifest["status"]},
        ]
        return await self.request(
            "PATCH", path, patch, params={"fieldManager": _FIELD_MANAGER}, content_type=_JSON_PATCH
        )

    async def patch(self, resource: Resource, namespace: str, name: str, patch: Sequence[Mapping[str, Any]]) -> Body:
        """Change an object with a JSON patch and return it. If a test in the patch fails, raise ApiError."""
        return await self.request("PATCH", resource.path(namespace, name), list(patch), content_type=_JSON_PATCH)

    async def create(self, resource: Resource, manifest: Mapping[str, Any]) -> Body:
        """Create an object; raises WriteConflict if it already exists."""
        path = resource.path(manifest["metadata"].get("namespace"))
        return await self.request("POST", path, manifest, params={"fieldManager": _FIELD_MANAGER})

    async def delete(self, resource: Resource, namespace: str | None, name: str, uid: str) -> None:
        """Delete the object with this uid, if it exists. The garbage collector then deletes the objects that belong to
        it.

        Raises:
            WriteConflict: another object has the name.
        """
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        with contextlib.suppress(ObjectNotFound):
            await self.request("DELETE", resource.path(namespace, name), {**options, "preconditions": {"uid": uid}})

    def watch(
        self,
        resource: Resource,
        namespace: str | None,
        resource_version: str,
        label_selector: str,
        timeout_s: float,
        response_timeout_s: float = 30.0,
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Watch from a resource version, and yield the lines of the response until `timeout_s` has passed."""
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(int(timeout_s)),
            "labelSelector": label_selector,
        }
        return self.stream(resource.path(namespace), params, response_timeout_s)
