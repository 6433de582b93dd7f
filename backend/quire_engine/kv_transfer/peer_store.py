# SPDX-License-Identifier: Apache-2.0
"""KV blocks of other pods, which requests name. Torch-free.

Each pod has a queue and threads of its own, so that a slow pod delays no other. A block becomes visible only after its
checksum was compared.
"""

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import xxhash

from quire_engine.kv_transfer.daemon_threads import DaemonThreads
from quire_engine.kv_transfer.peer_connection import STALL_S, Cancelled, PeerConnection, closing
from quire_engine.kv_transfer.read_time import ReadTime
from quire_engine.kv_transfer.store import HostRows, OtherNodesRows, PrefixRead, PrefixStore
from quire_engine.step.plan import RunnerLost
from quire_spec.engine.kv_transfer_config import KVTransferConfig, PeerAddress
from quire_spec.errors import QuireError, Unavailable
from quire_spec.protocol import kv_wire
from quire_spec.protocol.allowed_peers import AllowedNodes
from quire_spec.protocol.kv_transfer_params import PromptKeys
from quire_spec.protocol.protocol_error import ProtocolError

_MAX_PEERS = 64
"""Number of pods for which there are threads; those of the pod that was named least recently end."""
_RETRY_S = 5.0
"""After an error, a pod is not asked for this many seconds."""
_LATE_S = 1.5
"""If no request waits for a read any longer, the read was late if it took more than this many seconds. Otherwise, its
requests were aborted."""
_CANCEL_POLL_S = 0.1
"""A read of other nodes that is no longer wanted ends after about this many seconds."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Peers:
    """The pods from which this core reads. The front has checked that a request may name them."""

    def __init__(
        self,
        config: KVTransferConfig,
        rows: HostRows,
        layout: kv_wire.RowLayout,
        state_rows: HostRows | None = None,
    ) -> None:
        """`state_rows` are those of states, if layers have them."""
        self._state_rows = state_rows
        self._config = config
        self._rows = rows
        self._layout = layout
        self._allowed = AllowedNodes(config)
        self._stores: OrderedDict[PeerAddress, PeerStore] = OrderedDict()
        self._lock = threading.Lock()
        self._errors = Counter[str]()
        self.num_requested_blocks = 0

    @property
    def errors(self) -> dict[str, int]:
        """Number of reads that failed, by reason."""
        with self._lock:
            return dict(self._errors)

    def find(self, address: str) -> PrefixStore | None:
        """Return the store of a pod; None if the text is not an address."""
        if (peer := PeerAddress.parse(address)) is None:
            return None
        if (store := self._stores.get(peer)) is None:
            store = self._stores[peer] = PeerStore(self, peer, self._rows, self._layout, self._state_rows)
            if len(self._stores) > _MAX_PEERS:
                self._stores.popitem(last=False)
        self._stores.move_to_end(peer)
        return store

    def read_key(self) -> bytes:
        """Return the key that all pods share; raises Unavailable."""
        return kv_wire.read_key(Path(self._config.key_file))

    def check_nodes(self, addresses: Sequence[str], num_nodes: int) -> list[PeerAddress]:
        """Return the addresses of the other nodes of a pod, as it has named them.

        Raises:
            ProtocolError: this pod must not connect to them, or their number is another one.
        """
        peers = [PeerAddress.parse(address) for address in addresses]
        allowed = [peer for peer in peers if peer is not None and self._allowed.allows(peer)]
        if len(allowed) != len(peers) or len(allowed) != num_nodes:
            raise ProtocolError("nodes", f"the nodes {addresses} are not {num_nodes} allowed peers")
        return allowed

    def count_difference(self, address: str, reason: str, own: PromptKeys, other: PromptKeys) -> None:
        """Count a request whose blocks a pod cannot have, because the field `reason` of the keys differs."""
        if (peer := PeerAddress.parse(address)) is not None:
            values = f"{getattr(own, reason)} here, {getattr(other, reason)} there"
            self.count_error(peer, reason, f"the keys of the prompt differ: {values}")

    def count_error(self, peer: PeerAddress, reason: str, message: str) -> None:
        """Count a read that failed, in any thread. The first error of each kind is logged."""
        with self._lock:
            self._errors[reason] += 1
            is_first = self._errors[reason] == 1
        if is_first:
            logger.warning(
                "kv peer: read failed, tokens are computed peer=%s reason=%s error=%s", peer, reason, message
            )


class PeerStore(PrefixStore):
    """The blocks of one pod. What it has is known only when it has answered."""

    def __init__(
        self,
        peers: Peers,
        address: PeerAddress,
        rows: HostRows,
        layout: kv_wire.RowLayout,
        state_rows: HostRows | None = None,
    ) -> None:
        self._state_rows = state_rows
        self._peers = peers
        self._address = address
        self._rows = rows
        self._layout = layout
        self._connection: PeerConnection | None = None
        self._no_reads_before = 0.0
        self._read_time = ReadTime()
        self._reader = DaemonThreads(1, "kv-peer")
        self._heartbeats = DaemonThreads(1, "kv-heartbeat")

    @property
    def errors(self) -> dict[str, int]:
        """See KVStore; the errors of all pods."""
        return self._peers.errors

    @property
    def seconds_per_block(self) -> float:
        """See KVStore."""
        return self._read_time.seconds_per_block

    def contains(self, keys: Sequence[bytes]) -> int:
        """See KVStore. The pod seems to have everything, until it has answered."""
        return 0 if time.monotonic() < self._no_reads_before else min(len(keys), kv_wire.MAX_KEYS)

    def read(
        self,
        keys: Sequence[bytes],
        rows: Sequence[int],
        on_done: Callable[[int], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """See KVStore."""
        self._peers.num_requested_blocks += len(keys)
        self._reader.submit(partial(self._run, partial(self._read_blocks, keys, rows, is_wanted), len(keys), on_done))

    def read_prefix(
        self,
        keys: Sequence[bytes],
        first: int,
        rows: Sequence[int],
        state_row: int,
        on_done: Callable[[PrefixRead], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """See PrefixStore."""
        self._peers.num_requested_blocks += len(keys) - first
        state_end: list[int] = []

        def transfer() -> Iterator[None]:
            return self._read_prefix(keys, first, rows, state_row, state_end.append, is_wanted)

        def end(num_blocks: int) -> None:
            on_done(PrefixRead(num_blocks, sum(state_end)))

        self._reader.submit(partial(self._run, transfer, len(keys) - first, end))

    def write(self, keys: Sequence[bytes], rows: Sequence[int], on_done: Callable[[int], None]) -> None:
        """See KVStore. Nothing is written: the other pod reads what it needs."""
        on_done(0)

    def _run(self, transfer: Callable[[], Iterator[None]], num_blocks: int, on_done: Callable[[int], None]) -> None:
        """Read `num_blocks` blocks, and call `on_done` with the number of those that were read, also after an
        error."""
        num_done, start, reason, message = 0, time.monotonic(), "", ""
        try:
            if start >= self._no_reads_before:
                self._rows.synchronize()
                if self._state_rows is not None:
                    self._state_rows.synchronize()
                for _ in transfer():
                    num_done += 1
        except Cancelled:
            self._close()
            if time.monotonic() - start > _LATE_S:
                reason, message = "deadline", f"{num_done} of {num_blocks} blocks arrived in time"
        except ProtocolError as error:
            reason, message = error.reason, str(error)
        except RunnerLost as error:
            reason, message = "nodes", str(error)
        except Unavailable as error:
            reason, message = "key", str(error)
        except Exception as error:
            reason, message = "internal", str(error)
            logger.exception("kv peer: a read failed peer=%s", self._address)
        finally:
            if reason:
                self._close()
                self._no_reads_before = time.monotonic() + _RETRY_S
                self._peers.count_error(self._address, reason, message)
            if self._connection is not None:
                # Otherwise, the read and this store refer to each other, and a store that requests no longer name
                # keeps its connection and its threads.
                self._connection.is_wanted = _always
            if num_done:
                self._read_time.add((time.monotonic() - start) / num_done)
            on_done(num_done)

    def _read_blocks(self, keys: Sequence[bytes], rows: Sequence[int], is_wanted: Callable[[], bool]) -> Iterator[None]:
        connection, leased = self._ask(lambda connection: connection.lease(keys), is_wanted)
        places = self._places(leased)
        if places:
            ended = threading.Event()
            self._heartbeats.submit(partial(self._keep, [leased.lease], ended))
            try:
                if self._rows.nodes is None:
                    yield from _read_rows(self._rows, connection, leased.lease, places, rows)
                else:
                    yield from self._read_with_nodes(connection, leased.lease, places, rows, self._rows.nodes)
            finally:
                ended.set()
        if any(place is not None for place in leased.rows):
            connection.release(leased.lease)

    def _places(self, leased: kv_wire.Leased) -> list[kv_wire.LeasedRow]:
        """Return where the first blocks are, up to one that the pod does not have."""
        places: list[kv_wire.LeasedRow] = []
        for place in leased.rows:
            if place is None:
                break
            if place.length != self._layout.row_bytes:
                raise ProtocolError("length", f"a row of {place.length} instead of {self._layout.row_bytes} bytes")
            places.append(place)
        return places

    def _read_prefix(
        self,
        keys: Sequence[bytes],
        first: int,
        rows: Sequence[int],
        state_row: int,
        on_state: Callable[[int], None],
        is_wanted: Callable[[], bool],
    ) -> Iterator[None]:
        """Read the state, call `on_state` with the number of blocks before it, and then read the blocks."""
        assert self._state_rows is not None
        connection, state = self._ask(lambda connection: connection.lease_state(keys, first), is_wanted)
        if (place := state.row) is None:
            return
        size = sum(len(buffer) for buffer in self._state_rows.buffers(state_row))
        if place.length != size:
            raise ProtocolError("length", f"a state of {place.length} instead of {size} bytes")
        leases, end, places = [state.lease], state.block + 1, list[kv_wire.LeasedRow]()
        if missing := keys[first:end]:
            leased = connection.lease(missing)
            leases.append(leased.lease)
            places = self._places(leased)
        # Both are of use only together.
        if len(places) == len(missing):
            ended = threading.Event()
            self._heartbeats.submit(partial(self._keep, leases, ended))
            try:
                for _ in _read_rows(self._state_rows, connection, state.lease, [place], [state_row]):
                    on_state(end)
                if places:
                    yield from _read_rows(self._rows, connection, leases[-1], places, rows)
            finally:
                ended.set()
        for lease in leases:
            connection.release(lease)

    def _read_with_nodes(
        self,
        connection: PeerConnection,
        lease: bytes,
        places: Sequence[kv_wire.LeasedRow],
        rows: Sequence[int],
        nodes: OtherNodesRows,
    ) -> Iterator[None]:
        """Read leased rows on all nodes. Then yield for each of the first rows that all nodes have read.

        It ends only when no node writes into the rows any longer.
        """
        peers = self._peers.check_nodes(connection.nodes(), len(nodes.addresses))
        pairs = [(place.row, row) for place, row in zip(places, rows, strict=False)]
        reads, num_read, failure = nodes.start_read(peers, lease, pairs), 0, None
        try:
            for _ in _read_rows(self._rows, connection, lease, places, rows):
                num_read += 1
        except Exception as error:
            failure = error
            reads.cancel()
        is_cancelled = failure is not None
        while (results := reads.wait(_CANCEL_POLL_S)) is None:
            if not is_cancelled and not connection.is_wanted():
                is_cancelled, failure = True, Cancelled()
                reads.cancel()
        for _ in range(min(num_read, *(result.num_blocks for result in results))):
            yield
        if failure is not None:
            raise failure
        for result in results:
            if result.num_blocks < len(places):
                raise ProtocolError(result.reason or "protocol", result.message)

    def _ask(self, request: Callable[[PeerConnection], T], is_wanted: Callable[[], bool]) -> tuple[PeerConnection, T]:
        """Send the first request of a read. If the connection was idle, the other pod may have closed it or restarted
        in the meantime."""
        if self._connection is not None:
            self._connection.is_wanted = is_wanted
            try:
                return self._connection, request(self._connection)
            except ProtocolError as error:
                self._close()
                if error.reason not in ("closed", "unreachable"):
                    raise
        self._connection = PeerConnection.open(self._address, self._peers.read_key(), self._layout, is_wanted)
        return self._connection, request(self._connection)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _keep(self, leases: Sequence[bytes], ended: threading.Event) -> None:
        """Send heartbeats for leases, on a connection of their own, until the read has ended."""
        if ended.wait(kv_wire.HEARTBEAT_S):
            return
        try:
            deadline = time.monotonic() + STALL_S
            connection = PeerConnection.open(
                self._address, self._peers.read_key(), self._layout, lambda: time.monotonic() < deadline
            )
            with closing(connection):
                connection.is_wanted = lambda: not ended.is_set()
                while all(connection.heartbeat(lease) for lease in leases) and not ended.wait(kv_wire.HEARTBEAT_S):
                    pass
        except (QuireError, Cancelled) as error:
            # The lease then ends, and the checksum shows whether its rows were replaced.
            logger.info("kv peer: no heartbeats peer=%s error=%s", self._address, error)


def _read_rows(
    memory: HostRows,
    connection: PeerConnection,
    lease: bytes,
    places: Sequence[kv_wire.LeasedRow],
    rows: Sequence[int],
) -> Iterator[None]:
    """Read leased rows. Yield after each one."""
    buffers = [memory.buffers(row) for row in rows[: len(places)]]
    addresses = [place.row for place in places]
    for _, place, row in zip(connection.read(lease, addresses, buffers), places, buffers, strict=True):
        if checksum(row) != place.checksum:
            raise ProtocolError("checksum", "a row was damaged on the way")
        yield


def _always() -> bool:
    return True


def checksum(buffers: Sequence[memoryview]) -> bytes:
    """Return the checksum of the buffers of a row."""
    state = xxhash.xxh3_128()
    for buffer in buffers:
        state.update(buffer)
    return bytes(state.digest())
