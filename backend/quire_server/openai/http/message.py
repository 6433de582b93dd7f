# SPDX-License-Identifier: Apache-2.0
"""An HTTP request and its response on ASGI: reads the body under limits, parses JSON, carries what a route returns."""

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire_server.openai.errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODY_TIMEOUT_S = 60.0
"""Time for a client to send the body of its request."""
_MAX_DISCARDED_BODIES = 8
"""How many times the limit is read of a body that is too large."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""Of the W3C's Trace Context; anything else is not logged."""


def _keep(salt: str | None) -> str | None:
    return salt


class ClientDisconnected(Exception):
    """The client closed the connection before its request was complete."""


@dataclass(slots=True)
class HttpRequest:
    """One request. `headers` has lower-case names; the last of several equal headers counts."""

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    receive: Receive
    max_body_bytes: int
    request_id: str = ""
    """X-Request-Id of the client if it is valid, else a new id; returned with the response."""
    traceparent: str = ""
    """Trace and span of the client, for logs; empty without a valid header."""
    api_key_name: str = ""
    """Name of the API key; empty without keys."""
    path_arg: str = ""
    """End of the path on a route that accepts any."""
    salt_cache: Callable[[str | None], str | None] = _keep
    """Returns the salt of the prefix cache for the salt of the request."""
    watcher: "asyncio.Task[None] | None" = None
    """Waits for the client to leave, once the body was read."""

    @classmethod
    def from_scope(cls, scope: Scope, receive: Receive, max_body_bytes: int) -> "HttpRequest":
        """Build from an ASGI scope."""
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        traceparent = headers.get(b"traceparent", b"")
        trace = traceparent.decode() if _TRACEPARENT.fullmatch(traceparent) else ""
        return cls(scope["method"], scope["path"], headers, receive, max_body_bytes, request_id, trace)

    @property
    def log_ids(self) -> str:
        """The ids that connect a log line with those of other systems."""
        return f"request_id={self.request_id}" + (f" traceparent={self.traceparent}" if self.traceparent else "")

    async def json_object(self) -> dict[str, Any]:
        """Return the body, which must be a JSON object.

        Raises:
            ApiError: it is no JSON object, too large, or too late.
            ClientDisconnected: the client left.
        """
        body = await self._read_body()
        self.cancel_on_disconnect()
        try:
            document = msgspec.json.decode(body)
        except UnicodeDecodeError:
            raise ApiError(400, "body: is not UTF-8; encode the JSON as UTF-8") from None
        except msgspec.DecodeError as error:
            raise ApiError(400, f"body: is not JSON: {error}"[:300]) from None
        except RecursionError:
            raise ApiError(400, "body: the JSON is nested too deeply; nest less") from None
        if not isinstance(document, dict):
            raise ApiError(400, f"body: must be a JSON object, got {type(document).__name__}")
        return document

    async def _read_body(self) -> bytes:
        if self.headers.get(b"content-encoding", b"identity") != b"identity":
            raise ApiError(415, "content-encoding: compressed bodies are not supported; send the body uncompressed")
        chunks, num_bytes, limit = [], 0, self.max_body_bytes
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await self.receive()
                    if message["type"] != "http.request":
                        raise ClientDisconnected
                    num_bytes += len(message.get("body", b""))
                    # Without reading on, many clients would report a broken connection instead of the response.
                    if num_bytes <= limit:
                        chunks.append(message.get("body", b""))
                    elif num_bytes > _MAX_DISCARDED_BODIES * limit:
                        break
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise ApiError(408, f"body: not received within {BODY_TIMEOUT_S:g} s; send the request again") from None
        if num_bytes > limit:
            raise ApiError(413, f"body: larger than {limit} bytes; send less")
        return b"".join(chunks)

    def cancel_on_disconnect(self) -> None:
        """Cancel the current task when the client leaves."""
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
    """A response of server-sent events. An error before the first chunk becomes a response with its status."""

    chunks: AsyncGenerator[bytes, None]


Reply = Response | EventStream
