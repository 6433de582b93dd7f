# SPDX-License-Identifier: Apache-2.0
"""Connects a stub to the text process. It sends requests and receives deltas over one Unix socket.

A writer thread opens the connection and sends requests; a reader thread receives and decodes deltas. `submit` and
`cancel` therefore never block on the socket. When the connection ends, each open request gets a delta with the error
UNAVAILABLE. The writer connects again without waiting for the next request. Therefore every running stub is connected
to the text process. The client does not use the server's API. It is owned by stub_model.py. The OpenAI front has its
own client in openai/text_client.py.
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
"""While the writer is idle and not connected, it tries to connect again after this many seconds."""
_RECV_BYTES = 256 * 1024

_WriterItem = tuple[GenerateRequest | CancelRequests | RequestRejected, bytes] | Literal["lost", "close"]
"""Item in the queue of the writer: a message together with its encoded frame, or "lost" (the connection was lost), or
"close"."""


class TextClient:
    """Sends requests to the text process and passes on the deltas of the responses."""

    def __init__(self, path: Path, model: str, on_delta: Callable[[OutputDelta], None]) -> None:
        """`on_delta` is called in the reader thread or in the writer thread, so it must not block. The deltas of one
        request arrive in order."""
        self._path = path
        self._model = model
        self._on_delta = on_delta
        self._send_queue: queue.SimpleQueue[_WriterItem] = queue.SimpleQueue()
        self._connection: _Connection | None = None
        self._closing = False
        self._writer = threading.Thread(target=self._write_loop, name="text-writer", daemon=True)
        self._writer.start()

    def submit(self, request: GenerateRequest) -> None:
        """Send a request. `on_delta` is called with each delta of the request. If the text process is not running,
        `on_delta` gets a delta with the error UNAVAILABLE."""
        self._enqueue(request)

    def cancel(self, request_id: int) -> None:
        """Cancel a request; the text process sends no more deltas for it."""
        self._enqueue(CancelRequests([request_id]))

    def report_rejected(self, code: str) -> None:
        """Report to the text process that a request was rejected, so that the metrics count it. If the text process is
        not running, the rejection is not counted."""
        self._enqueue(RequestRejected(code))

    def _enqueue(self, message: GenerateRequest | CancelRequests | RequestRejected) -> None:
        self._send_queue.put((message, encode_frame(message)))

    def close(self) -> None:
        """Close the connection and stop the writer. Open requests get a delta with the error UNAVAILABLE."""
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
            self._on_delta(_error_delta(message.id, Unavailable("the text process is restarting; retry later")))
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
                logger.info("text process not reachable path=%s error=%s", self._path, error)
            self._connection = None
        if self._closing:
            # `close` may have run before this connection existed.
            self._drop_connection()

    def _drop_connection(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.shutdown()


class _Connection:
    """One connection and its open requests.

    `track` and `_on_disconnect` hold a lock, so that a request is reported as failed only once.
    """

    def __init__(
        self, path: Path, model: str, on_delta: Callable[[OutputDelta], None], on_disconnect: Callable[[], None]
    ) -> None:
        """Raises OSError if no process listens at `path`."""
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
        """Register an open request. If this connection ends, the request fails. Return False if the connection has
        already ended."""
        with self._lock:
            if not self.is_closed:
                self._open_request_ids.add(request_id)
            return not self.is_closed

    def untrack(self, request_ids: list[int]) -> None:
        """Remove requests that need no more deltas, either because they have ended or because they were cancelled."""
        with self._lock:
            self._open_request_ids.difference_update(request_ids)

    def send(self, frame: bytes) -> None:
        """Send a frame. The call blocks while the text process does not read from the socket. If the socket is broken,
        no error is raised here. The reader thread then notices that the connection has ended, and reports the open
        requests as failed."""
        try:
            with self._send_lock:
                self._socket.sendall(frame)
        except OSError:
            self.shutdown()

    def shutdown(self) -> None:
        """Shut down the connection."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # already disconnected

    def _read_loop(self) -> None:
        decoder = FrameDecoder()
        try:
            while data := self._socket.recv(_RECV_BYTES):
                for message in decoder.feed(data):
                    if not isinstance(message, OutputDeltas):
                        raise Internal(f"the text process sent {type(message).__name__}")
                    self._on_deltas(message)
        except OSError as error:
            logger.info("connection to the text process lost error=%s", error)
        except Internal as error:
            logger.error("invalid message from the text process, closing the connection error=%s", error)
        except Exception:
            # Well-formed deltas can still contain invalid values. Open requests must end in any case.
            logger.exception("closing the connection to the text process after an unexpected error")
        self._on_disconnect()

    def _on_deltas(self, message: OutputDeltas) -> None:
        if finished_ids := [delta.id for delta in message.deltas if delta.final]:
            self.untrack(finished_ids)
        for delta in message.deltas:
            self._on_delta(delta)

    def _on_disconnect(self) -> None:
        with self._lock:
            self.is_closed = True
            unfinished_ids, self._open_request_ids = self._open_request_ids, set()
        self.shutdown()
        with self._send_lock:
            self._socket.close()
        for request_id in unfinished_ids:
            self._on_delta(
                _error_delta(request_id, Unavailable("the text process ended and is restarting; retry later"))
            )
        self._notify_disconnect()


def _error_delta(request_id: int, error: QuireError) -> OutputDelta:
    return OutputDelta(request_id, error_code=error.code, error=str(error))
