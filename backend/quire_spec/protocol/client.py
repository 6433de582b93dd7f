# SPDX-License-Identifier: Apache-2.0
"""Client of a process of the pod: connects to its socket, calls its methods, and connects again.

All processes use this client: the stubs, the OpenAI front, the text process towards the core, and the supervisor. When
the connection ends, every call that is open raises ConnectionLost. A client belongs to one event loop.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire_spec.errors import Internal, QuireError, Unavailable, error_from_code
from quire_spec.protocol.connection import Connection, ConnectionHandler
from quire_spec.protocol.framing import InvalidFrame
from quire_spec.protocol.messages import Call, Failure, Hello, Message, Reply, to_raw

RECONNECT_INTERVAL_S = 0.05
"""Seconds between two attempts to connect. This is short compared with the time that a process takes to restart."""
CALL_TIMEOUT_S = 30.0

T = TypeVar("T")
logger = logging.getLogger(__name__)


class ConnectionLost(Unavailable):
    """The connection to the process has ended. The caller must repeat the call when the process has been restarted."""


class Client(ConnectionHandler):
    """The connection to one process, and the calls that are open on it."""

    def __init__(self, path: Path, hello: Hello, peer_name: str, accepted: Collection[type[Message]] = ()) -> None:
        """`accepted` are the types of messages that the process can send, apart from the answers to calls. `peer_name`
        is the name of the process in errors and logs."""
        self.peer_name = peer_name
        self.is_closing = False
        """True if this process closes the connection, so that its end is not reported as a problem."""
        self.closed = asyncio.Event()
        """Event that is set when the connection has ended."""
        self._path = path
        self._hello = hello
        self._accepted: tuple[type[Message], ...] = (Reply, Failure, *accepted)
        self._ids = itertools.count(1)
        self._connection: Connection | None = None
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}

    @property
    def is_connected(self) -> bool:
        """True while there is a connection to the process."""
        return self._connection is not None

    def new_id(self) -> int:
        """Return an id for a request or a call. It is unique for this client."""
        return next(self._ids)

    async def connect(self) -> None:
        """Connect and send Hello; raises OSError if no process listens on the socket (yet)."""
        self.is_closing = False
        self.closed.clear()
        await asyncio.get_running_loop().create_unix_connection(
            lambda: Connection(self, self._accepted, self._hello), str(self._path)
        )

    async def run(self) -> None:
        """Connect, and connect again whenever the connection ends. This runs until the task is cancelled."""
        while True:
            with contextlib.suppress(OSError):
                if not self.is_connected:
                    await self.connect()
                await self.closed.wait()
            # Also after a connection, because the process can close each one at once.
            await asyncio.sleep(RECONNECT_INTERVAL_S)

    async def close(self) -> None:
        """Close the connection. Open calls raise ConnectionLost."""
        if self._connection is not None:
            self.is_closing = True
            self._connection.abort()
            await self.closed.wait()

    def send(self, message: Message) -> None:
        """Send a message; do nothing if there is no connection.

        Raises:
            InvalidArgument: the message cannot be encoded, or is too large.
        """
        if self._connection is not None:
            self._connection.send(message)

    async def call(
        self,
        method: str,
        result_type: type[T],
        args: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = CALL_TIMEOUT_S,
    ) -> T:
        """Call a method of the process and return its result. With the timeout None, wait until it answers.

        Raises:
            ConnectionLost: the connection ended before or during the call.
            Unavailable: the process did not respond within `timeout_s`.
            InvalidArgument: an argument cannot be sent.
            QuireError: the error that the process returned, with its code.
        """
        if self._connection is None:
            raise ConnectionLost(f"{self.peer_name} is starting or restarting; retry later")
        call_id = self.new_id()
        future: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._connection.send(Call(call_id, method, to_raw(args or {}, method)))
            async with asyncio.timeout(timeout_s):
                result = await future
        except TimeoutError:
            raise Unavailable(f"{self.peer_name} did not respond to {method!r} within {timeout_s:g} s") from None
        finally:
            del self._calls[call_id]
        try:
            return msgspec.msgpack.decode(result, type=result_type)
        except (ValueError, RecursionError) as error:
            raise Internal(f"{self.peer_name}: the result of {method!r} is invalid: {error}") from None

    def on_request_failed(self, request_id: int, error: QuireError) -> None:
        """Called when a request that is not a call has failed."""

    def on_connected(self, connection: Connection) -> None:
        """Called when the connection is open."""
        logger.info("connected to %s", self.peer_name)
        self._connection = connection

    def on_message(self, connection: Connection, message: Message) -> None:
        """Called for each message of the process."""
        if isinstance(message, Reply):
            if (future := self._calls.get(message.id)) is not None and not future.done():
                future.set_result(message.result)
        elif isinstance(message, Failure):
            self._fail(message.id, error_from_code(message.error_code, message.error))

    def on_invalid_frame(self, connection: Connection, frame: InvalidFrame) -> None:
        """Called for each frame that was not accepted. Only the requests of this frame fail."""
        logger.error("%s sent an invalid frame error=%s", self.peer_name, frame.error)
        for request_id in frame.request_ids:
            self._fail(request_id, Internal(f"{self.peer_name}: {frame.error}"))

    def on_closed(self, connection: Connection) -> None:
        """Called when the connection closes."""
        self._connection = None
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self.lost_error())
        self.closed.set()

    def lost_error(self) -> ConnectionLost:
        """Return the error of requests and calls that are open when the connection ends."""
        return ConnectionLost(f"{self.peer_name} ended and is restarting; retry later")

    def _fail(self, request_id: int, error: QuireError) -> None:
        future = self._calls.get(request_id)
        if future is None:
            self.on_request_failed(request_id, error)
        elif not future.done():
            future.set_exception(error)
