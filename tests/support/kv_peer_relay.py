# SPDX-License-Identifier: Apache-2.0
"""A TCP relay between a reader of KV blocks and the server of another pod, which may do one thing wrong."""

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

HALF_BYTES = 300_000


class Relay:
    """A relay, which does one thing wrong after the handshake (three messages)."""

    def __init__(
        self,
        target: str,
        fault: str = "",
        port: int = 0,
        on_half: Callable[[], None] | None = None,
        host: str = "127.0.0.1",
        half_bytes: int = HALF_BYTES,
    ) -> None:
        """Listen on a port; 0: a free one. `on_half` is called once, when `half_bytes` have come from the server."""
        self._target, self._fault, self._on_half, self._half_bytes = target, fault, on_half, half_bytes
        self._listener = socket.create_server((host, port))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = [self._listener]
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        if fault == "nobody":
            self._listener.close()
        else:
            self._start(self._accept)

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for thread in self._threads:
            thread.join(10)

    def _start(self, function: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=function, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                reader, _ = self._listener.accept()
                self._sockets.append(reader)
                host, port = self._target.split(":")
                server = socket.create_connection((host, int(port)))
                self._sockets.append(server)
                self._start(self._forward, reader, server, False)
                self._start(self._forward, server, reader, True)

    def _forward(self, source: socket.socket, target: socket.socket, is_faulty: bool) -> None:
        num_bytes = 0
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                # The handshake and the answer to the first lease have fewer bytes.
                target.sendall(self._spoil(data, target) if is_faulty and num_bytes > 400 else data)
                num_bytes += len(data)
                if is_faulty and num_bytes > self._half_bytes and self._on_half is not None:
                    on_half, self._on_half = self._on_half, None
                    on_half()
        # Also after a reset, which a process sends if it closes a connection with unread bytes.
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _spoil(self, data: bytes, target: socket.socket) -> bytes:
        if self._fault == "hang":
            self._closing.wait(60)
        elif self._fault == "drip":
            for byte in data:
                target.sendall(bytes([byte]))
                if self._closing.wait(0.2):
                    break
            return b""
        elif self._fault == "damage":
            return data[:-1] + bytes([data[-1] ^ 1])
        elif self._fault == "huge":
            return b"QKVP" + struct.pack("<I", 2**32 - 1) + b"?" * len(data)
        elif self._fault == "random":
            return random.Random(0).randbytes(len(data))
        elif self._fault == "cut":
            target.close()
        return data
