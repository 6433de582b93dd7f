# SPDX-License-Identifier: Apache-2.0
"""Session: requests to one API server as whoever the login says, with a token that holds. Knows no kinds of objects.

Raises ApiError by what can be done about it. What was lost on the way is sent again where that does no harm.
"""

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import aiohttp
import orjson

from quire_operator.kube.cluster_config import ClusterConfig
from quire_operator.kube.errors import ApiServerUnavailable, error_from_response
from quire_spec.errors import Unavailable
from quire_spec.net.redaction import redact_urls

_JSON = "application/json"
_CONNECT_TIMEOUT_S = 10.0
_TIMEOUT = aiohttp.ClientTimeout(total=30.0, sock_connect=_CONNECT_TIMEOUT_S)
"""Of every request but watches."""
_MAX_CONNECTIONS = 32
_CLOSE_TIMEOUT_S = 5.0
"""Of connections that have been ended, to be closed: a few turns of the event loop."""
_RETRIABLE_METHODS = ("GET", "PATCH", "DELETE")
"""Requests that may be sent again when the answer is lost; patches are applies, or replace what they test; deletes name
a uid."""
_RETRY_DELAYS_S = (0.2, 1.0)
_MAX_RETRY_AFTER_S = 2.0
"""A server that wants a longer pause gets it from the work queue, which does something else meanwhile."""

Body = dict[str, Any]


class ApiSession:
    """Requests to one API server; an asynchronous context manager."""

    def __init__(self, cluster_config: ClusterConfig) -> None:
        self.cluster_config = cluster_config
        self._sockets: WeakSet[socket.socket] = WeakSet()

    async def __aenter__(self) -> Self:
        # Watches hold a connection each for ever; they must not use up those of the workers.
        self._session = aiohttp.ClientSession(connector=self._create_connector(_MAX_CONNECTIONS), auto_decompress=True)
        self._watch_session = aiohttp.ClientSession(connector=self._create_connector(0))
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()
        await self._watch_session.close()
        # Of those whose request was cancelled aiohttp only begins to end TLS, and knows them no more: that takes a turn
        # of the other side, which may be busy or gone.
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                while any(each.fileno() >= 0 for each in list(self._sockets)):
                    await asyncio.sleep(0.001)

    def _create_connector(self, limit: int) -> aiohttp.TCPConnector:
        ssl_context = self.cluster_config.ssl_context if self.cluster_config.ssl_context is not None else False
        return aiohttp.TCPConnector(ssl=ssl_context, limit=limit, socket_factory=self._create_socket)

    def _create_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, socket_type, protocol, *_ = address
        sock = socket.socket(family, socket_type, protocol)
        self._sockets.add(sock)
        return sock

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        content_type: str = _JSON,
        accept: str = _JSON,
    ) -> Body:
        """One request; the parsed answer. Where there is none, or a server's error, it is sent again if it may be."""
        for delay_s in (*_RETRY_DELAYS_S, None):
            try:
                return await self._request(method, path, body, params, content_type, accept)
            except ApiServerUnavailable as error:
                retry_after_s = error.retry_after_s or 0.0
                if delay_s is None or retry_after_s > _MAX_RETRY_AFTER_S or method not in _RETRIABLE_METHODS:
                    raise
                await asyncio.sleep(max(retry_after_s, delay_s * random.uniform(0.5, 1.0)))
        raise AssertionError("the last attempt returns or raises")

    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        params: Mapping[str, str] | None,
        content_type: str,
        accept: str,
    ) -> Body:
        data = None if body is None else orjson.dumps(body)
        headers = {"Accept": accept, **({"Content-Type": content_type} if data is not None else {})}
        request_line = f"{method} {path}"
        for is_last_attempt in (False, True):
            auth_headers = await self._auth(request_line)
            try:
                async with self._session.request(
                    method,
                    self.cluster_config.server + path,
                    params=params,
                    data=data,
                    headers={**headers, **auth_headers},
                    timeout=_TIMEOUT,
                    proxy=self.cluster_config.proxy_url,
                    server_hostname=self.cluster_config.tls_server_name,
                ) as response:
                    content = await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise ApiServerUnavailable(
                    f"{request_line}: no answer ({type(error).__name__}: {redact_urls(str(error))})"
                ) from error
            if response.status == 401 and not is_last_attempt:
                # Tokens of a ServiceAccount are replaced while they still hold, but clocks differ.
                self.cluster_config.invalidate_token(auth_headers)
                continue
            return _parse_response(request_line, response, content)
        raise AssertionError("the second attempt returns or raises")

    async def _auth(self, request_line: str) -> Mapping[str, str]:
        try:
            return await self.cluster_config.auth_headers()
        except Unavailable as error:
            raise ApiServerUnavailable(f"{request_line}: not asked: {error}") from error

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], response_timeout_s: float = 30.0
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of an answer that goes on and on, and begins within `answer_s`.

        Raises:
            ApiError: it was refused. What breaks it later comes from the iterator, as aiohttp raises it.
        """
        request_line = f"watch {path}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        auth_headers = await self._auth(request_line)
        headers = {"Accept": _JSON, **auth_headers}
        try:
            # aiohttp has no limit for the time between request and answer alone.
            async with asyncio.timeout(response_timeout_s):
                response = await self._watch_session.get(
                    self.cluster_config.server + path,
                    params=params,
                    headers=headers,
                    timeout=timeout,
                    proxy=self.cluster_config.proxy_url,
                    server_hostname=self.cluster_config.tls_server_name,
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiServerUnavailable(
                f"{request_line}: no answer ({type(error).__name__}: {redact_urls(str(error))})"
            ) from error
        try:
            if response.status != 200:
                if response.status == 401:
                    self.cluster_config.invalidate_token(auth_headers)
                _parse_response(request_line, response, await response.read())
            yield _iter_lines(response.content)
        finally:
            # Ending TLS politely takes a turn of the other side, which may be gone.
            if response.connection is not None and response.connection.transport is not None:
                response.connection.transport.abort()
            response.close()


def _parse_response(request_line: str, response: aiohttp.ClientResponse, content: bytes) -> Body:
    try:
        body: Any = orjson.loads(content) if content else {}
    except ValueError:
        body = content.decode(errors="replace")[:200]
    if response.status >= 300:
        raise error_from_response(request_line, response.status, body, response.headers.get("Retry-After"))
    if not isinstance(body, dict):
        raise ApiServerUnavailable(
            f"{request_line}: answered {body!r}, which is not JSON; is there a proxy on the way?", response.status
        )
    return body


async def _iter_lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length; StreamReader's own refuses those over 128 KiB, and objects may have 1.5 MiB."""
    remainder = b""
    async for chunk in content.iter_any():
        *lines, remainder = (remainder + chunk).split(b"\n")
        for line in lines:
            yield line
