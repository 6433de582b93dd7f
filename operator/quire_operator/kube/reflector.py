# SPDX-License-Identifier: Apache-2.0
"""Reflector: keeps a local copy of all objects of one kind up to date, even if a connection is lost or the server
restarts.

A reflector first lists the objects and then watches them. If it loses the connection, it continues the watch from the
last resourceVersion. If the API server has compacted this version (410), the reflector lists the objects again. The
reflector closes a watch that has not received data for too long. An API server sends a bookmark every minute, so such a
connection is dead. The controller runs a reflector for each child kind and namespace.

The operator does not use kopf to watch child kinds, for four reasons, which were tested with kopf 1.45.2. First, kopf
needs 0.7 ms of CPU time for an event, but the reflector needs only 0.1 ms. Second, kopf ends if the watch of one kind
fails with an error or gets a 404, or if it gets a 403 for some time. The operator would then end too. Third, if an
object is deleted while kopf does not watch, kopf lists the objects again, but does not send a DELETED event. Fourth,
kopf does not signal when it has finished the first list.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import orjson

from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.errors import ApiError, Forbidden, ResourceVersionExpired, error_from_event
from quire_operator.kube.resources import Resource
from quire_operator.kube.watch_heartbeat import WatchHeartbeat
from quire_spec.backoff import backoff

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.5


class ObjectStore(Protocol):
    """A store to which a reflector writes the objects."""

    def replace(self, resource: Resource, namespace: str | None, bodies: tuple[dict[str, Any], ...]) -> None:
        """Replace all objects of a kind in one namespace, or in all namespaces if `namespace` is None."""
        ...

    def upsert(self, resource: Resource, body: dict[str, Any]) -> object:
        """Store an object that is new or has changed."""
        ...

    def remove(self, resource: Resource, body: dict[str, Any]) -> None:
        """Remove a deleted object."""
        ...


@dataclass(frozen=True, slots=True)
class WatchTimeouts:
    """Timeouts of a watch."""

    inactivity_s: float = 90.0
    """If a connection delivers no data for this number of seconds, the reflector closes it as dead. Bookmarks arrive
    every 60 to 75 s."""
    server_timeout_s: float = 300.0
    """The API server ends a watch after this number of seconds. The reflector adds a random part of up to 10 %, so that
    not all watches restart at the same time."""
    max_backoff_s: float = 30.0
    """Maximum number of seconds between a failed attempt and the next attempt."""

    @property
    def stale_after_s(self) -> float:
        """A watch is stale if the API server has not responded for this number of seconds. By then, the reflector has
        tried several new connections, and all have failed."""
        return 3 * self.inactivity_s


class Reflector:
    """Keeps a copy of the objects of one kind, in one namespace or in all namespaces."""

    def __init__(
        self,
        client: ApiClient,
        resource: Resource,
        store: ObjectStore,
        namespace: str | None = None,
        label_selector: str = "",
        timeouts: WatchTimeouts | None = None,
    ) -> None:
        self.resource, self.namespace, self.label_selector = resource, namespace, label_selector
        self.synced = asyncio.Event()
        """Event that is set after the first list."""
        self.heartbeat = WatchHeartbeat(resource, namespace)
        self._client, self._store, self._timeouts = client, store, timeouts or WatchTimeouts()
        self._resource_version = ""
        """The watch continues from this resourceVersion. If it is empty, the reflector must list the objects first."""

    async def run(self) -> None:
        """Run until cancellation."""
        failures = 0
        while True:
            started_at = time.monotonic()
            try:
                if not self._resource_version:
                    await self._list()
                await self._watch()
                failures = 0
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                if isinstance(error, ApiError) and error.status:
                    self.heartbeat.record_error(str(error) if isinstance(error, Forbidden) else "")
                    if isinstance(error, Forbidden):
                        # Changes can be missed until the permission returns.
                        self._resource_version = ""
                if isinstance(error, ResourceVersionExpired):
                    self._resource_version = ""
                was_established = time.monotonic() - started_at > self._timeouts.max_backoff_s
                failures = 1 if was_established else failures + 1
                retry_delay_s = backoff(failures, _FIRST_BACKOFF_S, self._timeouts.max_backoff_s, jitter=0.5)
                delay_s = max(getattr(error, "retry_after_s", None) or 0.0, retry_delay_s)
                logger.warning(
                    "watch was cut kind=%s namespace=%s wait_s=%.1f error=%s",
                    self.resource.kind, self.namespace or "all", delay_s, str(error) or type(error).__name__,
                )  # fmt: skip
                await asyncio.sleep(delay_s)

    async def _list(self) -> None:
        object_list = await self._client.list(self.resource, self.namespace, self.label_selector)
        self._store.replace(self.resource, self.namespace, object_list.items)
        self._resource_version = object_list.resource_version
        self.heartbeat.beat()
        self.synced.set()

    async def _watch(self) -> None:
        timeouts = self._timeouts
        server_timeout_s = timeouts.server_timeout_s * random.uniform(1.0, 1.1)
        async with (
            self._client.watch(
                self.resource,
                self.namespace,
                self._resource_version,
                self.label_selector,
                server_timeout_s,
                timeouts.inactivity_s,
            ) as lines,
            contextlib.aclosing(_with_inactivity_timeout(lines, timeouts.inactivity_s)) as timed_lines,
        ):
            self.heartbeat.beat()
            async for line in timed_lines:
                self.heartbeat.beat()
                if line:
                    self._handle_event(orjson.loads(line))

    def _handle_event(self, event: dict[str, Any]) -> None:
        event_type, body = event["type"], event["object"]
        if event_type == "ERROR":
            # Like client-go, list again: if the watch continued from this version, it could get the same error.
            self._resource_version = ""
            raise error_from_event(event, f"watch of {self.resource.plural}")
        if event_type == "DELETED":
            self._store.remove(self.resource, body)
        elif event_type != "BOOKMARK":
            self._store.upsert(self.resource, body)
        self._resource_version = body["metadata"]["resourceVersion"]


async def _with_inactivity_timeout(lines: AsyncIterator[bytes], inactivity_s: float) -> AsyncGenerator[bytes, None]:
    """Yield the lines. If no line arrives for `inactivity_s` seconds, raise TimeoutError."""
    while True:
        try:
            async with asyncio.timeout(inactivity_s):
                line = await anext(lines)
        except StopAsyncIteration:
            return
        yield line
