# SPDX-License-Identifier: Apache-2.0
"""Server of a process of the pod: accepts connections and answers calls.

A process has one table of methods. A method is a typed function: its arguments are decoded from its annotations, and
its result is sent to the caller. If a call or another request is invalid, only this request fails.
"""

import asyncio
import contextlib
import inspect
import logging
import typing
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec

from quire_spec.errors import PROCESS_ENDS, Internal, InvalidArgument, QuireError
from quire_spec.protocol.connection import Connection, ConnectionHandler, listen
from quire_spec.protocol.framing import MAX_PAYLOAD_BYTES, InvalidFrame
from quire_spec.protocol.messages import Call, Failure, Message, Reply, to_raw

logger = logging.getLogger(__name__)


class Server(ConnectionHandler):
    """The connections of one socket, and the calls that are running."""

    def __init__(
        self,
        methods: Iterable[Callable[..., Any]],
        accepted: Collection[type[Message]] = (),
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        """Create a server.

        Args:
            methods: the functions that clients can call. A function has keyword arguments with annotations; it can be a
                coroutine function.
            accepted: types of messages that are accepted in addition to calls. Subclasses handle them in `on_request`.
            max_payload_bytes: longer payloads are not accepted.
        """
        self._methods = {function.__name__: _Method(function) for function in methods}
        self._accepted: tuple[type[Message], ...] = (Call, *accepted)
        self._max_payload_bytes = max_payload_bytes
        self._calls: set[asyncio.Task[None]] = set()

    async def listen(self, path: Path) -> asyncio.Server:
        """Start to accept connections at `path`."""
        return await listen(path, lambda: Connection(self, self._accepted, max_payload_bytes=self._max_payload_bytes))

    @contextlib.asynccontextmanager
    async def listening(self, path: Path) -> AsyncIterator[None]:
        """Accept connections at `path` while the context is open. When the context ends, calls that are still running
        are cancelled."""
        server = await self.listen(path)
        try:
            yield
        finally:
            server.close()
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)

    def on_request(self, connection: Connection, message: Message) -> None:
        """Called for each message that is not a call. If it raises a QuireError, the requests of the message fail."""
        raise Internal(f"{type(message).__name__}: not accepted on this connection")

    def on_message(self, connection: Connection, message: Message) -> None:
        """Called for each message of a client."""
        if isinstance(message, Call):
            # A call runs to its end even if its caller disconnects. Otherwise, a change could remain half done.
            task = asyncio.get_running_loop().create_task(self._answer(connection, message))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            return
        try:
            self.on_request(connection, message)
        except QuireError as error:
            self.reject(connection, InvalidFrame(type(message), message.request_ids, error))

    def on_invalid_frame(self, connection: Connection, frame: InvalidFrame) -> None:
        """Called for each frame that was not accepted."""
        self.reject(connection, frame)

    def reject(self, connection: Connection, frame: InvalidFrame) -> None:
        """Send the error of a frame to the client. Only the requests of this frame fail."""
        logger.warning("rejected a frame peer=%s error=%s", connection.peer, frame.error)
        for request_id in frame.request_ids:
            connection.send(Failure.from_error(request_id, frame.error))

    async def _answer(self, connection: Connection, call: Call) -> None:
        try:
            if (method := self._methods.get(call.method)) is None:
                raise InvalidArgument(f"method {call.method[:80]!r} is unknown; use one of {', '.join(self._methods)}")
            connection.send(Reply(call.id, await method(call.args)))
        except QuireError as error:
            connection.send(Failure.from_error(call.id, error))
        except PROCESS_ENDS:
            raise
        except BaseException:
            logger.exception("a call failed method=%s", call.method)
            reason = f"{call.method}: internal error; see the log of the process"
            connection.send(Failure.from_error(call.id, Internal(reason)))


class _Method:
    """A function of the table."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._name = function.__name__
        hints = typing.get_type_hints(function, include_extras=True)
        fields = [
            (name, hints[name], msgspec.NODEFAULT if parameter.default is parameter.empty else parameter.default)
            for name, parameter in inspect.signature(function).parameters.items()
        ]
        args_type = msgspec.defstruct(self._name, fields, kw_only=True, forbid_unknown_fields=True)
        self._decode = msgspec.msgpack.Decoder(args_type).decode
        self._names = args_type.__struct_fields__

    async def __call__(self, args: msgspec.Raw) -> msgspec.Raw:
        """Call the function and return its encoded result; raises InvalidArgument if an argument has a wrong type."""
        try:
            values = self._decode(args)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"{self._name}: {error}") from None
        result = self._function(**{name: getattr(values, name) for name in self._names})
        if inspect.isawaitable(result):
            result = await result
        return to_raw(result, self._name)
