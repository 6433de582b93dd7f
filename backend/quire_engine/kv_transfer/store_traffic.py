# SPDX-License-Identifier: Apache-2.0
"""Traffic between host memory and a store: writes new cached rows behind, and reads rows for sequences that wait.

Policy only. The scheduler calls it in its thread; the threads of the store only put their results into a queue."""

import math
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from typing import cast

from quire_engine.kv_cache.block_events import BlocksStored, Medium
from quire_engine.kv_cache.host_cache import HostCache
from quire_engine.kv_transfer.state_traffic import StateTraffic
from quire_engine.kv_transfer.store import KVStore, PrefixRead, PrefixStore
from quire_engine.sequence import BlockId, Sequence
from quire_spec.constants import AdapterDigest

READ_DEADLINE_S = 2.0
"""A sequence waits at most this long for a store, and then computes its tokens. It waits longer for another pod if
computing them takes longer."""
_MAX_WAIT_S = 30.0
"""A sequence waits at most this long for another pod."""
_END_S = 0.3
"""A read of another pod that is late ends within this many seconds."""
_PENDING_SHARE = 4
"""At most one row in this number waits to be written, because such a row cannot be evicted. Further rows are not
written."""
_READ_SHARE = 2
"""At most one row in this number is being read, because reads evict what is cached. Further blocks are computed."""
_CHECKED_KEYS = 16
"""Each plan checks whether the store still has this number of blocks that were announced, so that all are checked in
turn."""


@dataclass(slots=True)
class _Transfer:
    store: KVStore
    keys: list[bytes]
    rows: list[BlockId]
    is_read: bool
    deadline: float = math.inf
    """Monotonic seconds at which a read is late."""
    adapters: Mapping[bytes, AdapterDigest | None] = field(default_factory=dict)
    """The adapter of each block of a read."""
    waiting: set[int] = field(default_factory=set)
    """The unfinished sequences that have waited for a read."""
    requiring: set[int] = field(default_factory=set)
    """Those of them that fail if the read fails."""
    is_wanted: bool = True
    """False if a store may end a read early."""
    awaited: list[bytes] = field(default_factory=list)
    """The keys by which other sequences find a read: those of its blocks, or with a state, those of all blocks before
    it that were missing."""
    state_row: int | None = None
    """The row of the state that is read before the blocks, if any."""
    state_end: int = 0
    """Number of awaited blocks after which the state is that was read and checked; 0 if there is none."""


