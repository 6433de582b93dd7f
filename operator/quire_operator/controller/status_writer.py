# SPDX-License-Identifier: Apache-2.0
"""Writes status and events of LLMServices, and reads a service again when the cached one may be stale."""

import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from quire_operator.controller.dependencies import ReconcilerDeps
from quire_operator.controller.desired_service import ParsedService, uid_and_generation
from quire_operator.controller.object_cache import CachedObject, ServiceKey
from quire_operator.controller.status.events import ServiceEvent, build_events
from quire_operator.kube import resources
from quire_operator.kube.errors import ApiError, ObjectNotFound, WriteConflict

logger = logging.getLogger(__name__)


class StaleService(Exception):
    """The service has changed or was deleted since the pass read it."""


class StatusWriter:
    """Reads and writes LLMServices, not their children."""

    def __init__(self, deps: ReconcilerDeps) -> None:
        self._deps = deps

    async def write_status(self, entry: CachedObject, previous: Mapping[str, Any], status: dict[str, Any]) -> None:
        """Replace the status, and create events for the changes.

        Raises:
            StaleService: the service has a later version, was replaced, or was deleted.
            ApiError: the status was not written. Events that cannot be written are logged only.
        """
        deps = self._deps
        manifest = {
            "apiVersion": resources.LLM_SERVICE.api_version,
            "kind": resources.LLM_SERVICE.kind,
            # Preconditions: a new service of the same name or a later generation must not get this status, and a
            # status written since `previous` was read must not be lost.
            "metadata": {
                "name": entry.name,
                "namespace": entry.namespace,
                "uid": entry.uid,
                "generation": status["observedGeneration"],
                "resourceVersion": entry.resource_version,
            },
            "status": status,
        }
        try:
            body = await deps.client.set_status(resources.LLM_SERVICE, manifest)
        except (ObjectNotFound, WriteConflict):
            # The service may have been deleted or recreated: kopf reports no deletion that it missed.
            await self.check_newest((entry.namespace, entry.name), entry.uid, status["observedGeneration"])
            # Or it was written meanwhile: by this request, if its first response was lost and it was sent again.
            cached = deps.cache.get(resources.LLM_SERVICE, entry.namespace, entry.name)
            if cached is None or cached.body().get("status") != status:
                raise StaleService from None
        else:
            deps.cache.upsert(resources.LLM_SERVICE, body)
        deps.record_write(resources.LLM_SERVICE, "status")
        for event in build_events(previous, status):
            try:
                await deps.client.create(resources.EVENT, _event_manifest(entry, event))
                deps.record_write(resources.EVENT, "create")
            except ApiError as error:
                logger.warning("could not write event reason=%s error=%s", event.reason, error)

    async def is_newest(self, key: ServiceKey, desired: ParsedService) -> bool:
        """Whether the API server has no later generation; reads the service and updates the cache."""
        body = await self._fetch(key, desired.uid)
        return body is not None and uid_and_generation(body) == (desired.uid, desired.generation)

    async def check_newest(self, key: ServiceKey, uid: str, generation: int) -> None:
        """Check the generation before a write: a pass over a stale service would undo the objects of the new one.

        Raises:
            StaleService: the API server has a later generation, another service, or none. The cache is updated.
        """
        body = await self._fetch(key, uid)
        newest = ("", 0) if body is None else uid_and_generation(body)
        if newest[0] != uid or newest[1] > generation:
            raise StaleService

    async def _fetch(self, key: ServiceKey, uid: str) -> dict[str, Any] | None:
        """Read the service and update the cache; None: it was deleted."""
        body = await self._deps.client.list_one(resources.LLM_SERVICE, *key)
        if body is None or body["metadata"]["uid"] != uid:
            tombstone = {"metadata": {"namespace": key[0], "name": key[1], "uid": uid}}
            self._deps.cache.remove(resources.LLM_SERVICE, tombstone)
        if body is not None:
            self._deps.cache.upsert(resources.LLM_SERVICE, body)
        return body


def _event_manifest(entry: CachedObject, event: ServiceEvent) -> dict[str, Any]:
    regarding = {
        "apiVersion": resources.LLM_SERVICE.api_version,
        "kind": resources.LLM_SERVICE.kind,
        "name": entry.name,
        "namespace": entry.namespace,
        "uid": entry.uid,
    }
    return {
        "apiVersion": resources.EVENT.api_version,
        "kind": resources.EVENT.kind,
        # The usual form of event names; a generateName must not end in a dot.
        "metadata": {"name": f"{entry.name}.{time.time_ns():x}", "namespace": entry.namespace},
        "eventTime": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "reportingController": f"{resources.LLM_SERVICE.group}/operator",
        "reportingInstance": "quire-operator",
        "action": "Reconcile",
        "reason": event.reason,
        "type": event.type,
        "note": event.message,
        "regarding": regarding,
    }
