# SPDX-License-Identifier: Apache-2.0
"""One connection to the server of KV blocks of another pod (kv_wire.py). Blocking: only threads of a PeerStore use
it."""

import contextlib
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Self, TypeVar

from quire_spec.engine.kv_transfer_config import PeerAddress
from quire_spec.protocol import kv_wire
from quire_spec.protocol.protocol_error import ProtocolError

STALL_S = 2.0
"""The other pod must send or accept something within this many seconds."""
_POLL_S = 0.1
"""A read that is no longer wanted ends after at most this many seconds."""

T = TypeVar(
    "T",
    kv_wire.Challenge,
    kv_wire.Welcome,
    kv_wire.Leased,
    kv_wire.LeasedState,
    kv_wire.Reading,
    kv_wire.Done,
    kv_wire.NodeAddresses,
)


class Cancelled(Exception):
    """The read is no longer wanted."""


class PeerConnection:
    """A connection whose ends both have the key and the same layout of rows.

    Each method raises ProtocolError if anything is wrong, and Cancelled if `is_wanted` returns false. The connection
    must then be closed.
    """

    def __init__(self, connected_socket: socket.socket, is_wanted: Callable[[], bool]) -> None:
        self._socket = connected_socket
        # Also if the owner is dropped.
        weakref.finalize(self, connected_socket.close).atexit = False
        self.is_wanted = is_wanted
        """Asked while the connection waits for the other pod."""

    @classmethod
    def open(cls, address: PeerAddress, key: bytes, layout: kv_wire.RowLayout, is_wanted: Callable[[], bool]) -> Self:
        """Connect, prove the key, and compare the layout."""
        try:
            connected_socket = socket.create_connection((address.host, address.port), STALL_S)
        except OSError as error:
            raise _network_error(error) from error
        connection = cls(connected_socket, is_wanted)
        try:
            connected_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            challenge = connection._receive(kv_wire.Challenge)
            proof = kv_wire.prove(key, challenge, layout)
            connection._send(kv_wire.encode(proof))
            answer = connection._receive(kv_wire.Welcome)
            kv_wire.check_welcome(key, challenge, proof, answer)
            if answer.difference:
                raise ProtocolError(answer.difference, f"the layout of {address} differs in {answer.difference!r}")
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Close the connection. The other pod then ends its leases."""
        self._socket.close()

    def lease(self, keys: Sequence[bytes]) -> kv_wire.Leased:
        """Lease blocks."""
        self._send(kv_wire.encode(kv_wire.Lease(list(keys))))
        leased = self._receive(kv_wire.Leased)
        if len(leased.rows) != len(keys):
            raise ProtocolError("protocol", f"{len(leased.rows)} rows for {len(keys)} keys")
        return leased

    def lease_state(self, keys: Sequence[bytes], first: int) -> kv_wire.LeasedState:
        """Lease the last state after one of these blocks."""
        self._send(kv_wire.encode(kv_wire.LeaseState(list(keys), first)))
        leased = self._receive(kv_wire.LeasedState)
        if leased.block >= len(keys):
            raise ProtocolError("protocol", f"a state after block {leased.block} of {len(keys)}")
        return leased

    def nodes(self) -> list[str]:
        """Return HOST:PORT of the other nodes of the pod's group."""
        self._send(kv_wire.encode(kv_wire.Nodes()))
        return self._receive(kv_wire.NodeAddresses).addresses

    def part(self, lease: bytes, node: int, rows: Sequence[int]) -> list[kv_wire.LeasedRow]:
        """Prepare to read the parts of leased rows from node number `node`, which the other end must be."""
        self._send(kv_wire.encode(kv_wire.Part(lease, node, list(rows))))
        places = [place for place in self._receive(kv_wire.Leased).rows if place is not None]
        if len(places) != len(rows):
            raise ProtocolError("protocol", f"{len(places)} parts for {len(rows)} rows")
        return places

    def read(self, lease: bytes, rows: Sequence[int], buffers: Sequence[Sequence[memoryview]]) -> Iterator[None]:
        """Read leased rows into buffers. Yield after each row."""
        self._send(kv_wire.encode(kv_wire.Read(lease, list(rows))))
        self._receive(kv_wire.Reading)
        for row_buffers in buffers:
            for buffer in row_buffers:
                self._receive_into(buffer)
            yield

    def heartbeat(self, lease: bytes) -> bool:
        """Prolong a lease; return whether it exists."""
        self._send(kv_wire.encode(kv_wire.Heartbeat(lease)))
        return self._receive(kv_wire.Done).is_known

    def release(self, lease: bytes) -> None:
        """End a lease."""
        self._send(kv_wire.encode(kv_wire.Release(lease)))
        self._receive(kv_wire.Done)

    def _send(self, frame: bytes) -> None:
        try:
            self._socket.settimeout(STALL_S)
            self._socket.sendall(frame)
        except OSError as error:
            raise _network_error(error) from error

    def _receive(self, message_type: type[T]) -> T:
        header = bytearray(kv_wire.HEADER_BYTES)
        self._receive_into(memoryview(header))
        payload = bytearray(kv_wire.payload_length(bytes(header), kv_wire.MAX_FRAME_BYTES))
        self._receive_into(memoryview(payload))
        return kv_wire.decode(message_type, bytes(payload))

    def _receive_into(self, buffer: memoryview) -> None:
        self._socket.settimeout(_POLL_S)
        last, start = time.monotonic(), 0
        while start < len(buffer):
            if not self.is_wanted():
                raise Cancelled
            try:
                num_bytes = self._socket.recv_into(buffer[start:])
            except TimeoutError as error:
                if time.monotonic() - last > STALL_S:
                    raise _network_error(error) from error
                continue
            except OSError as error:
                raise _network_error(error) from error
            if not num_bytes:
                raise ProtocolError("closed", "the other pod closed the connection")
            start, last = start + num_bytes, time.monotonic()


@contextlib.contextmanager
def closing(connection: PeerConnection) -> Iterator[PeerConnection]:
    """Close a connection at the end of the context."""
    try:
        yield connection
    finally:
        connection.close()


def _network_error(error: OSError) -> ProtocolError:
    if isinstance(error, TimeoutError):
        return ProtocolError("deadline", f"the other pod did not respond for {STALL_S:g} s")
    reason = "closed" if isinstance(error, ConnectionResetError | BrokenPipeError) else "unreachable"
    return ProtocolError(reason, str(error))
