# SPDX-License-Identifier: Apache-2.0
"""Host memory for snapshots of states: which of its rows holds which snapshot.

Policy only. The state manager, the prefix cache and the traffic of a store call it; the model runner makes the copies
(`StateCache.copy`)."""

from collections import Counter, OrderedDict
from collections.abc import Callable

from quire_engine.kv_cache.state_pool import StatePool
from quire_engine.step.builder import StepPlanBuilder
from quire_engine.step.plan import StateCopy, StepPlan
from quire_spec.errors import Internal


class HostStates:
    """A fixed number of rows of host memory, each of which is free, is filled by a step in flight or by a store, or is
    a snapshot.

    Their numbers follow those of the rows of the device. As with KV blocks, a snapshot is stored when it is used for
    the second time, and a step stores only one, so that other sequences hardly notice. It is found when the step is
    complete. If no row is free, the snapshot that was used least recently is evicted. Snapshots that steps in flight or
    a store read are not evicted.
    """

    def __init__(self, first_row: int = 0, num_rows: int = 0) -> None:
        self.first_row = first_row
        """The first row."""
        self._rows = range(first_row, first_row + num_rows)
        self._free = list(reversed(self._rows))
        # The snapshot that is evicted next is at the beginning.
        self._row_by_key: OrderedDict[bytes, int] = OrderedDict()
        # Keys of snapshots that were used and are not stored yet, in the order of their use.
        self._requested: OrderedDict[bytes, None] = OrderedDict()
        # The rows that steps in flight fill, and those that a store fills.
        self._storing: dict[int, bytes] = {}
        self._reading: dict[int, bytes] = {}
        # How many readers the row of a snapshot has.
        self._readers = Counter[int]()
        self.on_stored: Callable[[int, bytes], None] | None = None
        """Called with the row and the key of each snapshot that a step has stored."""
        self.num_stored = 0
        """Number of snapshots that were stored."""
        self.num_loaded = 0
        """Number of snapshots that sequences have continued from."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._row_by_key

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self._rows)

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots."""
        return len(self._row_by_key)

    def load(self, key: bytes) -> int:
        """Return the row of a snapshot that a sequence reads in the step that is being planned."""
        self._row_by_key.move_to_end(key)
        self.num_loaded += 1
        return self._acquire(self._row_by_key[key])

    def pin(self, key: bytes) -> int:
        """Return the row of a snapshot that is not evicted until `release` is called."""
        return self._acquire(self._row_by_key[key])

    def release(self, row: int) -> None:
        """Called when a reader of the row of a snapshot is done."""
        self._readers[row] -= 1
        if not self._readers[row]:
            del self._readers[row]

    def _acquire(self, row: int) -> int:
        self._readers[row] += 1
        return row

    def request(self, key: bytes) -> None:
        """Called with the key of a snapshot on the device that was used, so that a later step stores it."""
        if key in self._row_by_key:
            self._row_by_key.move_to_end(key)
        elif len(self._requested) < len(self._rows):
            self._requested[key] = None

    def plan_store(self, device: StatePool, builder: StepPlanBuilder) -> None:
        """Plan to copy one requested snapshot that the device still has. Must be called after all other copies of
        states of the step are planned, because these can evict snapshots."""
        while self._requested and self._has_room:
            key, _ = self._requested.popitem(last=False)
            source = device.row_of(key)
            if source is None or key in self or key in (*self._storing.values(), *self._reading.values()):
                continue
            row = self._allocate()
            self._storing[row] = key
            builder.state_copies.append(StateCopy(source, row))
            return

    def store(self, key: bytes, copy: Callable[[int], None]) -> int | None:
        """Store a snapshot beside the steps. `copy` gets its row and starts the copy. Return the row; None if all rows
        are in use, or if a step or a store fills a row with this snapshot."""
        if key in (*self._storing.values(), *self._reading.values()) or not self._has_room:
            return None
        row = self._allocate()
        try:
            copy(row)
        except Exception:
            self._free.append(row)
            raise
        self._add(row, key)
        return row

    def begin_read(self, key: bytes) -> int | None:
        """Return the row that a store fills with a snapshot; None if all rows are in use, or if the snapshot is stored
        or read at the moment."""
        if key in self or key in (*self._storing.values(), *self._reading.values()) or not self._has_room:
            return None
        row = self._allocate()
        self._reading[row] = key
        return row

    def end_read(self, row: int, key: bytes | None) -> None:
        """Called when a store is done with a row. It has read the snapshot with this key, or none. Another pod may have
        an earlier snapshot than the one that was looked for."""
        self._reading.pop(row)
        if key is None or key in self or key in (*self._storing.values(), *self._reading.values()):
            self._free.append(row)
        else:
            self._row_by_key[key] = row

    @property
    def _has_room(self) -> bool:
        return bool(self._free) or len(self._row_by_key) > len(self._readers)

    def _allocate(self) -> int:
        if self._free:
            return self._free.pop()
        key = next(key for key, row in self._row_by_key.items() if row not in self._readers)
        return self._row_by_key.pop(key)

    def complete_step(self, plan: StepPlan, step_failed: bool) -> None:
        """When a step is complete, the snapshot that it has stored can be found, and those that it has read can be
        evicted."""
        for copy in plan.state_copies:
            if copy.source in self._rows:
                self.release(copy.source)
        for row in [copy.destination for copy in plan.state_copies if copy.destination in self._storing]:
            key = self._storing.pop(row)
            if step_failed:
                self._free.append(row)
                continue
            self._add(row, key)

    def _add(self, row: int, key: bytes) -> None:
        self._row_by_key[key] = row
        self.num_stored += 1
        if self.on_stored is not None:
            self.on_stored(row, key)

    def check_integrity(self) -> None:
        """Raise Internal unless every row is exactly one of free, being filled, or a snapshot."""
        rows = [*self._free, *self._storing, *self._reading, *self._row_by_key.values()]
        if sorted(rows) != list(self._rows) or not self._readers.keys() <= set(self._row_by_key.values()):
            raise Internal(
                f"host states: {len(self._rows)} rows, {len(self._free)} free, {len(self._storing)} being filled by "
                f"steps, {len(self._reading)} by a store, {len(self._row_by_key)} snapshots, readers: {self._readers}"
            )
