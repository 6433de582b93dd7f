# SPDX-License-Identifier: Apache-2.0
"""Watch: keeps a copy of all objects of a kind current, whatever happens to connections and servers on the way.

List, then watch from there; go on from the last version after a cut; list again when that is gone (410). A stream that
says nothing for a while is cut here, since a dead connection says nothing either: API servers send a bookmark a minute.
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

from quire_operator.kube.client import Client
from quire_operator.kube.errors import ApiError, Expired, error_of
from quire_operator.kube.heard import Heard
from quire_operator.kube.kinds import Kind

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where objects go to."""

    def replace(self, kind: Kind, namespace: str | None, bodies: tuple[dict[str, Any], ...]) -> None:
        """These are all objects of the namespace (None: of all)."""
        ...

    def put(self, kind: Kind, body: dict[str, Any]) -> None:
        """This one is new, or has changed."""
        ...

    def remove(self, kind: Kind, body: dict[str, Any]) -> None:
        """This one is gone."""
        ...


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a watch waits for what."""

    inactivity_s: float = 90.0
    """Nothing heard for so long is a dead connection; bookmarks come after 60 to 75 s."""
    server_s: float = 300.0
    """The API server ends a watch after so long; a tenth more at random, so that not all come back at once."""
    max_backoff_s: float = 30.0
    """Between attempts that fail."""

    @property
    def deaf_s(self) -> float:
        """Nothing heard for so long: cutting and connecting anew did not help."""
        return 3 * self.inactivity_s


class Watch:
    """A copy of one kind's objects, in one namespace or in all."""

    def __init__(
        self,
        client: Client,
        kind: Kind,
        sink: Sink,
        namespace: str | None = None,
        labels: str = "",
        patience: Patience | None = None,
    ) -> None:
        self.kind, self.namespace, self.labels = kind, namespace, labels
        self.synced = asyncio.Event()
        """Set once the first list is in."""
        self.heard = Heard(kind, namespace)
        self._client, self._sink, self._patience = client, sink, patience or Patience()
        self._version = ""
        """Where to go on from; empty: list first."""

    async def run(self) -> None:
        """Never returns; ends by cancellation."""
        failures = 0
        while True:
            began = time.monotonic()
            try:
                if not self._version:
                    await self._list()
                await self._stream()
                failures = 0
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                if isinstance(error, Expired):
                    self._version = ""
                lasted = time.monotonic() - began > self._patience.max_backoff_s
                failures = 1 if lasted else failures + 1
                wait = max(getattr(error, "retry_after_s", None) or 0.0, self._backoff(failures))
                # API servers before 1.25 send no bookmarks of a kind of which nothing ever happened.
                silent = lasted and isinstance(error, TimeoutError)
                log.log(
                    logging.INFO if silent else logging.WARNING,
                    "watch was cut kind=%s namespace=%s wait_s=%.1f error=%s",
                    self.kind.name, self.namespace or "all", wait, str(error) or type(error).__name__,
                )  # fmt: skip
                await asyncio.sleep(wait)

    async def _list(self) -> None:
        found = await self._client.list(self.kind, self.namespace, self.labels)
        self._sink.replace(self.kind, self.namespace, found.items)
        self._version = found.version
        self.heard.now()
        self.synced.set()

    async def _stream(self) -> None:
        patience = self._patience
        server_s = patience.server_s * random.uniform(1.0, 1.1)
        async with (
            self._client.watch(
                self.kind, self.namespace, self._version, self.labels, server_s, patience.inactivity_s
            ) as lines,
            contextlib.aclosing(_timed(lines, patience.inactivity_s)) as timed,
        ):
            self.heard.now()
            async for line in timed:
                self.heard.now()
                if line:
                    self._take(orjson.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        what, body = event["type"], event["object"]
        if what == "ERROR":
            raise error_of(event, f"watch of {self.kind.plural}")
        if what == "DELETED":
            self._sink.remove(self.kind, body)
        elif what != "BOOKMARK":
            self._sink.put(self.kind, body)
        self._version = body["metadata"]["resourceVersion"]

    def _backoff(self, failures: int) -> float:
        return random.uniform(0.5, 1.0) * min(self._patience.max_backoff_s, 0.5 * 2.0 ** min(failures, 10))


async def _timed(lines: AsyncIterator[bytes], inactivity_s: float) -> AsyncGenerator[bytes, None]:
    """The same lines; TimeoutError when none comes for a while."""
    while True:
        try:
            async with asyncio.timeout(inactivity_s):
                line = await anext(lines)
        except StopAsyncIteration:
            return
        yield line
