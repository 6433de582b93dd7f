# SPDX-License-Identifier: Apache-2.0
"""RPC client of the supervisor. It connects to text.sock or core.sock.

Each call has a timeout. The client does not depend on the methods that it calls. A `ControlClient` is one connection
and never reconnects. When the connection ends, every pending call raises ConnectionLost. `closed` then notifies
supervisor/process_manager.py that the process is dead or broken.
"""

import asyncio
import contextlib
import itertools
import os
from pathlib import Path
from typing import Any

from quire_spec.errors import Internal, Unavailable, error_from_code
from quire_spec.protocol import framing
from quire_spec.protocol.messages import ControlRequest, ControlResponse, Hello, IpcMessage

_READ_BYTES = 2**16


class ConnectionLost(Unavailable):
    """The connection to the process has ended. The caller must repeat the call when the process has been restarted."""


class ControlClient:
    """One connection of the supervisor to the text process or the core process. The peer is the server of that process,
    not a ControlServer.
    """

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        """Name of the process, for error messages."""
        self.closed = asyncio.Event()
        """Event that is set when the connection ends."""
        self._writer = writer
        self._call_ids = itertools.count(1)
        self._pending_calls: dict[int, asyncio.Future[Any]] = {}
        self._read_task = asyncio.create_task(self._read_loop(reader), name=f"control {name}")

    @classmethod
    async def connect(cls, name: str, path: Path) -> "ControlClient":
        """Connect to a socket and send Hello; raises OSError if no process listens on it (yet)."""
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(framing.encode_frame(Hello("supervisor", pid=os.getpid())))
        return cls(name, reader, writer)

    async def call(self, method: str, args: dict[str, Any] | None = None, *, timeout_s: float) -> Any:
        """Call `method` and return its result.

        Raises:
            ConnectionLost: the connection ended before or during the call.
            Unavailable: the process did not respond within `timeout_s`.
            QuireError: the error that the process returned, with its code.
        """
        if self.closed.is_set():
            raise ConnectionLost(f"{self.name}: the connection was closed before {method!r} was called")
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending_calls[call_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(framing.encode_frame(ControlRequest(call_id, method, args or {})))
                await self._writer.drain()
                return await future
        except TimeoutError as error:
            raise Unavailable(f"{self.name}: no response to {method!r} within {timeout_s:g} s") from error
        except OSError as error:
            raise ConnectionLost(f"{self.name}: the connection was closed during the call of {method!r}") from error
        finally:
            self._pending_calls.pop(call_id, None)

    async def close(self) -> None:
        """Close the connection."""
        self._read_task.cancel()
        await asyncio.wait([self._read_task])
        self._on_close()

    async def _read_loop(self, reader: asyncio.StreamReader) -> None:
        decoder = framing.FrameDecoder()
        # If the stream is corrupt (Internal), the connection is closed, as at the end of the stream. `closed` notifies
        # the session.
        with contextlib.suppress(OSError, Internal):
            while data := await reader.read(_READ_BYTES):
                for message in decoder.feed(data):
                    self._on_message(message)
        self._on_close()

    def _on_message(self, message: IpcMessage) -> None:
        if (
            isinstance(message, ControlResponse)
            and (future := self._pending_calls.get(message.id))
            and not future.done()
        ):
            if message.error_code is None:
                future.set_result(message.result)
            else:
                future.set_exception(error_from_code(message.error_code, message.error))

    def _on_close(self) -> None:
        self.closed.set()
        self._writer.close()
        for future in self._pending_calls.values():
            if not future.done():
                future.set_exception(ConnectionLost(f"{self.name}: connection closed before it replied"))
