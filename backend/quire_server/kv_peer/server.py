# SPDX-License-Identifier: Apache-2.0
"""Server of KV blocks for other pods (kv_wire.py).

Anything that a peer does wrong ends its connection and is counted by reason, and a connection that ends releases its
leases. Connections are limited for each address and in total, and everything has a deadline.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from quire_server.kv_peer.core_rows import CoreRows
from quire_server.kv_peer.send_budget import SendBudget
from quire_spec.errors import Unavailable
from quire_spec.protocol import kv_wire, shared_key
from quire_spec.protocol.protocol_error import ProtocolError
from quire_spec.protocol.results import KVPeerStatus

MAX_CONNECTIONS = 256
MAX_ADDRESS_CONNECTIONS = 32
"""Maximum number of connections from one address. A core that reads has at most two."""
MAX_CONNECTION_LEASES = 16
_HANDSHAKE_S = 5.0
_MESSAGE_S = 5.0
"""A message must arrive completely within this many seconds after its first byte."""
_IDLE_S = 120.0
"""A connection without a message for this many seconds is closed. The reader then opens a new one."""
_CORE_SHIFT = 24
"""An address contains the number of the core above these bits, and that of the row below them."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Lease:
    """A lease, which belongs to the connection that took it."""

    rows: dict[int, memoryview]
    """Bytes of each row, by address."""
    deadline: float


