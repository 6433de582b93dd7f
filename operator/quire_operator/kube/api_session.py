# SPDX-License-Identifier: Apache-2.0
"""Sends HTTP requests to one API server, with the credentials from a cluster config. Independent of resources.

A request that fails raises an ApiError; the class of the error shows whether a retry can help. If no response arrives,
the session sends the request again, but only if that is safe. ApiSession is the base class of api_client.ApiClient.
"""

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
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
"""Timeouts of all requests except watches."""
_MAX_CONNECTIONS = 32
_CLOSE_TIMEOUT_S = 5.0
"""Maximum number of seconds to wait until all connections are closed. Usually, this takes only a few iterations of the
event loop."""
_RETRIABLE_METHODS = ("GET", "PATCH", "DELETE")
"""Requests with these methods are safe to send again. A PATCH request either is a server-side apply or contains
preconditions. A DELETE request contains the uid of the object."""
_RETRY_DELAYS_S = (0.2, 1.0)
_MAX_RETRY_AFTER_S = 2.0
"""If a response has a Retry-After of at most this number of seconds, the session waits and then sends the request
again. If the Retry-After is longer, the request fails, and the work queue schedules a retry."""

Body = dict[str, Any]


class ApiSession:
    """Sends requests to one API server. It is an asynchronous context manager."""

    def __init__(self, cluster_config: ClusterConfig) -> None:
        self.cluster_config = cluster_config
        self._sockets: WeakSet[socket.socket] = WeakSet()

    async def __aenter__(self) -> Self:
        # Each watch keeps its connection open, so watches have a separate connection pool.
        self._session = aiohttp.ClientSession(connector=self._create_connector(_MAX_CONNECTIONS), auto_decompress=True)
        self._watch_session = aiohttp.ClientSession(connector=self._create_connector(0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._watch_session.close()
        # When a request is cancelled, aiohttp starts the TLS shutdown and forgets the connection. The shutdown waits
        # for the server, but the server may be busy or may no longer exist.
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                while any(each.fileno() >= 0 for each in list(self._sockets)):
                    await asyncio.sleep(0.001)

    def _create_connector(self, limit: int) -> aiohttp.TCPConnector:
        def create_socket(address: aiohttp.AddrInfoType) -> socket.socket:
            sock = socket.socket(*address[:3])
            self._sockets.add(sock)
            return sock

        return aiohttp.TCPConnector(
            ssl=self.cluster_config.ssl_context or False, limit=limit, socket_factory=create_socket
        )

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
        """Send a request and return the parsed response. If no response arrives or the server has an error, the request
        is sent again, but only if that is safe."""
        data = None if body is None else orjson.dumps(body)
        headers = {"Accept": accept, **({"Content-Type": content_type} if data is not None else {})}
        for delay_s in (*_RETRY_DELAYS_S, None):
            try:
                return await self._request(method, path, data, params, headers)
            except ApiServerUnavailable as error:
                retry_after_s = error.retry_after_s or 0.0
                if delay_s is None or retry_after_s > _MAX_RETRY_AFTER_S or method not in _RETRIABLE_METHODS:
                    raise
                await asyncio.sleep(max(retry_after_s, delay_s * random.uniform(0.5, 1.0)))
        raise AssertionError("unreachable, because the last attempt returns or raises")

    async def _request(
        self, method: str, path: str, data: bytes | None, params: Mapping[str, str] | None, headers: Mapping[str, str]
    ) -> Body:
        request_line = f"{method} {path}"
        for is_last_attempt in (False, True):
            auth_headers = await self._auth(request_line)
            with _unavailable_without_response(request_line):
                async with self._send(
                    self._session, method, path, params, {**headers, **auth_headers}, _TIMEOUT, data
                ) as response:
                    content = await response.read()
            if response.status == 401 and not is_last_attempt:
                # ServiceAccount tokens are replaced before they expire. But if the clocks differ, a token can expire
                # early.
                self.cluster_config.invalidate_token(auth_headers)
                continue
            return _parse_response(request_line, response, content)
        raise AssertionError("unreachable, because the second attempt returns or raises")

    def _send(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        headers: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,
        data: bytes | None = None,
    ) -> Any:
        config = self.cluster_config
        target: dict[str, Any] = {"proxy": config.proxy_url, "server_hostname": config.tls_server_name}
        url = config.server + path
        return session.request(method, url, params=params, headers=headers, timeout=timeout, data=data, **target)

    async def _auth(self, request_line: str) -> Mapping[str, str]:
        try:
            return await self.cluster_config.auth_headers()
        except Unavailable as error:
            raise ApiServerUnavailable(f"{request_line}: not sent: {error}") from error

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], response_timeout_s: float = 30.0
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a request with a long response, such as a watch, and yield an iterator over its lines.

        The headers of the response must arrive within `response_timeout_s` seconds.

        Raises:
            ApiError: the API server rejected the request. Later errors are raised by the iterator; they are aiohttp's
            errors.
        """
        request_line = f"watch {path}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        auth_headers = await self._auth(request_line)
        headers = {"Accept": _JSON, **auth_headers}
        # aiohttp has no timeout for the response headers alone.
        with _unavailable_without_response(request_line):
            async with asyncio.timeout(response_timeout_s):
                response = await self._send(self._watch_session, "GET", path, params, headers, timeout)
        try:
            if response.status != 200:
                if response.status == 401:
                    self.cluster_config.invalidate_token(auth_headers)
                _parse_response(request_line, response, await response.read())
            yield _iter_lines(response.content)
        finally:
            # A TLS shutdown would wait for the server, but the server may no longer exist.
            if response.connection is not None and response.connection.transport is not None:
                response.connection.transport.abort()
            response.close()


@contextlib.contextmanager
def _unavailable_without_response(request_line: str) -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = f"{type(error).__name__}: {redact_urls(str(error))}"
        raise ApiServerUnavailable(f"{request_line}: no response ({reason})") from error


def _parse_response(request_line: str, response: aiohttp.ClientResponse, content: bytes) -> Body:
    try:
        body: Any = orjson.loads(content) if content else {}
    except ValueError:
        body = content.decode(errors="replace")[:200]
    if response.status >= 300:
        raise error_from_response(request_line, response.status, body, response.headers.get("Retry-After"))
    if not isinstance(body, dict):
        message = (
            f"{request_line}: the response is not a JSON object, got {body!r}; check whether a proxy answers instead "
            "of the API server"
        )
        raise ApiServerUnavailable(message, response.status)
    return body


async def _iter_lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a response; a line can have any length. StreamReader itself rejects lines of more than 128
    KiB, but an object can have 1.5 MiB."""
    remainder = b""
    async for chunk in content.iter_any():
        *lines, remainder = (remainder + chunk).split(b"\n")
        for line in lines:
            yield line
