# SPDX-License-Identifier: Apache-2.0
"""Status writer, which writes the status and the events of LLMServices.

If the cached service could be stale, the module reads the service again.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from quire_operator.controller.object_cache import CachedObject, ObjectCache, ServiceKey
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


@dataclass(slots=True)
class _LastStatus:
    """The last status of a service that this process wrote."""

    uid: str
    """uid of the service."""
    passes: int = 1
    """Number of passes over the service that this process has begun."""
    written: Mapping[str, Any] | None = None
    """The status as it was sent. None if the API server stores all of it, or nothing was written."""
    stored: Mapping[str, Any] | None = None
    """What the API server stores of `written`."""


class StatusWriter:
    """Reads and writes LLMServices, but not their child objects.

    An API server with an older CRD drops the fields of a status that the CRD does not have. Such a status never equals
    the one that a pass computes. So the writer remembers what it wrote, and the next pass starts from that.
    """

    def __init__(self, client: ApiClient, cache: ObjectCache, record_write: Callable[[Resource, str], None]) -> None:
        self._client, self._cache, self._record_write = client, cache, record_write
        self._last: dict[ServiceKey, _LastStatus] = {}
        self._logged_fields: set[str] = set()
        """Dropped fields that the log names."""

    def begin_pass(self, desired: ParsedService, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the status from which a pass starts: the one that this process wrote, if `stored` is what the API
        server stores of it, otherwise `stored`.
        """
        last = self._last.get(desired.key)
        if last is None or last.uid != desired.uid:
            self._last[desired.key] = _LastStatus(desired.uid)
            return stored
        last.passes += 1
        return last.written if last.written is not None and last.stored == stored else stored

    def forget_service(self, key: ServiceKey) -> None:
        """Discard what is stored about a deleted service."""
        self._last.pop(key, None)

    async def write_status(
        self, desired: ParsedService, resource_version: str, previous: Mapping[str, Any], status: dict[str, Any]
    ) -> None:
        """Replace the status, and create events for what has changed.

        Raises:
            StaleService: the service has a later version, was replaced, or was deleted.
            ApiError: the status was not written. Events that cannot be written are only logged.
        """
        told = status
        try:
            entry = await self._set_status(desired, resource_version, status)
            if self._last[desired.key].passes == 1 and previous.get("conditions"):
                # An earlier process has written the status. What the API server drops of it is missing in `previous`,
                # and that process has created the events about it.
                told = entry.body()["status"]
        except (ObjectNotFound, WriteConflict):
            # The service may have been deleted or recreated. If kopf missed the deletion, it does not report it later.
            await self.check_newest(desired)
            # Otherwise, the status was written in the meantime. This request itself can have written it, if the first
            # response was lost and the request was repeated.
            cached = self._cache.get(resources.LLM_SERVICE, *desired.key)
            if cached is None or cached.body().get("status") != status:
                raise StaleService from None
        self._record_write(resources.LLM_SERVICE, "status")
        for event in build_events(previous, told):
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
        entry = self._cache.upsert(
            resources.LLM_SERVICE, await self._client.set_status(resources.LLM_SERVICE, manifest)
        )
        last, stored = self._last[desired.key], entry.body().get("status") or {}
        last.written, last.stored = (None, None) if stored == status else (status, stored)
        if dropped := set(_missing_fields(status, stored)) - self._logged_fields:
            self._logged_fields |= dropped
            logger.warning(
                "the CRD of LLMService is older than the operator and has no fields for a part of the status, so run "
                "helm upgrade, or apply crds/llmservices.yaml fields=%s",
                ",".join(sorted(dropped)),
            )
        return entry

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


def _missing_fields(written: Mapping[str, Any], stored: Mapping[str, Any], prefix: str = "status") -> Iterator[str]:
    """Return the paths of the fields of `written` that `stored` does not have."""
    for name, value in written.items():
        if name not in stored:
            yield f"{prefix}.{name}"
        elif isinstance(value, Mapping):
            yield from _missing_fields(value, stored[name], f"{prefix}.{name}")
        elif isinstance(value, list):
            for item, stored_item in zip(value, stored[name], strict=False):
                if isinstance(item, Mapping):
                    yield from _missing_fields(item, stored_item, f"{prefix}.{name}[]")


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
