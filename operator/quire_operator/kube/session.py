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

from quire_operator.kube.errors import Busy, from_answer
from quire_operator.kube.login import Login
from quire_spec.errors import Unavailable
from quire_spec.net.redaction import redact_urls

_JSON = "application/json"
_CONNECT_S = 10.0
_TIMEOUT = aiohttp.ClientTimeout(total=30.0, sock_connect=_CONNECT_S)
"""Of every request but watches."""
_MAX_CONNECTIONS = 32
_CLOSE_S = 5.0
"""Of connections that have been ended, to be closed: a few turns of the event loop."""
_TWICE = ("GET", "PATCH", "DELETE")
"""Requests that may be sent again when the answer is lost; patches are applies, or replace what they test; deletes name
a uid."""
_RETRY_S = (0.2, 1.0)
_MOST_RETRY_S = 2.0
"""A server that wants a longer pause gets it from the work queue, which does something else meanwhile."""

Body = dict[str, Any]


class Session:
    """Requests to one API server; an asynchronous context manager."""

    def __init__(self, login: Login) -> None:
        self.login = login
        self._sockets: WeakSet[socket.socket] = WeakSet()

    async def __aenter__(self) -> Self:
        # Watches hold a connection each for ever; they must not use up those of the workers.
        self._session = aiohttp.ClientSession(connector=self._connector(_MAX_CONNECTIONS), auto_decompress=True)
        self._watches = aiohttp.ClientSession(connector=self._connector(0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()
        await self._watches.close()
        # Of those whose request was cancelled aiohttp only begins to end TLS, and knows them no more: that takes a turn
        # of the other side, which may be busy or gone.
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                while any(each.fileno() >= 0 for each in list(self._sockets)):
                    await asyncio.sleep(0.001)

    def _connector(self, limit: int) -> aiohttp.TCPConnector:
        tls = self.login.tls if self.login.tls is not None else False
        return aiohttp.TCPConnector(ssl=tls, limit=limit, socket_factory=self._socket)

    def _socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, *_ = address
        made = socket.socket(family, kind, protocol)
        self._sockets.add(made)
        return made

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
        for wait in (*_RETRY_S, None):
            try:
                return await self._request(method, path, body, params, content_type, accept)
            except Busy as error:
                wanted = error.retry_after_s or 0.0
                if wait is None or wanted > _MOST_RETRY_S or method not in _TWICE:
                    raise
                await asyncio.sleep(max(wanted, wait * random.uniform(0.5, 1.0)))
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
        asked = f"{method} {path}"
        for last in (False, True):
            who = await self._who(asked)
            try:
                async with self._session.request(
                    method,
                    self.login.server + path,
                    params=params,
                    data=data,
                    headers={**headers, **who},
                    timeout=_TIMEOUT,
                    proxy=self.login.proxy,
                    server_hostname=self.login.server_name,
                ) as answer:
                    text = await answer.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise Busy(f"{asked}: no answer ({type(error).__name__}: {redact_urls(str(error))})") from error
            if answer.status == 401 and not last:
                # Tokens of a ServiceAccount are replaced while they still hold, but clocks differ.
                self.login.forget(who)
                continue
            return _parsed(asked, answer, text)
        raise AssertionError("the second attempt returns or raises")

    async def _who(self, asked: str) -> Mapping[str, str]:
        try:
            return await self.login.headers()
        except Unavailable as error:
            raise Busy(f"{asked}: not asked: {error}") from error

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], answer_s: float = 30.0
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of an answer that goes on and on, and begins within `answer_s`.

        Raises:
            ApiError: it was refused. What breaks it later comes from the iterator, as aiohttp raises it.
        """
        asked = f"watch {path}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        who = await self._who(asked)
        headers = {"Accept": _JSON, **who}
        try:
            # aiohttp has no limit for the time between request and answer alone.
            async with asyncio.timeout(answer_s):
                answer = await self._watches.get(
                    self.login.server + path,
                    params=params,
                    headers=headers,
                    timeout=timeout,
                    proxy=self.login.proxy,
                    server_hostname=self.login.server_name,
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Busy(f"{asked}: no answer ({type(error).__name__}: {redact_urls(str(error))})") from error
        try:
            if answer.status != 200:
                if answer.status == 401:
                    self.login.forget(who)
                _parsed(asked, answer, await answer.read())
            yield _lines(answer.content)
        finally:
            # Ending TLS politely takes a turn of the other side, which may be gone.
            if answer.connection is not None and answer.connection.transport is not None:
                answer.connection.transport.abort()
            answer.close()


def _parsed(asked: str, answer: aiohttp.ClientResponse, text: bytes) -> Body:
    try:
        body: Any = orjson.loads(text) if text else {}
    except ValueError:
        body = text.decode(errors="replace")[:200]
    if answer.status >= 300:
        raise from_answer(asked, answer.status, body, answer.headers.get("Retry-After"))
    if not isinstance(body, dict):
        raise Busy(f"{asked}: answered {body!r}, which is not JSON; is there a proxy on the way?", answer.status)
    return body


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length; StreamReader's own refuses those over 128 KiB, and objects may have 1.5 MiB."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
