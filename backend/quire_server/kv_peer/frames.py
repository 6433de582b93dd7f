# SPDX-License-Identifier: Apache-2.0
"""Sends and receives the frames of kv_wire.py on a non-blocking socket. Everything has a deadline."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Coroutine

from quire_spec.protocol import kv_wire
from quire_spec.protocol.protocol_error import ProtocolError

HANDSHAKE_S = 5.0
MESSAGE_S = 5.0
"""A message must arrive completely within this many seconds after its first byte."""


@contextlib.asynccontextmanager
async def deadline(seconds: float, reason: str = "deadline") -> AsyncIterator[None]:
    """Raise ProtocolError if the context takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise ProtocolError(reason, f"nothing was received or accepted for {seconds:.1f} s") from None


async def while_open(connection: socket.socket, work: Coroutine[None, None, None]) -> None:
    """Run a coroutine that receives nothing; raises ProtocolError if the peer closes the connection before its end."""
    working, closing = asyncio.create_task(work), asyncio.create_task(_wait_closed(connection))
    try:
        await asyncio.wait((working, closing), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ProtocolError("closed", "the peer closed the connection")
        working.result()
    finally:
        working.cancel()
        closing.cancel()
        await asyncio.gather(working, closing, return_exceptions=True)


async def _wait_closed(connection: socket.socket) -> None:
    """Wait until the peer has closed the connection. Return never if it sends a message before that."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    with contextlib.suppress(ConnectionError):
        if connection.recv(1, socket.MSG_PEEK):
            await loop.create_future()


async def send(connection: socket.socket, data: bytes | memoryview) -> None:
    """Send all bytes."""
    await asyncio.get_running_loop().sock_sendall(connection, data)


async def receive(connection: socket.socket, max_bytes: int, idle_s: float = HANDSHAKE_S) -> bytes:
    """Return the next message; raises ProtocolError."""
    async with deadline(idle_s, "idle"):
        first = await _receive_exactly(connection, 1)
    async with deadline(MESSAGE_S):
        header = first + await _receive_exactly(connection, kv_wire.HEADER_BYTES - 1)
        return await _receive_exactly(connection, kv_wire.payload_length(header, max_bytes))


async def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    loop, data, start = asyncio.get_running_loop(), bytearray(num_bytes), 0
    view = memoryview(data)
    while start < num_bytes:
        if not (received := await loop.sock_recv_into(connection, view[start:])):
            raise ProtocolError("closed", "the peer closed the connection")
        start += received
    return bytes(data)
