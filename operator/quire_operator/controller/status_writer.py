# SPDX-License-Identifier: Apache-2.0
"""Status writer, which writes the status and the events of LLMServices.

If the cached service could be stale, the module reads the service again.
"""

import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from quire_operator.controller.object_cache import CachedObject, ObjectCache
from quire_operator.controller.parsed_service import ParsedService, uid_and_generation
from quire_operator.controller.status.events import ServiceEvent, build_events
from quire_operator.kube import resources
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.errors import ApiError, ObjectNotFound, WriteConflict
from quire_operator.kube.resources import Resource
from quire_operator.render.manifests import service_reference

logger = logging.getLogger(__name__)


class StaleService(Exception):
    """The service was changed or deleted after the pass had read it."""


class StatusWriter:
    """Reads and writes LLMServices, but not their child objects."""

    def __init__(self, client: ApiClient, cache: ObjectCache, record_write: Callable[[Resource, str], None]) -> None:
        self._client, self._cache, self._record_write = client, cache, record_write

    async def write_status(
        self, desired: ParsedService, resource_version: str, previous: Mapping[str, Any], status: dict[str, Any]
    ) -> None:
        """Replace the status, and create events for what has changed.

        Raises:
            StaleService: the service has a later version, was replaced, or was deleted.
            ApiError: the status was not written. Events that cannot be written are only logged.
        """
        try:
            await self._set_status(desired, resource_version, status)
        except (ObjectNotFound, WriteConflict):
            # The service may have been deleted or recreated. If kopf missed the deletion, it does not report it later.
            await self.check_newest(desired)
            # Otherwise, the status was written in the meantime. This request itself can have written it, if the first
            # response was lost and the request was repeated.
            cached = self._cache.get(resources.LLM_SERVICE, *desired.key)
            if cached is None or cached.body().get("status") != status:
                raise StaleService from None
        self._record_write(resources.LLM_SERVICE, "status")
        for event in build_events(previous, status):
            try:
                await self._client.create(resources.EVENT, _event_manifest(desired, event))
                self._record_write(resources.EVENT, "create")
            except ApiError as error:
                logger.warning("could not write event reason=%s error=%s", event.reason, error)

    async def write_mark(self, desired: ParsedService, resource_version: str, status: dict[str, Any]) -> CachedObject:
        """Replace the status by one that differs only in the mark of the owner, and return the service.

        Raises:
            StaleService: the service has a later version, for example because another operator has marked it.
            ApiError: the status was not written.
        """
        try:
            entry = await self._set_status(desired, resource_version, status)
        except (ObjectNotFound, WriteConflict):
            await self._fetch(desired)
            raise StaleService from None
        self._record_write(resources.LLM_SERVICE, "mark")
        return entry

    async def _set_status(self, desired: ParsedService, resource_version: str, status: dict[str, Any]) -> CachedObject:
        namespace, name = desired.key
        # The resourceVersion prevents two errors. A new service of the same name or a later generation must not get
        # this status. And if the status was written after the pass had read it, that status must not be lost.
        metadata = {"name": name, "namespace": namespace, "resourceVersion": resource_version}
        manifest = {**service_reference(name), "metadata": metadata, "status": status}
        return self._cache.upsert(resources.LLM_SERVICE, await self._client.set_status(resources.LLM_SERVICE, manifest))

    async def is_newest(self, desired: ParsedService) -> bool:
        """Whether `desired` is the latest generation that the API server has.

        To find out, the method reads the service and updates the cache.
        """
        return await self._fetch(desired) == (desired.uid, desired.generation)

    async def check_newest(self, desired: ParsedService) -> None:
        """Check before a write that the service is not stale. Otherwise, the pass could undo changes that are newer.

        Raises:
            StaleService: at the API server, the service has a later generation, was replaced, or does not exist. The
                cache is updated.
        """
        uid, generation = await self._fetch(desired)
        if uid != desired.uid or generation > desired.generation:
            raise StaleService

    async def _fetch(self, desired: ParsedService) -> tuple[str, int]:
        """Read the service from the API server, and update the cache. Return the uid and the generation, or ("", 0) if
        the service was deleted.
        """
        body = await self._client.list_one(resources.LLM_SERVICE, *desired.key)
        if body is None or body["metadata"]["uid"] != desired.uid:
            tombstone = {"namespace": desired.key[0], "name": desired.key[1], "uid": desired.uid}
            self._cache.remove(resources.LLM_SERVICE, {"metadata": tombstone})
        if body is None:
            return "", 0
        self._cache.upsert(resources.LLM_SERVICE, body)
        return uid_and_generation(body)


def _event_manifest(desired: ParsedService, event: ServiceEvent) -> dict[str, Any]:
    namespace, name = desired.key
    return {
        "apiVersion": resources.EVENT.api_version,
        "kind": resources.EVENT.kind,
        # Event names usually have this form. generateName cannot be used, because it must not end in a dot.
        "metadata": {"name": f"{name}.{time.time_ns():x}", "namespace": namespace},
        "eventTime": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "reportingController": f"{resources.LLM_SERVICE.group}/operator",
        "reportingInstance": "quire-operator",
        "action": "Reconcile",
        "reason": event.reason,
        "type": event.type,
        "note": event.message,
        "regarding": {**service_reference(name), "namespace": namespace, "uid": desired.uid},
    }
