# SPDX-License-Identifier: Apache-2.0
"""Client of the API server: get, list, watch, apply and delete objects by resource. Raises ApiError.

`apply` is a forced server-side apply by one field manager: the operator owns the fields that it sets and does not
change other fields. The client is independent of LLMServices. Called by the controller.
"""

import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from quire_operator.kube.api_session import ApiSession, Body
from quire_operator.kube.cluster_config import ClusterConfig
from quire_operator.kube.errors import InvalidObject, ObjectNotFound, UnknownField, WriteConflict
from quire_operator.kube.old_api_servers import FieldPath, meets_preconditions, remove_fields, status_patch
from quire_operator.kube.resources import Resource

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
    """The objects of a resource at one moment."""

    items: tuple[Body, ...]
    """The objects without apiVersion and kind, because the API server omits these in lists."""
    resource_version: str
    """resourceVersion from which a watch continues."""


class ApiClient(ApiSession):
    """Client of one API server. It is an asynchronous context manager."""

    def __init__(self, cluster_config: ClusterConfig) -> None:
        super().__init__(cluster_config)
        self.unsupported_fields: defaultdict[Resource, frozenset[FieldPath]] = defaultdict(frozenset)
        """Fields that were omitted from manifests, because the API server does not support them, by kind."""

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
        """Return one object or None. This method needs only the right to list. The object does not contain apiVersion
        and kind."""
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
        """List all objects of a resource in a namespace (None: in all namespaces), in pages."""
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

        metadata.uid in the manifest is a precondition: the method raises WriteConflict if another object has the name.
        """
        meta = manifest["metadata"]
        path = resource.path(meta.get("namespace"), meta["name"])
        params = {"fieldManager": _FIELD_MANAGER, "force": "true"}
        while True:
            unsupported = self.unsupported_fields[resource]
            try:
                body = remove_fields(manifest, unsupported)
                return await self.request("PATCH", path, body, params=params, content_type=_APPLY_PATCH)
            except UnknownField as error:
                if error.field in unsupported:
                    raise
                field = ".".join(error.field)
                logger.info("field is not supported by the API server, left out kind=%s field=%s", resource.kind, field)
                self.unsupported_fields[resource] |= {error.field}

    async def set_status(self, resource: Resource, manifest: Mapping[str, Any]) -> Body:
        """Replace the whole status of an object and return the object.

        uid, generation and resourceVersion of metadata are preconditions: the method raises WriteConflict if one of
        them differs.
        """
        meta = manifest["metadata"]
        path = resource.path(meta.get("namespace"), meta["name"], "status")
        params = {"fieldManager": _FIELD_MANAGER}
        try:
            return await self.request("PATCH", path, status_patch(manifest), params=params, content_type=_JSON_PATCH)
        except InvalidObject as error:
            # A failed precondition and an invalid status are both 422.
            if meets_preconditions(manifest, await self.list_one(resource, meta["namespace"], meta["name"])):
                raise
            raise WriteConflict(f"{error} (the object has changed, or was replaced)", error.status) from error

    async def create(self, resource: Resource, manifest: Mapping[str, Any]) -> Body:
        """Create an object; raises WriteConflict if it already exists."""
        path = resource.path(manifest["metadata"].get("namespace"))
        return await self.request("POST", path, manifest, params={"fieldManager": _FIELD_MANAGER})

    async def delete(self, resource: Resource, namespace: str | None, name: str, uid: str) -> None:
        """Delete the object with this uid, if it exists; the garbage collector deletes the objects that it owns.

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
