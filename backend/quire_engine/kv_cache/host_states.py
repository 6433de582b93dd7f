# SPDX-License-Identifier: Apache-2.0
"""Host memory for snapshots of states: which of its rows holds which snapshot.

Policy only. The state manager and the prefix cache call it; the model runner makes the copies (`StateCache.copy`)."""

from collections import OrderedDict

from quire_engine.kv_cache.state_pool import StatePool
from quire_engine.step.builder import StepPlanBuilder
from quire_engine.step.plan import StateCopy, StepPlan
from quire_spec.errors import Internal


class HostStates:
    """A fixed number of rows of host memory, each of which is free, is filled by a step in flight, or is a snapshot.

    Their numbers follow those of the rows of the device. As with KV blocks, a snapshot is stored when it is used for
    the second time, and a step stores only one, so that other sequences hardly notice. It is found when the step is
    complete. If no row is free, the snapshot that was used least recently is evicted.
    """

    def __init__(self, first_row: int = 0, num_rows: int = 0) -> None:
        self._rows = range(first_row, first_row + num_rows)
        self._free = list(reversed(self._rows))
        # The snapshot that is evicted next is at the beginning.
        self._row_by_key: OrderedDict[bytes, int] = OrderedDict()
        # Keys of snapshots that were used and are not stored yet, in the order of their use.
        self._requested: OrderedDict[bytes, None] = OrderedDict()
        # The rows that steps in flight fill.
        self._storing: dict[int, bytes] = {}
        self.num_stored = 0
        """Number of snapshots that were stored."""
        self.num_loaded = 0
        """Number of snapshots that sequences have continued from."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._row_by_key

    def load(self, key: bytes) -> int:
        """Return the row of a snapshot that a sequence reads in the step that is being planned."""
        self._row_by_key.move_to_end(key)
        self.num_loaded += 1
        return self._row_by_key[key]

    def request(self, key: bytes) -> None:
        """Called with the key of a snapshot on the device that was used, so that a later step stores it."""
        if key in self._row_by_key:
            self._row_by_key.move_to_end(key)
        elif len(self._requested) < len(self._rows):
            self._requested[key] = None

    def plan_store(self, device: StatePool, builder: StepPlanBuilder) -> None:
        """Plan to copy one requested snapshot that the device still has. Must be called after all other copies of
        states of the step are planned, because these can evict snapshots."""
        while self._requested and (self._free or self._row_by_key):
            key, _ = self._requested.popitem(last=False)
            source = device.row_of(key)
            if source is None or key in self._row_by_key or key in self._storing.values():
                continue
            row = self._free.pop() if self._free else self._row_by_key.popitem(last=False)[1]
            self._storing[row] = key
            builder.state_copies.append(StateCopy(source, row))
            return

    def complete_step(self, plan: StepPlan, step_failed: bool) -> None:
        """When a step is complete, the snapshot that it has stored can be found."""
        for row in [copy.destination for copy in plan.state_copies if copy.destination in self._storing]:
            key = self._storing.pop(row)
            if step_failed:
                self._free.append(row)
            else:
                self._row_by_key[key] = row
                self.num_stored += 1

    def check_integrity(self) -> None:
        """Raise Internal unless every row is exactly one of free, being filled, or a snapshot."""
        rows = [*self._free, *self._storing, *self._row_by_key.values()]
        if sorted(rows) != list(self._rows):
            raise Internal(
                f"host states: {len(self._rows)} rows, {len(self._free)} free, {len(self._storing)} being filled, "
                f"{len(self._row_by_key)} snapshots"
            )
