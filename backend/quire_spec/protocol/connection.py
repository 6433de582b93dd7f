# SPDX-License-Identifier: Apache-2.0
"""One end of a Unix socket between two processes of a pod, for asyncio: sends and receives messages.

This module handles frames, but not the meaning of messages. client.py uses it at the end that connects, and server.py
at the end that listens. When a connection closes, their owners end all work that belonged to the peer.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

from quire_spec.errors import Internal
from quire_spec.protocol.framing import MAX_PAYLOAD_BYTES, FrameDecoder, InvalidFrame, encode_frame
from quire_spec.protocol.messages import Hello, Message

HIGH_WATER_BYTES = 256 * 1024
"""Writing is paused when this many bytes are unsent. This limit is about the size of a socket buffer; with a lower
limit, a short delay of the reader would pause writing.
"""

logger = logging.getLogger(__name__)


class ConnectionHandler:
    """Receives the events of a connection; the default methods do nothing. All calls come from the event loop."""

    def on_connected(self, connection: "Connection") -> None:
        """Called when the Hello was sent or received.

        The connecting end sends the Hello. The listening end receives it and stores it in `connection.peer`.
        """

    def on_message(self, connection: "Connection", message: Message) -> None:
        """Called for each message."""

    def on_invalid_frame(self, connection: "Connection", frame: InvalidFrame) -> None:
        """Called for each frame that is oversized, cannot be decoded, or is of a kind that is not accepted."""

    def on_writable(self, connection: "Connection") -> None:
        """Called when writing is no longer paused."""

    def on_closed(self, connection: "Connection") -> None:
        """Called last, when either end has closed the connection, even if `on_connected` was never called."""


class Connection(asyncio.Protocol):
    """A connection. `loop.create_unix_connection` or `listen` creates it."""

    def __init__(
        self,
        handler: ConnectionHandler,
        accepted: Collection[type[Message]],
        hello: Hello | None = None,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        """Create a connection.

        Args:
            handler: receives the events.
            accepted: types of the messages that the peer can send.
            hello: first message to send if this is the connecting end. The listening end has no Hello to send, but
                waits for one.
            max_payload_bytes: longer payloads are not accepted.
        """
        self.peer: Hello | None = None
        """The Hello that the listening end received."""
        self.write_paused = False
        """True while more than HIGH_WATER_BYTES are unsent."""
        self._handler = handler
        self._hello = hello
        self._transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder(accepted if hello else (Hello, *accepted), max_payload_bytes)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait in this process, because the socket buffer is full and the peer does not read."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def send(self, message: Message) -> None:
        """Send a message; do nothing if the connection is closed.

        If the peer does not read, the message is buffered.

        Raises:
            InvalidArgument: the message cannot be encoded, or is too large.
        """
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    def abort(self) -> None:
        """Close the connection at once and drop unsent messages; `on_closed` follows."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when the socket is connected."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        if self._hello is not None:
            self.send(self._hello)
            self._handler.on_connected(self)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with received bytes."""
        try:
            for message in self._decoder.feed(data):
                if self._transport is None or self._transport.is_closing():
                    return
                if self.peer is None and self._hello is None:
                    self._accept_hello(message)
                elif isinstance(message, InvalidFrame):
                    self._handler.on_invalid_frame(self, message)
                else:
                    self._handler.on_message(self, message)
        except Internal as error:
            logger.warning("connection closed after an invalid message peer=%s error=%s", self.peer, error)
            self.abort()

    def pause_writing(self) -> None:
        """Called by asyncio when more than HIGH_WATER_BYTES are unsent."""
        self.write_paused = True

    def resume_writing(self) -> None:
        """Called by asyncio when nearly all bytes are sent."""
        self.write_paused = False
        self._handler.on_writable(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by asyncio when the socket is closed."""
        self._transport = None
        self._handler.on_closed(self)

    def _accept_hello(self, message: Message | InvalidFrame) -> None:
        """Accept the first message; raises Internal if it is not a Hello, because no request can be open yet."""
        if not isinstance(message, Hello):
            raise Internal(f"the first message must be Hello, got {message}"[:200])
        self.peer = message
        self._handler.on_connected(self)


async def listen(path: Path, protocol_factory: Callable[[], Connection]) -> asyncio.Server:
    """Accept connections at `path`, only from processes of this user. A socket file that a killed process left at
    `path` is replaced."""
    loop = asyncio.get_running_loop()
    server: Any = await loop.create_unix_server(protocol_factory, str(path), start_serving=False)
    os.chmod(path, 0o600)
    await server.start_serving()
    return cast(asyncio.Server, server)
