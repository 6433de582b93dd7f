# SPDX-License-Identifier: Apache-2.0
"""An attack is one hostile request, and what counts as its answer. `Target` sends requests of every kind."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio

MAX_ANSWER_CHARS = 300
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Attack:
    """A hostile request."""

    group: str
    name: str
    send: "Callable[[Target], Awaitable[str]]"
    """Sends the request and returns its answer: a status and the start of the body, or `closed`. An answer that starts
    with `wrong` means that the attack has succeeded."""
    limit_s: float = 10.0
    """The documented limit. The answer must arrive within this time and 2 s."""


class Target:
    """A running service, and the means to attack it."""

    def __init__(
        self, ports: Mapping[str, int], key: str, other_key: str, flood_key: str, admin_key: str, folder: Path
    ) -> None:
        """Attackers use `key`, and those that use up a share of their client use `flood_key`. `other_key` is the key of
        another client. `folder` is the folder from which adapters can be loaded."""
        self.ports = dict(ports)
        self.key, self.other_key, self.flood_key, self.admin_key = key, other_key, flood_key, admin_key
        self.folder = folder
        self._session: aiohttp.ClientSession | None = None
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> "Target":
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.ports['grpc']}", options=options)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None and self._channel is not None
        await self._session.close()
        await self._channel.close()

    def headers(self, key: str | None = None) -> dict[str, str]:
        return {"Content-Type": "application/json", "Authorization": f"Bearer {self.key if key is None else key}"}

    async def request(
        self,
        port: str,
        path: str,
        body: Any = None,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
        max_chars: int = MAX_ANSWER_CHARS,
    ) -> str:
        """Send an HTTP request, and return the status and the start of the body. Unless `body` is a bytes object, it is
        sent as JSON."""
        assert self._session is not None
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.ports[port]}{path}"
        sent = self.headers() if headers is None else headers
        try:
            async with self._session.request(
                method or ("GET" if body is None else "POST"), url, data=data, headers=sent
            ) as response:
                text = (await response.content.read(max_chars)).decode(errors="replace")
                while await response.content.read(GIB):
                    pass
                return f"{response.status} {text}"
        except (aiohttp.ClientError, OSError) as error:
            return f"closed {type(error).__name__}"

    async def post(self, path: str, body: Any) -> str:
        """Send a JSON body to the OpenAI port."""
        return await self.request("openai", path, body)

    async def admin(self, path: str, body: Any) -> str:
        """Send a JSON body to the OpenAI port with the admin key."""
        return await self.request("openai", path, body, headers=self.headers(self.admin_key))

    async def raw(self, port: str, *parts: bytes, pause_s: float = 0.0, half_close: bool = False) -> str:
        """Send bytes on a new connection; return the status line of the answer, or `closed`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.ports[port])
        try:
            with contextlib.suppress(ConnectionError):
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(pause_s)
                if half_close:
                    writer.write_eof()
            try:
                answer = await reader.read(4096)
            except ConnectionError:
                answer = b""
            return answer.split(b"\r\n")[0].decode(errors="replace").removeprefix("HTTP/1.1 ") or "closed"
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def grpc(self, method: str, messages: Iterable[bytes], is_stream: bool = False, timeout_s: float = 60) -> str:
        """Call a method of the server with serialized messages."""
        assert self._channel is not None
        path = f"/inference.GRPCInferenceService/{method}"
        try:
            if not is_stream:
                [message] = messages
                call = self._channel.unary_unary(path)
                return f"OK {(await call(message, timeout=timeout_s))[:MAX_ANSWER_CHARS]!r}"
            stream = self._channel.stream_stream(path)(iter(messages), timeout=timeout_s)
            answers = [answer async for answer in stream]
            return f"OK {b' '.join(answers)[:MAX_ANSWER_CHARS]!r}"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} {str(error.details())[:MAX_ANSWER_CHARS]}"
        except (ValueError, TypeError) as error:
            return f"not sent {error}"


def json_with(document: Mapping[str, Any], name: str, raw_value: str) -> bytes:
    """Return a JSON object in which the field `name` has a value that is given as JSON text, also invalid text."""
    text = json.dumps(document)
    separator = ", " if document else ""
    return (text[:-1] + f'{separator}"{name}": {raw_value}}}').encode("utf-8", "surrogatepass")
