# SPDX-License-Identifier: Apache-2.0
"""Two routes. GET /live returns a page with a chat and the state of the engine. GET /live/events sends this state
once a second. The chat sends its requests to the routes that all clients use.

The page is a single file, which needs no build step. The page is sent with a Content-Security-Policy. This policy
allows only the page's own script and style, which it identifies by hashes. A client can load the page without a key,
because the page contains no data. To receive the events, the client needs a key. Once a second, one snapshot is taken
for all pages that are open. If no page is open, no snapshot is taken.
"""

import asyncio
import base64
import contextlib
import hashlib
import re
import time
from collections.abc import AsyncGenerator
from importlib import resources
from typing import Any

import msgspec

from quire_server.openai.errors import ApiError
from quire_server.openai.http.message import EventStream, HttpRequest, Reply, Response
from quire_server.openai.text_client import TextClient
from quire_server.version import VERSION
from quire_spec.errors import QuireError

PAGE = "live.html"
INTERVAL_S = 1.0
MAX_WATCHERS = 32
_ELEMENT = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


class Live:
    """The routes."""

    def __init__(self, client: TextClient) -> None:
        self._client = client
        self._page = resources.files(__package__).joinpath(PAGE).read_bytes()
        self._page_headers = [
            (b"content-security-policy", content_security_policy(self._page)),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cache-control", b"no-cache"),
        ]
        self._num_watchers = 0
        self._snapshot = b""
        self._snapshot_time = 0.0
        self._lock = asyncio.Lock()
        self._closed = asyncio.Event()

    def close(self) -> None:
        """End all streams of events.

        When the server stops, it waits until all open streams have ended. These streams never end by themselves, so
        without this method the server would wait forever.
        """
        self._closed.set()

    async def page(self, request: HttpRequest) -> Reply:
        """GET /live."""
        return Response(self._page, content_type=b"text/html; charset=utf-8", headers=self._page_headers)

    async def events(self, request: HttpRequest) -> Reply:
        """GET /live/events: send a snapshot once a second as a server-sent event, until the client disconnects or the
        front stops."""
        if self._num_watchers >= MAX_WATCHERS:
            raise ApiError(
                503, f"live: {MAX_WATCHERS} pages are open already; close one, or read /metrics", retry_after_s=10.0
            )
        request.cancel_on_disconnect()
        return EventStream(self._events())

    async def _events(self) -> AsyncGenerator[bytes, None]:
        self._num_watchers += 1
        try:
            while not self._closed.is_set():
                yield await self._event()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), INTERVAL_S)
        finally:
            self._num_watchers -= 1

    async def _event(self) -> bytes:
        """Return the event for the current second. All open pages get the same event."""
        async with self._lock:
            now = time.monotonic()
            if not self._snapshot or now - self._snapshot_time > INTERVAL_S / 2:
                self._snapshot = b"data: %b\n\n" % msgspec.json.encode(await self._take_snapshot())
                self._snapshot_time = now
            return self._snapshot

    async def _take_snapshot(self) -> dict[str, Any]:
        try:
            snapshot = await self._client.call("live", dict[str, Any])
        except QuireError as error:
            # The page stays open, and shows why the state is not available.
            snapshot = {"unavailable": str(error)}
        return {"time": time.time(), "version": VERSION, **snapshot}


def content_security_policy(page: bytes) -> bytes:
    """Return the Content-Security-Policy of the page. The page can use only its own inline script and style, and can
    send requests only to its own server."""
    hashes = {b"script": b"", b"style": b""}
    for kind, content in _ELEMENT.findall(page):
        hashes[kind] += b" 'sha256-%b'" % base64.b64encode(hashlib.sha256(content).digest())
    return (
        b"default-src 'none'; script-src%b; style-src%b; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        b"frame-ancestors 'none'" % (hashes[b"script"], hashes[b"style"])
    )