class KVPeerServer:
    """The connections of other pods."""

    def __init__(self, cores: Sequence[CoreRows], key_file: Path, bytes_per_second: int | None) -> None:
        self._cores = cores
        self._key_file = key_file
        self._budget = SendBudget(bytes_per_second)
        self._leases: dict[bytes, _Lease] = {}
        self._num_by_address = Counter[str]()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_sent_blocks = self._num_sent_bytes = 0
        self._refused = Counter[str]()

    def status(self) -> KVPeerStatus:
        """Return the counters for the supervisor."""
        now = time.monotonic()
        num_leases = sum(now < lease.deadline for lease in self._leases.values())
        numbers = self._num_by_address.total(), num_leases, self._num_sent_blocks, self._num_sent_bytes
        return KVPeerStatus(*numbers, dict(self._refused))

    async def run(self, listener: socket.socket) -> None:
        """Accept connections forever."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                connection, peer = await loop.sock_accept(listener)
            except OSError as error:
                # Too many open files, for example. The waiting connections are accepted later.
                self._refuse("resources", "", error)
                await asyncio.sleep(1.0)
                continue
            address = str(peer[0])
            if len(self._tasks) >= MAX_CONNECTIONS or self._num_by_address[address] >= MAX_ADDRESS_CONNECTIONS:
                connection.close()
                self._refuse("limit", address, "too many connections")
                continue
            # Counted here, because many connections can be accepted before the first task runs.
            self._num_by_address[address] += 1
            task = asyncio.create_task(self._serve(connection, address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket, address: str) -> None:
        leases: set[bytes] = set()
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._handshake(connection)
            while True:
                await self._answer(connection, leases)
        except ProtocolError as error:
            if error.reason != "closed":
                self._refuse(error.reason, address, error)
        except Unavailable as error:
            self._refuse("key_file", address, error)
        except OSError as error:
            logger.debug("connection ended address=%s error=%s", address, error)
        except Exception:
            self._refused["internal"] += 1
            logger.exception("a connection failed address=%s", address)
        finally:
            connection.close()
            self._num_by_address[address] -= 1
            self._num_by_address += Counter()  # drops addresses without connections
            await self._release(leases)

    def _refuse(self, reason: str, address: str, error: object) -> None:
        self._refused[reason] += 1
        if self._refused[reason] == 1:
            logger.warning("connection refused reason=%s address=%s error=%s", reason, address, error)

    async def _handshake(self, connection: socket.socket) -> None:
        """Compare keys, then layouts."""
        async with _deadline(_HANDSHAKE_S):
            challenge = kv_wire.Challenge(shared_key.new_nonce())
            await _send(connection, kv_wire.encode(challenge))
            payload = await _receive(connection, kv_wire.MAX_HANDSHAKE_BYTES)
            proof = kv_wire.decode(kv_wire.Proof, payload)
            difference = self._difference(proof.layout)
            answer = kv_wire.welcome(kv_wire.read_key(self._key_file), challenge, proof, difference)
            await _send(connection, kv_wire.encode(answer))
        if difference:
            raise ProtocolError(difference, "the layout of the peer differs")

    def _difference(self, layout: kv_wire.RowLayout) -> str:
        own = next((core.layout for core in self._cores if core.layout is not None), None)
        return "loading" if own is None else own.difference(layout)

    async def _answer(self, connection: socket.socket, leases: set[bytes]) -> None:
        """Receive one request and answer it."""
        request = kv_wire.decode_request(await _receive(connection, kv_wire.MAX_FRAME_BYTES, _IDLE_S))
        match request:
            case kv_wire.Lease():
                async with _deadline(kv_wire.LEASE_S):
                    await _send(connection, kv_wire.encode(await self._lease(request.keys, leases)))
            case kv_wire.Read():
                # The budget can make a row wait for minutes. A reader that is gone must not keep its lease until then.
                await _while_open(connection, self._send_rows(connection, request))
            case kv_wire.Heartbeat():
                await self._reply(connection, await self._extend(request.lease))
            case kv_wire.Release():
                is_known = request.lease in leases
                await self._release({request.lease} & leases)
                leases.discard(request.lease)
                await self._reply(connection, is_known)

    async def _reply(self, connection: socket.socket, is_known: bool) -> None:
        async with _deadline(_MESSAGE_S):
            await _send(connection, kv_wire.encode(kv_wire.Done(is_known)))

    async def _lease(self, keys: Sequence[bytes], leases: set[bytes]) -> kv_wire.Leased:
        if len(leases) >= MAX_CONNECTION_LEASES:
            raise ProtocolError("protocol", f"more than {MAX_CONNECTION_LEASES} leases on one connection")
        lease_id = secrets.token_bytes(16)
        leases.add(lease_id)
        found: dict[bytes, tuple[int, memoryview]] = {}
        for number, core in enumerate(self._cores):
            missing = [key for key in keys if key not in found]
            if missing and core.layout is not None:
                buffers = await core.lease(lease_id, missing)
                for index, (key, buffer) in enumerate(zip(missing, buffers, strict=True)):
                    if buffer is not None:
                        found[key] = (number << _CORE_SHIFT) + index, buffer
        deadline = asyncio.get_running_loop().time() + kv_wire.LEASE_S
        self._leases[lease_id] = _Lease(dict(found.values()), deadline)
        checksums = await asyncio.to_thread(lambda: {k: xxhash.xxh3_128_digest(b) for k, (_, b) in found.items()})
        rows = [
            kv_wire.LeasedRow(found[key][0], len(found[key][1]), checksums[key]) if key in found else None
            for key in keys
        ]
        if not found:
            await self._release({lease_id})
            leases.discard(lease_id)
        return kv_wire.Leased(lease_id, rows)

    async def _send_rows(self, connection: socket.socket, request: kv_wire.Read) -> None:
        loop = asyncio.get_running_loop()
        lease = self._leases.get(request.lease)
        if lease is None or loop.time() >= lease.deadline or any(row not in lease.rows for row in request.rows):
            raise ProtocolError("lease", "a row was requested that is not leased")
        async with _deadline(_MESSAGE_S):
            await _send(connection, kv_wire.encode(kv_wire.Reading()))
        for row in request.rows:
            buffer = lease.rows[row]
            await self._budget.take(len(buffer))
            # The heartbeats of the reader move the deadline.
            async with _deadline(max(0.0, lease.deadline - loop.time()), "lease"):
                await _send(connection, buffer)
            self._num_sent_blocks += 1
            self._num_sent_bytes += len(buffer)

    async def _extend(self, lease_id: bytes) -> bool:
        lease = self._leases.get(lease_id)
        known = [await core.extend(lease_id) for core in self._cores if lease is not None]
        if lease is None or not any(known):
            return False
        lease.deadline = max(lease.deadline, asyncio.get_running_loop().time() + kv_wire.EXTENSION_S)
        return True

    async def _release(self, leases: set[bytes]) -> None:
        held = [lease for lease in leases if self._leases.pop(lease, None) is not None]
        for core in self._cores if held else ():
            await core.release(held)


@contextlib.asynccontextmanager
async def _deadline(seconds: float, reason: str = "deadline") -> AsyncIterator[None]:
    """Raise ProtocolError if the context takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise ProtocolError(reason, f"nothing was received or accepted for {seconds:.1f} s") from None


async def _while_open(connection: socket.socket, work: Coroutine[None, None, None]) -> None:
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


async def _send(connection: socket.socket, data: bytes | memoryview) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, data)


async def _receive(connection: socket.socket, max_bytes: int, idle_s: float = _HANDSHAKE_S) -> bytes:
    """Return the next message; raises ProtocolError."""
    async with _deadline(idle_s, "idle"):
        first = await _receive_exactly(connection, 1)
    async with _deadline(_MESSAGE_S):
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
