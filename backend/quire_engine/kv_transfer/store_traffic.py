# SPDX-License-Identifier: Apache-2.0
"""Traffic between host memory and a store: writes new cached rows behind, and reads rows for sequences that wait.

Policy only. The scheduler calls it in its thread; the threads of the store only put their results into a queue."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from quire_engine.kv_cache.host_cache import HostCache
from quire_engine.kv_transfer.store import KVStore
from quire_engine.sequence import BlockId, Sequence

READ_DEADLINE_S = 2.0
"""A sequence waits at most this long for a store, and then computes its tokens."""
_PENDING_SHARE = 4
"""At most one row in this number waits to be written, because such a row cannot be evicted. Further rows are not
written."""


@dataclass(slots=True)
class _Transfer:
    keys: list[bytes]
    rows: list[BlockId]
    is_read: bool
    sequence_id: int = -1
    deadline: float = 0.0


class StoreTraffic:
    """The transfers of one store. It keeps a reference to the rows of each transfer until the store is done with
    them."""

    def __init__(self, store: KVStore, host_cache: HostCache, block_size: int) -> None:
        """Create the traffic; new rows of `host_cache` are written to the store from now on."""
        self._store = store
        self._host_cache = host_cache
        self._block_size = block_size
        self._transfers: list[_Transfer] = []
        self._reads_by_sequence: dict[int, _Transfer] = {}
        self._num_pending_writes = 0
        self._done: queue.SimpleQueue[tuple[_Transfer, int]] = queue.SimpleQueue()
        self._has_news = threading.Event()
        self.wake: Callable[[], None] | None = None
        """Called in any thread when a read is done or late, so that the owner calls `poll` soon."""
        self.num_read_blocks = 0
        self.num_written_blocks = 0
        host_cache.on_stored = self._write

    @property
    def num_errors(self) -> int:
        """Number of blocks that were wrong or could not be read or written."""
        return self._store.num_errors

    @property
    def held_rows(self) -> list[list[BlockId]]:
        """The rows of all transfers."""
        return [transfer.rows for transfer in self._transfers]

    def is_ready(self, sequence: Sequence, missing_keys: Callable[[], list[bytes]], now: float) -> bool:
        """Return whether a sequence need not wait for the store. The first call starts a read if the store has blocks
        of the sequence.

        Args:
            sequence: a waiting sequence.
            missing_keys: returns the keys of its next blocks that are neither on the device nor in host memory.
            now: monotonic seconds.
        """
        read = self._reads_by_sequence.get(sequence.id)
        if read is None:
            if sequence.has_searched_store:
                return True
            sequence.has_searched_store = True
            if (read := self._start_read(sequence, missing_keys(), now)) is None:
                return True
        if now < read.deadline:
            return False
        # The store is slow. The read continues, for later sequences.
        self._reads_by_sequence.pop(sequence.id)
        return True

    def poll(self) -> None:
        """Release the rows of transfers that are done. Rows that were read are cached from now on."""
        while not self._done.empty():
            transfer, num_blocks = self._done.get_nowait()
            self._transfers.remove(transfer)
            if transfer.is_read:
                self.num_read_blocks += num_blocks
                for key, row in list(zip(transfer.keys, transfer.rows, strict=True))[:num_blocks]:
                    self._host_cache.pool.cache_block(row, key)
                if self._reads_by_sequence.get(transfer.sequence_id) is transfer:
                    del self._reads_by_sequence[transfer.sequence_id]
            else:
                self.num_written_blocks += num_blocks
                self._num_pending_writes -= len(transfer.rows)
            self._host_cache.pool.free(transfer.rows)

    def wait(self, timeout_s: float) -> None:
        """Wait until a transfer is done, for owners of an engine that have nothing else to do."""
        if self._reads_by_sequence and self._has_news.wait(timeout_s):
            self._has_news.clear()

    def _start_read(self, sequence: Sequence, keys: list[bytes], now: float) -> _Transfer | None:
        num_blocks = min(self._store.contains(keys), self._host_cache.pool.num_free)
        costs = self._host_cache.costs
        seconds = num_blocks * (costs.seconds_per_block + self._store.seconds_per_block)
        if not num_blocks or seconds >= num_blocks * self._block_size * costs.seconds_per_token:
            return None
        rows = self._host_cache.pool.allocate(num_blocks)
        read = _Transfer(keys[:num_blocks], rows, True, sequence.id, now + READ_DEADLINE_S)
        self._transfers.append(read)
        self._reads_by_sequence[sequence.id] = read
        timer = threading.Timer(READ_DEADLINE_S + 0.01, self._notify)
        timer.daemon = True
        timer.start()

        def on_done(num_read: int) -> None:
            timer.cancel()
            self._done.put((read, num_read))
            self._notify()

        self._store.read(read.keys, rows, on_done)
        return read

    def _write(self, row: BlockId, key: bytes) -> None:
        max_pending = max(1, self._host_cache.pool.num_blocks // _PENDING_SHARE)
        if self._num_pending_writes >= max_pending or self._store.contains([key]):
            return
        self._host_cache.pool.acquire([row])
        write = _Transfer([key], [row], False)
        self._transfers.append(write)
        self._num_pending_writes += 1
        self._store.write(write.keys, write.rows, lambda num_written: self._done.put((write, num_written)))

    def _notify(self) -> None:
        self._has_news.set()
        if self.wake is not None:
            self.wake()
