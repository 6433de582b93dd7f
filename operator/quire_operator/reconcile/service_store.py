# SPDX-License-Identifier: Apache-2.0
"""ServiceStore: LLMServices at the API server: their status and events are written, and they are read anew on doubt."""

import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from quire_operator.kube import kinds
from quire_operator.kube.errors import ApiError, Missing, Stale
from quire_operator.reconcile.cache import Entry, Key
from quire_operator.reconcile.events import Event, events
from quire_operator.reconcile.parts import Parts
from quire_operator.reconcile.wanted import Wanted, identity

log = logging.getLogger(__name__)


class Behind(Exception):
    """The service is not what it was taken for any more."""


class ServiceStore:
    """What is read and written of services themselves, not of their children."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def write_status(self, entry: Entry, previous: Mapping[str, Any], found: dict[str, Any]) -> None:
        """Replace the status, and tell what changed by it in events.

        Raises:
            Behind: the service has a later version by now, is another one, or gone.
            ApiError: the status was not written. Events that were not are no error.
        """
        parts = self._parts
        manifest = {
            "apiVersion": kinds.LLM_SERVICE.api_version,
            "kind": kinds.LLM_SERVICE.name,
            # Conditions: neither a new service of the same name nor a later generation gets the old one's status, and
            # no status that was written since `previous` was read is lost, such as another operator's.
            "metadata": {
                "name": entry.name,
                "namespace": entry.namespace,
                "uid": entry.uid,
                "generation": found["observedGeneration"],
                "resourceVersion": entry.version,
            },
            "status": found,
        }
        try:
            body = await parts.client.set_status(kinds.LLM_SERVICE, manifest)
        except (Missing, Stale):
            # Deleted, or made again, and nobody told us: a watch that lists again does not say what has gone.
            await self.check_newest((entry.namespace, entry.name), entry.uid, found["observedGeneration"])
            # Or somebody wrote to it meanwhile. That was ourselves where the answer was lost and it was sent again.
            known = parts.cache.get(kinds.LLM_SERVICE, entry.namespace, entry.name)
            if known is None or known.body().get("status") != found:
                raise Behind from None
        else:
            parts.cache.put(kinds.LLM_SERVICE, body)
        parts.wrote(kinds.LLM_SERVICE, "status")
        for event in events(previous, found):
            try:
                await parts.client.create(kinds.EVENT, _event_body(entry, event))
                parts.wrote(kinds.EVENT, "create")
            except ApiError as error:
                log.warning("event was not written reason=%s error=%s", event.reason, error)

    async def is_newest(self, key: Key, wanted: Wanted) -> bool:
        """Whether the API server has no later generation; asks it, and tells the cache."""
        body = await self._read(key, wanted.uid)
        return body is not None and identity(body) == (wanted.uid, wanted.generation)

    async def check_newest(self, key: Key, uid: str, generation: int) -> None:
        """Asked before something is written: whoever holds an old service, because its watch is late or its lease has
        gone to another, would undo what follows from the new one again and again.

        Raises:
            Behind: the API server has a later generation, another service, or none. The cache knows by now.
        """
        body = await self._read(key, uid)
        found = ("", 0) if body is None else identity(body)
        if found[0] != uid or found[1] > generation:
            raise Behind

    async def _read(self, key: Key, uid: str) -> dict[str, Any] | None:
        """The service as the API server has it now, of which the cache is told; None: it is gone."""
        body = await self._parts.client.find_listed(kinds.LLM_SERVICE, *key)
        if body is None or body["metadata"]["uid"] != uid:
            gone = {"metadata": {"namespace": key[0], "name": key[1], "uid": uid}}
            self._parts.cache.remove(kinds.LLM_SERVICE, gone)
        if body is not None:
            self._parts.cache.put(kinds.LLM_SERVICE, body)
        return body


def _event_body(entry: Entry, event: Event) -> dict[str, Any]:
    regarding = {
        "apiVersion": kinds.LLM_SERVICE.api_version,
        "kind": kinds.LLM_SERVICE.name,
        "name": entry.name,
        "namespace": entry.namespace,
        "uid": entry.uid,
    }
    return {
        "apiVersion": kinds.EVENT.api_version,
        "kind": kinds.EVENT.name,
        # As others name theirs; a generateName may not end in a dot.
        "metadata": {"name": f"{entry.name}.{time.time_ns():x}", "namespace": entry.namespace},
        "eventTime": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "reportingController": f"{kinds.LLM_SERVICE.group}/operator",
        "reportingInstance": "quire-operator",
        "action": "Reconcile",
        "reason": event.reason,
        "type": event.type,
        "note": event.message,
        "regarding": regarding,
    }
