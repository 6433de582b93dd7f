# SPDX-License-Identifier: Apache-2.0
"""Connection: one end of a Unix socket between a pod's processes, in asyncio: messages in, messages out.

Knows frames and nothing of what the messages mean. The text and the core process make one for each peer; what a peer
left open when it went is their business, in `on_lost`.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from quire_spec.errors import Internal
from quire_spec.protocol.framing import MAX_FRAME_BYTES, FrameDecoder, encode_frame
from quire_spec.protocol.messages import Hello, IpcMessage

HIGH_WATER_BYTES = 256 * 1024
"""Unsent bytes at which a connection counts as blocked. About one socket buffer: less is a reader that is a moment
late, and what is written beyond it only waits here."""

logger = logging.getLogger(__name__)


class ConnectionHandler(Protocol):
    """Who a connection belongs to. All calls come from the event loop."""

    def on_connected(self, connection: "Connection") -> None:
        """The connection is made: `peer` has said Hello, or, on the end that dialled, our Hello is sent."""

    def on_message(self, connection: "Connection", message: IpcMessage) -> None:
        """Another message came."""

    def on_oversized_frame(self, connection: "Connection", head: bytes, length: int) -> None:
        """A frame of `length` bytes, more than max_frame_bytes, began with `head`; the rest of it is dropped."""

    def on_writable(self, connection: "Connection") -> None:
        """The connection is not blocked any more."""

    def on_closed(self, connection: "Connection") -> None:
        """The connection is over, whoever ended it; the last call. Comes also to who was never ready."""


class Connection(asyncio.Protocol):
    """A framed connection. The end that dials gives its `hello`, the other end waits for it."""

    def __init__(
        self, handler: ConnectionHandler, hello: Hello | None = None, max_frame_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        self.peer: Hello | None = None
        """What the end that dialled said of itself; on that end None."""
        self.write_paused = False
        """More than HIGH_WATER_BYTES wait to be sent."""
        self._handler = handler
        self._hello = hello
        self._transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder(
            max_frame_bytes, lambda head, length: handler.on_oversized_frame(self, head, length)
        )

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait here because the peer does not read them."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def send(self, message: IpcMessage) -> None:
        """Queue a message; does nothing once the connection is over."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    def abort(self) -> None:
        """End the connection at once, dropping what is unsent; `on_lost` follows."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the socket is connected."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        if self._hello is not None:
            self.send(self._hello)
            self._handler.on_connected(self)

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes came."""
        try:
            for message in self._decoder.feed(data):
                self._dispatch(message)
        except Internal as error:
            logger.warning("connection cut: broken stream peer=%s error=%s", self.peer, error)
            self.abort()

    def pause_writing(self) -> None:
        """asyncio: HIGH_WATER_BYTES reached."""
        self.write_paused = True

    def resume_writing(self) -> None:
        """asyncio: nearly all sent."""
        self.write_paused = False
        self._handler.on_writable(self)

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: the socket is closed."""
        self._transport = None
        self._handler.on_closed(self)

    def _dispatch(self, message: IpcMessage) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self.peer is None and self._hello is None:
            if not isinstance(message, Hello):
                raise Internal(f"first message is {type(message).__name__}, not Hello")
            self.peer = message
            self._handler.on_connected(self)
        else:
            self._handler.on_message(self, message)


async def listen(path: Path, protocol_factory: Callable[[], Connection]) -> asyncio.Server:
    """Accept connections at `path`, for this user only; a socket file that a killed process left is replaced."""
    loop = asyncio.get_running_loop()
    server: Any = await loop.create_unix_server(protocol_factory, str(path), start_serving=False)
    os.chmod(path, 0o600)
    await server.start_serving()
    return cast(asyncio.Server, server)