class StoreTraffic:
    """The transfers of a store, and those of other pods. It keeps a reference to the rows of each transfer until the
    store is done with them."""

    def __init__(
        self,
        store: KVStore | None,
        host_cache: HostCache,
        block_size: int,
        find_peer: Callable[[str], KVStore | None] = lambda _: None,
        recompute_threshold: int = 0,
        states: StateTraffic | None = None,
        has_block: Callable[[bytes], bool] = lambda _: False,
    ) -> None:
        """Create the traffic; new rows of `host_cache` are written to `store` from now on, if there is one.

        `find_peer` returns the blocks of the pod that a request names, as HOST:PORT. Nothing is read from other pods
        if fewer tokens of a sequence than `recompute_threshold` are not cached, or if computing them takes less time.
        With 0, everything is read that another pod has. If layers have states, `states` is their traffic, and
        `has_block` returns whether the device or host memory has a block.
        """
        self.states = states
        self._has_block = has_block
        self._store = store
        self._find_peer = find_peer
        self._recompute_threshold = recompute_threshold
        self._host_cache = host_cache
        self._block_size = block_size
        self._transfers: list[_Transfer] = []
        # The read of each block that is being read, in the order in which the reads started.
        self._reads: dict[bytes, _Transfer] = {}
        self._num_pending_writes = 0
        self._done: queue.SimpleQueue[tuple[_Transfer, int]] = queue.SimpleQueue()
        self._has_news = threading.Event()
        self.wake: Callable[[], None] | None = None
        """Called in any thread when a read is done, so that the owner plans soon."""
        self.next_deadline = math.inf
        """Monotonic seconds at which the first of the sequences that waited in the latest plan stops waiting."""
        self.unread: set[int] = set()
        """The unfinished sequences that must fail, because blocks that they require could not be read."""
        self.num_read_blocks = 0
        self.num_written_blocks = 0
        self.num_peer_read_blocks = 0
        # The blocks that were announced as stored, only if events are recorded.
        self._announced: deque[bytes] = deque()
        if store is not None:
            host_cache.on_stored = self._write

    @property
    def errors(self) -> Mapping[str, int]:
        """Number of blocks that were wrong or could not be read from the store or written to it, by reason."""
        errors = Counter[str]() if self._store is None else Counter(self._store.errors)
        return errors if self.states is None else errors + Counter(self.states.errors)

    @property
    def held_rows(self) -> list[list[BlockId]]:
        """The rows of all transfers."""
        return [transfer.rows for transfer in self._transfers]

    def is_ready(
        self, sequence: Sequence, missing_blocks: Callable[[], Mapping[bytes, AdapterDigest | None]], now: float
    ) -> bool:
        """Return whether a sequence need not wait for a store. A sequence whose next block is being read waits for
        that read. Otherwise, a read starts if a store has blocks of the sequence; this happens once for each store.

        Args:
            sequence: a waiting sequence.
            missing_blocks: returns the keys of its next blocks that are neither on the device nor in host memory, and
                the adapter of each block.
            now: monotonic seconds.
        """
        read = self._reads.get(sequence.awaited_key) or self._find_read(sequence, missing_blocks, now)
        if read is None:
            return sequence.id not in self.unread
        requires = sequence.kv_source_required and read.store is self._find_peer(sequence.kv_source)
        deadline = min(read.deadline, sequence.store_deadline)
        if now >= deadline and read.store is not self._store:
            # The other pod would keep its rows for too long. The blocks that have arrived are cached as the read ends.
            read.is_wanted = False
            deadline += _END_S
        if now >= deadline:
            # The store is slow. The read continues, for later sequences.
            if requires:
                self.unread.add(sequence.id)
            return not requires
        read.waiting.add(sequence.id)
        if requires:
            read.requiring.add(sequence.id)
        self.next_deadline = min(self.next_deadline, deadline)
        return False

    def on_finished(self, sequence: Sequence) -> None:
        """Called when a sequence has finished or was aborted. The read of another pod ends if no sequence waits for
        it."""
        self.unread.discard(sequence.id)
        if (read := self._reads.get(sequence.awaited_key)) is not None and sequence.id in read.waiting:
            read.waiting.remove(sequence.id)
            read.requiring.discard(sequence.id)
            read.is_wanted &= read.store is self._store or bool(read.waiting)

    def poll(self) -> None:
        """Called at the start of each plan. Release the rows of transfers that are done. Rows that were read are cached
        from now on."""
        self.next_deadline = math.inf
        if self.states is not None:
            self.states.poll()
        while not self._done.empty():
            transfer, num_blocks = self._done.get_nowait()
            self._transfers.remove(transfer)
            if transfer.is_read:
                if transfer.store is self._store:
                    self.num_read_blocks += num_blocks
                else:
                    self.num_peer_read_blocks += num_blocks
                for key, row in list(zip(transfer.keys, transfer.rows, strict=True))[:num_blocks]:
                    if self._host_cache.pool.cache_block(row, key):
                        self._announce(key, "CPU", transfer.adapters[key])
                lacks_state = transfer.state_row is not None and transfer.state_end < len(transfer.awaited)
                if num_blocks < len(transfer.keys) or lacks_state:
                    self.unread |= transfer.requiring
                if self.states is not None and transfer.state_row is not None:
                    state_key = transfer.awaited[transfer.state_end - 1] if transfer.state_end else None
                    self.states.end_read(transfer.state_row, state_key, transfer.store is not self._store)
                for key in transfer.awaited:
                    del self._reads[key]
            else:
                self.num_written_blocks += num_blocks
                for key in transfer.keys[:num_blocks]:
                    self._announce(key, "STORAGE")
                self._num_pending_writes -= len(transfer.rows)
            self._host_cache.pool.free(transfer.rows)
        self._announce_removals()

    def wait(self, timeout_s: float) -> None:
        """Wait until a read is done, for owners of an engine that have nothing else to do."""
        if self.next_deadline < math.inf and self._has_news.wait(timeout_s):
            self._has_news.clear()

    def _announce(self, key: bytes, medium: Medium, adapter_digest: AdapterDigest | None = None) -> None:
        log = self._host_cache.pool.event_log
        if log is not None:
            log.add_stored(BlocksStored([key], None, [], adapter_digest, medium=medium))
            if medium == "STORAGE":
                self._announced.append(key)

    def _announce_removals(self) -> None:
        """Find announced blocks that this process or another one has removed from the store."""
        log = self._host_cache.pool.event_log
        for _ in range(min(_CHECKED_KEYS, len(self._announced))):
            key = self._announced.popleft()
            if self._store is not None and self._store.contains([key]):
                self._announced.append(key)
            elif log is not None:
                log.add_removed(key, "STORAGE")

    def _find_read(
        self, sequence: Sequence, missing_blocks: Callable[[], Mapping[bytes, AdapterDigest | None]], now: float
    ) -> _Transfer | None:
        """Return the read for which a sequence waits: that of another sequence, or a new one."""
        stores = self._stores(sequence)
        if sequence.num_searched_stores >= len(stores) or now >= sequence.store_deadline:
            return None
        adapters = missing_blocks()
        wait_s = READ_DEADLINE_S
        if stores[-1] is not self._store:
            compute_s = len(adapters) * self._block_size * self._host_cache.costs.seconds_per_token
            wait_s = max(wait_s, min(compute_s, _MAX_WAIT_S))
        sequence.store_deadline = min(sequence.store_deadline, now + wait_s)
        sequence.awaited_key = next(iter(adapters), b"")
        read = self._reads.get(sequence.awaited_key)
        num_uncached = len(adapters) * self._block_size + sequence.num_tokens % self._block_size
        if stores[-1] is not self._store and num_uncached < self._recompute_threshold:
            stores.pop()
        while read is None and sequence.num_searched_stores < len(stores):
            store = stores[sequence.num_searched_stores]
            sequence.num_searched_stores += 1
            read = self._start_read(store, adapters, now, READ_DEADLINE_S if store is self._store else wait_s)
            if sequence.kv_source_required and store is not self._store and adapters and not store.contains([b""]):
                # The pod has failed a moment ago, and is not asked.
                self.unread.add(sequence.id)
        return read

    def _stores(self, sequence: Sequence) -> list[KVStore]:
        """Return where the blocks of a sequence can be, the nearest store first."""
        stores = (self._store, self._find_peer(sequence.kv_source) if sequence.kv_source else None)
        return [store for store in stores if store is not None]

    def _start_read(
        self, store: KVStore, adapters: Mapping[bytes, AdapterDigest | None], now: float, wait_s: float
    ) -> _Transfer | None:
        if any(transfer.store is store and now >= transfer.deadline for transfer in self._reads.values()):
            # While the store is late, it gets no more reads, which would delay more sequences and occupy more rows.
            return None
        if self.states is not None and store is not self._store:
            return self._start_peer_read(cast(PrefixStore, store), adapters, now + wait_s, self.states)
        if self.states is not None:
            return self._start_read_with_state(store, adapters, now, self.states)
        pool, costs = self._host_cache.pool, self._host_cache.costs
        max_blocks = min(pool.num_free, pool.num_blocks // _READ_SHARE - len(self._reads))
        keys = list(takewhile(lambda key: key not in self._reads, islice(adapters, max(0, max_blocks))))
        num_blocks = store.contains(keys)
        read_s = costs.seconds_per_block + store.seconds_per_block
        is_faster = read_s < self._block_size * costs.seconds_per_token
        is_always_read = store is not self._store and not self._recompute_threshold
        if not num_blocks or not (is_faster or is_always_read):
            return None
        rows = pool.allocate(num_blocks)
        read = _Transfer(store, keys[:num_blocks], rows, True, now + wait_s, adapters, awaited=keys[:num_blocks])
        self._add_read(read)
        store.read(read.keys, read.rows, partial(self._end_read, read), lambda: read.is_wanted)
        return read

    def _start_read_with_state(
        self, store: KVStore, adapters: Mapping[bytes, AdapterDigest | None], now: float, states: StateTraffic
    ) -> _Transfer | None:
        """Start to read the last state that can be reached, and the blocks before it that are missing. The blocks are
        of no use without the state, so it comes first."""
        pool, costs = self._host_cache.pool, self._host_cache.costs
        keys, num_local = self._reachable(adapters)
        num_stored = store.contains(keys[num_local:])
        end = states.longest_prefix(keys[: num_local + num_stored])
        missing, is_local = keys[num_local:end], end > 0 and states.is_local(keys[end - 1])
        read_s = len(missing) * (costs.seconds_per_block + store.seconds_per_block)
        if not is_local:
            read_s += states.seconds_per_state + costs.num_blocks_per_state * costs.seconds_per_block
        if not end or (is_local and not missing) or read_s >= end * self._block_size * costs.seconds_per_token:
            return None
        row = None if is_local else states.begin_read(keys[end - 1])
        if row is None and not is_local:
            return None
        read = _Transfer(
            store,
            missing,
            pool.allocate(len(missing)),
            True,
            now + READ_DEADLINE_S,
            adapters,
            awaited=keys[:end],
            state_row=row,
        )
        self._add_read(read)

        def read_blocks(has_state: bool) -> None:
            read.state_end = end if has_state else 0
            if has_state and missing:
                store.read(missing, read.rows, partial(self._end_read, read))
            else:
                self._end_read(read, 0)

        if row is None:
            store.read(missing, read.rows, partial(self._end_read, read))
        else:
            states.read(keys[end - 1], row, read_blocks)
        return read

    def _start_peer_read(
        self, store: PrefixStore, adapters: Mapping[bytes, AdapterDigest | None], deadline: float, states: StateTraffic
    ) -> _Transfer | None:
        """Start to read the last state that another pod has, and the blocks before it that are missing. If the last
        state that can be of use is here, only blocks are missing."""
        pool, costs = self._host_cache.pool, self._host_cache.costs
        keys, num_local = self._reachable(adapters)
        keys = keys[: num_local + store.contains(keys[num_local:] or keys[:1]) if keys else 0]
        if not keys:
            return None
        is_local, missing = states.is_local(keys[-1]), keys[num_local:]
        read_s = len(missing) * (costs.seconds_per_block + store.seconds_per_block)
        if not is_local:
            read_s += costs.num_blocks_per_state * costs.seconds_per_block
        is_faster = read_s < len(keys) * self._block_size * costs.seconds_per_token
        if (is_local and not missing) or not (is_faster or not self._recompute_threshold):
            return None
        row = None if is_local else states.begin_read(keys[-1])
        if row is None and not is_local:
            return None
        rows = pool.allocate(len(missing))
        read = _Transfer(store, missing, rows, True, deadline, adapters, awaited=keys, state_row=row)
        self._add_read(read)
        if row is None:
            store.read(missing, rows, partial(self._end_read, read), lambda: read.is_wanted)
            return read

        def end_read(result: PrefixRead) -> None:
            read.state_end = result.state_end
            self._end_read(read, result.num_blocks)

        store.read_prefix(keys, num_local, rows, states.number(row), end_read, lambda: read.is_wanted)
        return read

    def _reachable(self, adapters: Mapping[bytes, AdapterDigest | None]) -> tuple[list[bytes], int]:
        """Return the keys of the next blocks of a sequence that are here or can be read, and how many of the first ones
        are here."""
        keys = list(takewhile(lambda key: key not in self._reads, adapters))
        num_local = next((number for number, key in enumerate(keys) if not self._has_block(key)), len(keys))
        pool = self._host_cache.pool
        max_blocks = min(pool.num_free, pool.num_blocks // _READ_SHARE - self._num_rows_read)
        return keys[: num_local + max(0, max_blocks)], num_local

    @property
    def _num_rows_read(self) -> int:
        return sum(len(transfer.rows) for transfer in self._transfers if transfer.is_read)

    def _add_read(self, read: _Transfer) -> None:
        self._transfers.append(read)
        self._reads |= dict.fromkeys(read.awaited, read)

    def _end_read(self, read: _Transfer, num_read: int) -> None:
        """Called in any thread when a store has read blocks."""
        self._done.put((read, num_read))
        self._has_news.set()
        if self.wake is not None:
            self.wake()

    def _write(self, row: BlockId, key: bytes) -> None:
        assert self._store is not None
        max_pending = max(1, self._host_cache.pool.num_blocks // _PENDING_SHARE)
        if self._num_pending_writes >= max_pending or self._store.contains([key]):
            return
        self._host_cache.pool.acquire([row])
        write = _Transfer(self._store, [key], [row], False)
        self._transfers.append(write)
        self._num_pending_writes += 1
        self._store.write(write.keys, write.rows, lambda num_written: self._done.put((write, num_written)))
