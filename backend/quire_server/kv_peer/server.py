# SPDX-License-Identifier: Apache-2.0
"""Server of KV blocks for other pods (kv_wire.py).

Anything that a peer does wrong ends its connection and is counted by reason, and a connection that ends releases its
leases. Connections are limited for each address and in total, and everything has a deadline.
"""

import asyncio
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from quire_server.kv_peer.core_rows import CoreRows
from quire_server.kv_peer.first_node import FirstNode
from quire_server.kv_peer.frames import HANDSHAKE_S, MESSAGE_S, deadline, receive, send, while_open
from quire_server.kv_peer.send_budget import SendBudget
from quire_spec.errors import Unavailable
from quire_spec.protocol import kv_wire, shared_key
from quire_spec.protocol.protocol_error import ProtocolError
from quire_spec.protocol.results import KVPeerStatus

MAX_CONNECTIONS = 256
MAX_ADDRESS_CONNECTIONS = 32
"""Maximum number of connections from one address. A core that reads has at most two."""
MAX_CONNECTION_LEASES = 16
_IDLE_S = 120.0
"""A connection without a message for this many seconds is closed. The reader then opens a new one."""
_RECHECK_S = 10.0
"""A node other than the first asks again whether a lease is valid when it would end within this many seconds."""
_CORE_SHIFT = 24
"""An address contains the number of the core above these bits, and that of the row below them."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Lease:
    """A lease, which belongs to the connection that took it."""

    rows: dict[int, memoryview]
    """Bytes of each row, by address."""
    deadline: float
    numbers: dict[int, int] = field(default_factory=dict)
    """Number of each row in the core, by address. Empty on a node other than the first."""
    generation: int = 0
    """Number of the group of nodes."""


class KVPeerServer:
    """The connections of other pods."""

    def __init__(
        self,
        cores: Sequence[CoreRows],
        key_file: Path,
        bytes_per_second: int | None,
        first_node: FirstNode | None = None,
        node_rank: int = 0,
    ) -> None:
        """Create the server. On a node other than the first, `first_node` decides about leases, and `cores` are the
        rows of the node number `node_rank`."""
        self._cores = cores
        self._first_node, self._node_rank = first_node, node_rank
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
        async with deadline(HANDSHAKE_S):
            challenge = kv_wire.Challenge(shared_key.new_nonce())
            await send(connection, kv_wire.encode(challenge))
            payload = await receive(connection, kv_wire.MAX_HANDSHAKE_BYTES)
            proof = kv_wire.decode(kv_wire.Proof, payload)
            difference = self._difference(proof.layout)
            answer = kv_wire.welcome(kv_wire.read_key(self._key_file), challenge, proof, difference)
            await send(connection, kv_wire.encode(answer))
        if difference:
            raise ProtocolError(difference, "the layout of the peer differs")

    def _difference(self, layout: kv_wire.RowLayout) -> str:
        own = next((core.layout for core in self._cores if core.layout is not None), None)
        return "loading" if own is None else own.difference(layout)

    async def _answer(self, connection: socket.socket, leases: set[bytes]) -> None:
        """Receive one request and answer it."""
        request = kv_wire.decode_request(await receive(connection, kv_wire.MAX_FRAME_BYTES, _IDLE_S))
        if self._first_node is not None and not isinstance(request, kv_wire.Part | kv_wire.Read):
            raise ProtocolError("protocol", f"{type(request).__name__}: this is node {self._node_rank}")
        match request:
            case kv_wire.Lease():
                async with deadline(kv_wire.LEASE_S):
                    await send(connection, kv_wire.encode(await self._lease(request.keys, leases)))
            case kv_wire.LeaseState():
                async with deadline(kv_wire.LEASE_S):
                    await send(connection, kv_wire.encode(await self._lease_state(request, leases)))
            case kv_wire.Read():
                # The budget can make a row wait for minutes. A reader that is gone must not keep its lease until then.
                await while_open(connection, self._send_rows(connection, request))
            case kv_wire.Part():
                async with deadline(kv_wire.LEASE_S):
                    await send(connection, kv_wire.encode(await self._part(request, leases)))
            case kv_wire.Nodes():
                async with deadline(MESSAGE_S):
                    await send(connection, kv_wire.encode(kv_wire.NodeAddresses(self._cores[0].nodes)))
            case kv_wire.Check():
                async with deadline(MESSAGE_S):
                    await send(connection, kv_wire.encode(self._check(request)))
            case kv_wire.Heartbeat():
                await self._reply(connection, await self._extend(request.lease))
            case kv_wire.Release():
                is_known = request.lease in leases
                await self._release({request.lease} & leases)
                leases.discard(request.lease)
                await self._reply(connection, is_known)

    async def _reply(self, connection: socket.socket, is_known: bool) -> None:
        async with deadline(MESSAGE_S):
            await send(connection, kv_wire.encode(kv_wire.Done(is_known)))

    async def _lease(self, keys: Sequence[bytes], leases: set[bytes]) -> kv_wire.Leased:
        _check_number(leases)
        generation = self._cores[0].generation
        lease_id = secrets.token_bytes(16)
        leases.add(lease_id)
        found: dict[bytes, tuple[int, memoryview]] = {}
        numbers: dict[int, int] = {}
        for number, core in enumerate(self._cores):
            missing = [key for key in keys if key not in found]
            if missing and core.layout is not None:
                rows_of_core = await core.lease(lease_id, missing)
                for index, (key, row) in enumerate(zip(missing, rows_of_core, strict=True)):
                    if row is not None:
                        address = (number << _CORE_SHIFT) + index
                        numbers[address], found[key] = row[0], (address, row[1])
        end = asyncio.get_running_loop().time() + kv_wire.LEASE_S
        self._leases[lease_id] = _Lease(dict(found.values()), end, numbers, generation)
        checksums = await asyncio.to_thread(lambda: {k: xxhash.xxh3_128_digest(b) for k, (_, b) in found.items()})
        rows = [
            kv_wire.LeasedRow(found[key][0], len(found[key][1]), checksums[key]) if key in found else None
            for key in keys
        ]
        if not found:
            await self._release({lease_id})
            leases.discard(lease_id)
        return kv_wire.Leased(lease_id, rows)

    async def _lease_state(self, request: kv_wire.LeaseState, leases: set[bytes]) -> kv_wire.LeasedState:
        """Lease the last state that a core has. The states of other cores stay pinned until the lease ends."""
        _check_number(leases)
        lease_id = secrets.token_bytes(16)
        leases.add(lease_id)
        found: tuple[int, int, memoryview] | None = None
        address = 0
        for number, core in enumerate(self._cores):
            state = None
            if core.layout is not None:
                state = await core.lease_state(lease_id, request.keys, request.first)
            if state is not None and (found is None or state[0] > found[0]):
                found, address = state, number << _CORE_SHIFT
        if found is None:
            leases.discard(lease_id)
            return kv_wire.LeasedState(lease_id)
        block, row, memory = found
        end = asyncio.get_running_loop().time() + kv_wire.LEASE_S
        self._leases[lease_id] = _Lease({address: memory}, end, {address: row}, self._cores[0].generation)
        checksum = await asyncio.to_thread(xxhash.xxh3_128_digest, memory)
        return kv_wire.LeasedState(lease_id, block, kv_wire.LeasedRow(address, len(memory), checksum))

    def _check(self, request: kv_wire.Check) -> kv_wire.Checked:
        """Return the rows of a lease for another node of the group."""
        lease, now = self._leases.get(request.lease), asyncio.get_running_loop().time()
        if lease is None or now >= lease.deadline or lease.generation != request.generation:
            return kv_wire.Checked([], 0.0)
        if any(address not in lease.numbers for address in request.rows):
            return kv_wire.Checked([], 0.0)
        return kv_wire.Checked([lease.numbers[address] for address in request.rows], lease.deadline - now)

    async def _part(self, request: kv_wire.Part, leases: set[bytes]) -> kv_wire.Leased:
        """Return the parts of leased rows on this node, which is not the first."""
        if self._first_node is None or request.node != self._node_rank:
            raise ProtocolError("nodes", f"parts of node {request.node}, but this is node {self._node_rank}")
        _check_number(leases)
        core = self._cores[0]
        if (rows := core.rows()) is None:
            raise ProtocolError("loading", "the rows of this node are not shared yet")
        generation = core.generation
        numbers, _ = await self._first_node.check(request.lease, generation, request.rows)
        if max(numbers) >= len(rows):
            raise ProtocolError("nodes", f"row {max(numbers)} of {len(rows)}")
        parts = {address: rows[number] for address, number in zip(request.rows, numbers, strict=True)}
        checksums = await asyncio.to_thread(lambda: {a: xxhash.xxh3_128_digest(part) for a, part in parts.items()})
        # If the lease is still valid, nothing has changed the rows, and the checksums are those of its blocks.
        _, seconds = await self._first_node.check(request.lease, generation, request.rows)
        end = asyncio.get_running_loop().time() + seconds
        self._leases[request.lease] = _Lease(parts, end, generation=generation)
        leases.add(request.lease)
        return kv_wire.Leased(request.lease, [kv_wire.LeasedRow(a, len(parts[a]), checksums[a]) for a in request.rows])

    async def _prolong(self, lease_id: bytes, lease: _Lease) -> None:
        """Find out from the first node whether the heartbeats of the reader have prolonged a lease."""
        loop = asyncio.get_running_loop()
        if self._first_node is not None and lease.deadline - loop.time() < _RECHECK_S:
            _, seconds = await self._first_node.check(lease_id, lease.generation, [next(iter(lease.rows))])
            lease.deadline = loop.time() + seconds

    async def _send_rows(self, connection: socket.socket, request: kv_wire.Read) -> None:
        loop = asyncio.get_running_loop()
        lease = self._leases.get(request.lease)
        if lease is None or loop.time() >= lease.deadline or any(row not in lease.rows for row in request.rows):
            raise ProtocolError("lease", "a row was requested that is not leased")
        async with deadline(MESSAGE_S):
            await send(connection, kv_wire.encode(kv_wire.Reading()))
        for row in request.rows:
            buffer = lease.rows[row]
            await self._budget.take(len(buffer))
            await self._prolong(request.lease, lease)
            # The heartbeats of the reader move the deadline.
            async with deadline(max(0.0, lease.deadline - loop.time()), "lease"):
                await send(connection, buffer)
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
        for core in self._cores if held and self._first_node is None else ():
            await core.release(held)


def _check_number(leases: set[bytes]) -> None:
    if len(leases) >= MAX_CONNECTION_LEASES:
        raise ProtocolError("protocol", f"more than {MAX_CONNECTION_LEASES} leases on one connection")
