# SPDX-License-Identifier: Apache-2.0
"""The TCP connection between the first node of a group and another one (rank_wire.py), for both ends. Blocking."""

import contextlib
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Mapping
from typing import TypeVar

from quire_spec.protocol import rank_wire, shared_key
from quire_spec.protocol.protocol_error import ProtocolError
from quire_spec.protocol.rank_wire import Challenge, Kind, Node, Proof, Welcome

HANDSHAKE_S = 5.0
"""The handshake must end within this many seconds."""

_HANDSHAKE = {Kind.HANDSHAKE: rank_wire.MAX_HANDSHAKE_BYTES}
_SEND_TIMEOUT = struct.pack("ll", int(rank_wire.SILENCE_S), 0)

T = TypeVar("T", Challenge, Proof, Welcome)


class NodeConnection:
    """A connected socket on which frames are sent by several threads, and received by one.

    The methods raise OSError if the connection has ended, and ProtocolError if the other end is wrong.
    """

    def __init__(self, connected_socket: socket.socket) -> None:
        connected_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel ends the connection if the other machine does not confirm what was sent, or if a thread could not
        # send for this long.
        connected_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(rank_wire.SILENCE_S * 1000))
        connected_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        self.socket = connected_socket
        # `close` leaves the file open, because a thread may use its number.
        weakref.finalize(self, connected_socket.close).atexit = False
        self.peer = str(connected_socket.getpeername()[0])
        """Address of the other end."""
        self.address = str(connected_socket.getsockname()[0])
        """Address of this end, at which the other machine reaches this one."""
        self._send_lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(connected_socket, select.POLLIN)

    def send(self, kind: Kind, rank: int = 0, payload: bytes | memoryview = b"") -> None:
        """Send a frame. Safe to call from any thread."""
        frame = b"".join((rank_wire.header(kind, rank, len(payload)), payload))
        with self._send_lock:
            self.socket.sendall(frame)

    def receive_header(self, max_bytes: Mapping[Kind, int], deadline: float | None = None) -> tuple[Kind, int, int]:
        """Return kind, rank and length of the next frame, whose payload must be received next. See
        `rank_wire.parse_header`."""
        header = bytearray(rank_wire.HEADER_BYTES)
        self.receive_into(memoryview(header), deadline)
        return rank_wire.parse_header(bytes(header), max_bytes)

    def receive(self, length: int, deadline: float | None = None) -> bytes:
        """Return the next `length` bytes."""
        payload = bytearray(length)
        self.receive_into(memoryview(payload), deadline)
        return bytes(payload)

    def receive_into(self, buffer: memoryview, deadline: float | None = None) -> None:
        """Fill a buffer of bytes. `deadline` is in monotonic seconds; by default, the other end must send within
        SILENCE_S."""
        start = 0
        deadline = time.monotonic() + rank_wire.SILENCE_S if deadline is None else deadline
        while start < len(buffer):
            try:
                num_bytes = self.socket.recv_into(buffer[start:], 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                # The timeout of a socket object would also apply to threads that send.
                if not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise TimeoutError("nothing was received in time") from None
                continue
            if not num_bytes:
                raise ConnectionResetError("the connection was closed")
            start += num_bytes

    def close(self) -> None:
        """Close the connection. Threads that use it get an error. Safe to call from any thread."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def introduce(self, key: bytes, node: Node) -> None:
        """Prove the key to the first node, which must then accept this node. Raises ProtocolError with its reason."""
        deadline = time.monotonic() + HANDSHAKE_S
        challenge = self._receive_message(Challenge, deadline)
        proof = rank_wire.prove(key, challenge, node)
        self.send(Kind.HANDSHAKE, 0, rank_wire.encode(proof))
        try:
            answer = self._receive_message(Welcome, deadline)
        except ConnectionError as error:
            raise ProtocolError(
                "key", "the first node refuses the connection; use the same key on all nodes"
            ) from error
        rank_wire.check_welcome(key, challenge, proof, answer)
        if answer.problem:
            raise ProtocolError("refused", answer.problem)

    def challenge(self, key: bytes) -> "NodeVisit":
        """Make the other node prove the key, and return what it claims. The visit must then be answered."""
        deadline = time.monotonic() + HANDSHAKE_S
        challenge = Challenge(shared_key.new_nonce())
        self.send(Kind.HANDSHAKE, 0, rank_wire.encode(challenge))
        proof = self._receive_message(Proof, deadline)
        rank_wire.check_proof(key, challenge, proof)
        return NodeVisit(self, key, challenge, proof)

    def _receive_message(self, message_type: type[T], deadline: float) -> T:
        _, _, length = self.receive_header(_HANDSHAKE, deadline)
        return rank_wire.decode(message_type, self.receive(length, deadline))


class NodeVisit:
    """A node that has proved its key, and waits for the answer of the first node."""

    def __init__(self, connection: NodeConnection, key: bytes, challenge: Challenge, proof: Proof) -> None:
        self.connection, self.node = connection, proof.node
        self._key, self._challenge, self._proof = key, challenge, proof

    def answer(self, problem: str) -> None:
        """Accept the node, or refuse it if there is a problem."""
        welcome = rank_wire.welcome(self._key, self._challenge, self._proof, problem)
        self.connection.send(Kind.HANDSHAKE, 0, rank_wire.encode(welcome))
