# SPDX-License-Identifier: Apache-2.0
"""An HTTP request and its response, on top of ASGI. The module reads and parses the body of a request within limits,
and defines what a route can return."""

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from quire_server.openai.errors import ApiError
from quire_server.openai.http.body_budget import BodyBudget
from quire_server.openai.http.ignored_fields import IgnoredFields
from quire_server.openai.http.json_body import decode_object
from quire_spec.errors import truncated_repr

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODY_TIMEOUT_S = 60.0
"""A client must send the complete body of its request within this many seconds."""
_MAX_DISCARDED_BODIES = 8
"""If a body is larger than the limit, the server reads and discards the rest, until the size of the body exceeds this
multiple of the limit."""
MAX_SESSION_CHARS = 256
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_RANK = re.compile(rb"[0-9]{1,9}")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""Pattern of a valid header traceparent (W3C Trace Context). A value that does not match is not logged."""


def _keep(salt: str | None) -> str | None:
    return salt


class ClientDisconnected(Exception):
    """The client closed the connection before its request was complete."""


@dataclass(slots=True)
class HttpRequest:
    """One HTTP request. `headers` contains names in lower case. If a header occurs several times, `headers` contains
    its last value."""

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    receive: Receive
    max_body_bytes: int
    budget: BodyBudget
    address: str = ""
    """Address of the client; empty if it is not known."""
    held_bytes: int = 0
    """Number of bytes of the budget that this request must release when it ends."""
    request_id: str = ""
    """Id of the request: the client's X-Request-Id if it is valid, else a new id. The response contains it."""
    traceparent: str = ""
    """The client's trace and span, for log lines. Empty if the request has no valid header traceparent."""
    api_key_name: str = ""
    """Name of the client's API key; empty if no keys are configured."""
    path_arg: str = ""
    """The last part of the path, if the route accepts any value there."""
    salt_cache: Callable[[str | None], str | None] = _keep
    """Function that converts the salt in the request to the salt that the prefix cache uses."""
    kv_source: str = ""
    """The pod that may have the KV blocks of the prompt, as HOST:PORT; empty if the request names none."""
    prefiller: str = ""
    """The pod that can compute the prompt, as HOST:PORT of its OpenAI API; empty if the request names none."""
    ignored_fields: IgnoredFields = field(default_factory=IgnoredFields)
    """The fields in the body that the server does not know."""
    response_headers: dict[bytes, bytes] = field(default_factory=dict)
    """Headers that the response gets beside those of its route."""
    watcher: "asyncio.Task[None] | None" = None
    """Task that waits until the client disconnects. It starts after the body was read."""

    @classmethod
    def from_scope(cls, scope: Scope, receive: Receive, max_body_bytes: int, budget: BodyBudget) -> "HttpRequest":
        """Build a request from an ASGI scope."""
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        traceparent = headers.get(b"traceparent", b"")
        trace = traceparent.decode() if _TRACEPARENT.fullmatch(traceparent) else ""
        address = (scope.get("client") or ("",))[0]
        limits = (max_body_bytes, budget, address)
        # Some clients add a slash to each path. Here, and not in the routes, because keys are checked by path.
        path = scope["path"].removesuffix("/") or "/"
        return cls(scope["method"], path, headers, receive, *limits, request_id=request_id, traceparent=trace)

    @property
    def client(self) -> str:
        """Name of the client for all that clients share: its API key, else its address."""
        return self.api_key_name or self.address

    @property
    def session_id(self) -> str:
        """The header X-Session-Id; empty if it is missing."""
        return self.headers.get(b"x-session-id", b"")[:MAX_SESSION_CHARS].decode("latin-1")

    @property
    def data_parallel_rank(self) -> int | None:
        """The core that must run the request, from the header X-data-parallel-rank; None if the header is missing.

        Raises:
            ApiError: the header is not a number.
        """
        value = self.headers.get(b"x-data-parallel-rank")
        if value is None:
            return None
        if not _RANK.fullmatch(value):
            raise ApiError(400, f"X-data-parallel-rank: must be a number from 0 on, got {truncated_repr(value)}")
        return int(value)

    @property
    def log_ids(self) -> str:
        """Text that contains the request id and the traceparent. With both, a line in this log can be connected to the
        logs of other systems."""
        return f"request_id={self.request_id}" + (f" traceparent={self.traceparent}" if self.traceparent else "")

    async def json_object(self) -> dict[str, Any]:
        """Return the body, which must be a JSON object.

        Raises:
            ApiError: the body is not a JSON object, too large, or too late.
            ClientDisconnected: the client disconnected.
        """
        body = await self._read_body()
        self.cancel_on_disconnect()
        return decode_object(body)

    async def _read_body(self) -> bytes:
        if self.headers.get(b"content-encoding", b"identity") != b"identity":
            raise ApiError(415, "content-encoding: compressed bodies are not supported; send the body uncompressed")
        chunks, num_bytes, limit = [], 0, self.max_body_bytes
        has_room = False
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                await self._reserve_body()
                has_room = True
                while True:
                    message = await self.receive()
                    if message["type"] != "http.request":
                        raise ClientDisconnected
                    num_bytes += len(message.get("body", b""))
                    # The rest of a body that is too large is read, but discarded. Otherwise, many clients would report
                    # a broken connection instead of the response.
                    if num_bytes <= limit:
                        chunks.append(message.get("body", b""))
                    elif num_bytes > _MAX_DISCARDED_BODIES * limit:
                        break
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            if not has_room:
                raise ApiError(
                    503, "body: other requests hold too many large bodies; try again later", retry_after_s=1.0
                ) from None
            raise ApiError(408, f"body: not received within {BODY_TIMEOUT_S:g} s; send the request again") from None
        if num_bytes > limit:
            raise ApiError(413, f"body: larger than {limit} bytes; send less")
        self._hold(num_bytes)
        return b"".join(chunks)

    async def _reserve_body(self) -> None:
        """Wait until the front can hold the body. A body whose length is unknown counts as the longest one."""
        length = self.headers.get(b"content-length", b"")
        num_bytes = int(length) if length.isdigit() else self.max_body_bytes
        if b"transfer-encoding" not in self.headers and not length:
            num_bytes = 0
        # A body that is too large is discarded.
        if num_bytes <= self.max_body_bytes:
            self.held_bytes = await self.budget.reserve(self.client, num_bytes)

    def _hold(self, num_bytes: int) -> None:
        """Release all but `num_bytes` of the budget."""
        if num_bytes < self.held_bytes:
            self.budget.release(self.client, self.held_bytes - num_bytes)
            self.held_bytes = num_bytes

    def release_body(self) -> None:
        """Called when the request does not hold its body any more."""
        self._hold(0)

    def end(self) -> None:
        """Release what the request holds."""
        if self.watcher is not None:
            self.watcher.cancel()
        self._hold(0)

    def cancel_on_disconnect(self) -> None:
        """Cancel the current task when the client disconnects."""
        task = asyncio.current_task()
        assert task is not None, "an ASGI server runs each request in a task"

        async def watch() -> None:
            while (await self.receive())["type"] != "http.disconnect":
                pass
            task.cancel()

        self.watcher = asyncio.create_task(watch())


@dataclass(slots=True)
class Response:
    """A complete response."""

    body: bytes
    status: int = 200
    content_type: bytes = b"application/json"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


@dataclass(slots=True)
class EventStream:
    """A response of server-sent events. If an error occurs before the first chunk, the client gets a complete response
    with the status of the error instead."""

    chunks: AsyncGenerator[bytes, None]


Reply = Response | EventStream
