# SPDX-License-Identifier: Apache-2.0
"""Traffic between the snapshots of states in host memory and a store: writes new ones behind, and reads those that
sequences continue from.

Policy only. The scheduler calls it in its thread, through `StoreTraffic`."""

import queue
from collections.abc import Callable, Mapping, Sequence

from quire_engine.kv_cache.host_states import HostStates
from quire_engine.kv_cache.state_pool import StatePool
from quire_engine.kv_transfer.store import KVStore

_PENDING_SHARE = 4
"""At most one row in this number waits to be written, because such a row cannot be evicted. Further snapshots are not
written."""


class StateTraffic:
    """The transfers of states with a store, and with other pods. A row that is read or filled is not evicted."""

    def __init__(self, store: KVStore | None, host: HostStates, device: StatePool) -> None:
        """Create the traffic; new snapshots of `host` are written to `store` from now on, if there is one."""
        self._store = store
        self._host = host
        self._device = device
        self._max_pending = max(1, host.num_rows // _PENDING_SHARE)
        self._num_pending = 0
        # The row of each write that is done, and whether the store has it.
        self._written: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        self.num_read = 0
        """Number of states that were read from the store."""
        self.num_peer_read = 0
        """Number of states that were read from other pods."""
        self.num_written = 0
        """Number of states that were written."""
        if store is not None:
            host.on_stored = self._write

    @property
    def errors(self) -> Mapping[str, int]:
        """Number of states that were wrong or could not be read or written, by reason."""
        return {} if self._store is None else self._store.errors

    @property
    def seconds_per_state(self) -> float:
        """Measured seconds to read one state; 0 if nothing was measured lately."""
        return 0.0 if self._store is None else self._store.seconds_per_block

    def is_local(self, key: bytes) -> bool:
        """Return whether the device or host memory has a snapshot."""
        return key in self._device or key in self._host

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """Return the number of first blocks with these keys after the last of which a snapshot exists anywhere; 0 if
        there is none."""
        for end in range(len(keys), 0, -1):
            if self.is_local(keys[end - 1]) or (self._store is not None and self._store.contains([keys[end - 1]])):
                return end
        return 0

    def longest_local_prefix(self, keys: Sequence[bytes]) -> int:
        """The same for the device and host memory."""
        return next((end for end in range(len(keys), 0, -1) if self.is_local(keys[end - 1])), 0)

    def begin_read(self, key: bytes) -> int | None:
        """Return a row for a snapshot; see HostStates. Without a row, nothing can be read."""
        return self._host.begin_read(key)

    def read(self, key: bytes, row: int, on_done: Callable[[bool], None]) -> None:
        """Start to read a snapshot into a row. `on_done` gets, in any thread, whether it was read and checked."""
        assert self._store is not None
        self._store.read([key], [self.number(row)], lambda num_read: on_done(num_read == 1))

    def number(self, row: int) -> int:
        """Return the number of a row among those of host memory."""
        return row - self._host.first_row

    def end_read(self, row: int, key: bytes | None, is_peer: bool) -> None:
        """Called in the thread of the scheduler when a read is done. `key` is that of the snapshot that was read, if
        any; `is_peer` says whether another pod had it."""
        self._host.end_read(row, key)
        if key is not None and is_peer:
            self.num_peer_read += 1
        elif key is not None:
            self.num_read += 1

    def poll(self) -> None:
        """Called at the start of each plan. Release the rows that were written."""
        while not self._written.empty():
            row, is_written = self._written.get_nowait()
            self._host.release(row)
            self._num_pending -= 1
            self.num_written += is_written

    def _write(self, row: int, key: bytes) -> None:
        assert self._store is not None
        if self._num_pending >= self._max_pending or self._store.contains([key]):
            return
        self._num_pending += 1
        self._host.pin(key)
        self._store.write([key], [self.number(row)], lambda num: self._written.put((row, num == 1)))
