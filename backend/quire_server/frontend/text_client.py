# SPDX-License-Identifier: Apache-2.0
"""The stub's connection to the text process: requests out, events in, over one Unix socket, by threads.

Two threads: the writer connects and sends, the reader turns frames into events. So `submit` and `cancel` never wait for
the socket. When the connection ends, every request open on it gets an UNAVAILABLE event; the writer connects again by
itself, so that the text process always knows which frontends live. Knows nothing of the server; frontend.py owns it.
"""

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from quire_spec.errors import Internal, QuireError, Unavailable
from quire_spec.protocol.framing import FrameDecoder, encode_frame
from quire_spec.protocol.messages import (
    CancelRequests,
    GenerateRequest,
    Hello,
    OutputDelta,
    OutputDeltas,
    RequestRejected,
)

logger = logging.getLogger(__name__)

RECONNECT_S = 0.1
"""How often an idle writer looks for the text process while there is no connection."""
_RECV_BYTES = 256 * 1024

_WriterItem = tuple[GenerateRequest | CancelRequests | RequestRejected, bytes] | Literal["lost", "close"]
"""What the writer waits for: a message with its frame, the end of the connection, or its own end."""


class TextClient:
    """Requests to the text process and the events that answer them."""

    def __init__(self, path: Path, model: str, on_delta: Callable[[OutputDelta], None]) -> None:
        """`deliver` gets each event, in order per request, in the reader's or writer's thread; it must not block."""
        self._path = path
        self._model = model
        self._on_delta = on_delta
        self._send_queue: queue.SimpleQueue[_WriterItem] = queue.SimpleQueue()
        self._connection: _Connection | None = None
        self._closing = False
        self._writer = threading.Thread(target=self._write_loop, name="text-writer", daemon=True)
        self._writer.start()

    def submit(self, request: GenerateRequest) -> None:
        """Send a request; its events follow, an UNAVAILABLE one when there is no text process."""
        self._send_queue.put((request, encode_frame(request)))

    def cancel(self, request_id: int) -> None:
        """No more events are wanted for this request."""
        message = CancelRequests([request_id])
        self._send_queue.put((message, encode_frame(message)))

    def report_rejected(self, code: str) -> None:
        """A request that is not submitted got its error. Nobody counts it while there is no text process."""
        message = RequestRejected(code)
        self._send_queue.put((message, encode_frame(message)))

    def close(self) -> None:
        """End the connection and the writer; open requests get their UNAVAILABLE events."""
        self._closing = True
        self._send_queue.put("close")
        self._drop_connection()
        self._writer.join(timeout=5)

    def _write_loop(self) -> None:
        self._connect()
        while True:
            try:
                item = self._send_queue.get(timeout=None if self._is_connected() else RECONNECT_S)
            except queue.Empty:
                self._connect()
                continue
            if item == "close":
                break
            if item != "lost":
                self._write(*item)
        self._drop_connection()

    def _write(self, message: GenerateRequest | CancelRequests | RequestRejected, frame: bytes) -> None:
        if not self._is_connected():
            self._connect()
        connection = self._connection
        if not isinstance(message, GenerateRequest):
            if connection is not None:
                connection.untrack(message.ids if isinstance(message, CancelRequests) else [])
                connection.send(frame)
        elif connection is None or not connection.track(message.id):
            self._on_delta(_error_delta(message.id, Unavailable("text process is restarting; try again")))
        else:
            connection.send(frame)

    def _is_connected(self) -> bool:
        return self._connection is not None and not self._connection.is_closed

    def _connect(self) -> None:
        try:
            self._connection = _Connection(
                self._path, self._model, self._on_delta, lambda: self._send_queue.put("lost")
            )
        except OSError as error:
            if self._connection is not None:
                logger.info("text process is away path=%s error=%s", self._path, error)
            self._connection = None
        if self._closing:
            # `close` may have looked for a connection before this one was there.
            self._drop_connection()

    def _drop_connection(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.shutdown()


class _Connection:
    """One connection and the requests open on it. `open` and `_end` agree, under the lock, who fails a request."""

    def __init__(
        self, path: Path, model: str, on_delta: Callable[[OutputDelta], None], on_disconnect: Callable[[], None]
    ) -> None:
        """Raises OSError when nobody listens at `path`."""
        self.is_closed = False
        self._on_delta = on_delta
        self._notify_disconnect = on_disconnect
        self._send_lock = threading.Lock()
        self._open_request_ids: set[int] = set()
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(os.fspath(path))
            self._socket.sendall(encode_frame(Hello("frontend", model, os.getpid())))
        except OSError:
            self._socket.close()
            raise
        threading.Thread(target=self._read_loop, name="text-reader", daemon=True).start()

    def track(self, request_id: int) -> bool:
        """Have the end of this connection end the request too; False when it has ended already."""
        with self._lock:
            if not self.is_closed:
                self._open_request_ids.add(request_id)
            return not self.is_closed

    def untrack(self, request_ids: list[int]) -> None:
        """These requests are over for their client."""
        with self._lock:
            self._open_request_ids.difference_update(request_ids)

    def send(self, frame: bytes) -> None:
        """Send a frame; waits while the text process does not read. A broken socket is the reader's to report."""
        try:
            with self._send_lock:
                self._socket.sendall(frame)
        except OSError:
            self.shutdown()

    def shutdown(self) -> None:
        """End the connection from this side."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was faster

    def _read_loop(self) -> None:
        decoder = FrameDecoder()
        try:
            while data := self._socket.recv(_RECV_BYTES):
                for message in decoder.feed(data):
                    if not isinstance(message, OutputDeltas):
                        raise Internal(f"the text process sent {type(message).__name__}")
                    self._on_deltas(message)
        except OSError as error:
            logger.info("connection to the text process broke error=%s", error)
        except Internal as error:
            logger.error("connection to the text process is out of step error=%s", error)
        except Exception:
            # Events of the right form may hold anything; whatever it does to us, what is open gets its end.
            logger.exception("connection to the text process is given up")
        self._on_disconnect()

    def _on_deltas(self, message: OutputDeltas) -> None:
        if finished_ids := [event.id for event in message.deltas if event.final]:
            self.untrack(finished_ids)
        for event in message.deltas:
            self._on_delta(event)

    def _on_disconnect(self) -> None:
        with self._lock:
            self.is_closed = True
            unfinished_ids, self._open_request_ids = self._open_request_ids, set()
        self.shutdown()
        with self._send_lock:
            self._socket.close()
        for request_id in unfinished_ids:
            self._on_delta(
                _error_delta(request_id, Unavailable("text process ended; it restarts by itself, try again"))
            )
        self._notify_disconnect()


def _error_delta(request_id: int, error: QuireError) -> OutputDelta:
    return OutputDelta(request_id, error_code=error.code, error=str(error))
