# SPDX-License-Identifier: Apache-2.0
"""Leases of other pods on rows of host memory: which rows they pin, and for how long. Policy only.

A lease never pins a block of the device: such a block is copied to a row first. All leases together pin at most their
quota, so that the rest of the rows stays available for the requests of this pod."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from quire_engine.kv_cache.block_pool import BlockPool
from quire_engine.kv_cache.host_cache import HostCache
from quire_engine.kv_cache.host_states import HostStates
from quire_engine.kv_cache.state_pool import StatePool
from quire_engine.sequence import BlockId
from quire_engine.step.plan import SwapCopy
from quire_spec.protocol.kv_wire import EXTENSION_S, LEASE_S

_QUOTA_SHARE = 4
"""At most one row in this number is pinned by leases."""


@dataclass(slots=True)
class _Lease:
    deadline: float
    rows: list[BlockId] = field(default_factory=list)
    states: list[int] = field(default_factory=list)


class StateLeases:
    """The snapshots of states that leases pin."""

    def __init__(
        self,
        host: HostStates,
        device: StatePool,
        is_written: Callable[[int], bool],
        copy_out: Callable[[Sequence[SwapCopy]], None],
    ) -> None:
        """`is_written` returns whether no step in flight writes a row of the device. `copy_out` starts copies from
        rows of the device to rows of host memory, whose numbers begin with 0."""
        self._host = host
        self._device = device
        self._is_written = is_written
        self._copy_out = copy_out
        self.max_rows = max(1, host.num_rows // _QUOTA_SHARE)
        """The quota; see HostLeases."""

    def pin(self, key: bytes) -> int | None:
        """Pin a snapshot, and return its row; None if there is none that is complete, or no room for it."""
        if key not in self._host and not self._store(key):
            return None
        return self._host.pin(key)

    def release(self, rows: Iterable[int]) -> None:
        """Release snapshots."""
        for row in rows:
            self._host.release(row)

    def number(self, row: int) -> int:
        """Return the number of a row among those of host memory."""
        return row - self._host.first_row

    def _store(self, key: bytes) -> bool:
        source = self._device.row_of(key)
        if source is None or not self._is_written(source):
            return False
        number, block = self.number, BlockId(source)
        row = self._host.store(key, lambda row: self._copy_out([SwapCopy(block, BlockId(number(row)))]))
        return row is not None


class HostLeases:
    """The leases of one core. `now` is in monotonic seconds."""

    def __init__(
        self,
        host_cache: HostCache,
        device_pool: BlockPool,
        copy_out: Callable[[Sequence[SwapCopy]], None],
        states: StateLeases | None = None,
    ) -> None:
        """`copy_out` starts copies from the device to rows. `states` are given if layers have them."""
        self._states = states
        self._host_cache = host_cache
        self._device_pool = device_pool
        self._copy_out = copy_out
        self._leases: dict[bytes, _Lease] = {}
        self.max_rows = max(1, host_cache.pool.num_blocks // _QUOTA_SHARE)
        """The quota. A row counts once for each lease that pins it."""
        self.num_refused = 0
        """Number of blocks that were not leased because of the quota."""

    @property
    def num_rows(self) -> int:
        """Number of rows that leases pin, also of states."""
        return sum(len(lease.rows) + len(lease.states) for lease in self._leases.values())

    @property
    def _num_free(self) -> int:
        """Number of further rows of blocks that leases can pin."""
        return self.max_rows - sum(len(lease.rows) for lease in self._leases.values())

    @property
    def held_rows(self) -> list[list[BlockId]]:
        """The rows of all leases."""
        return [lease.rows for lease in self._leases.values()]

    def lease(self, lease_id: bytes, keys: Sequence[bytes], now: float) -> list[BlockId | None]:
        """Pin the rows of blocks, and return the row of each; None: this core does not have the block, or the quota is
        full. If the lease exists, the rows are added to it."""
        self.expire(now)
        pool, rows = self._host_cache.pool, list[BlockId | None]()
        num_left = self._num_free
        copies: list[tuple[SwapCopy, bytes]] = []
        if self._host_cache.is_caching:
            for key in keys:
                row = pool.lookup(key)
                block = self._device_pool.lookup(key) if row is None else None
                if (row is not None or block is not None) and not num_left:
                    self.num_refused += 1
                    row = block = None
                if row is not None:
                    pool.acquire([row])
                elif block is not None and pool.num_free:
                    [row] = pool.allocate(1)
                    copies.append((SwapCopy(block, row), key))
                num_left -= row is not None
                rows.append(row)
        if copies:
            try:
                self._copy_out([copy for copy, _ in copies])
            except Exception:
                pool.free([row for row in rows if row is not None])
                raise
            for copy, key in copies:
                self._host_cache.add(copy.host_block, key)
        if pinned := [row for row in rows if row is not None]:
            # Another pod uses them, so that they are used for the second time.
            pool.protect(pinned)
            lease = self._leases.setdefault(lease_id, _Lease(now + LEASE_S))
            lease.rows += pinned
        return rows or [None] * len(keys)

    def lease_state(self, lease_id: bytes, keys: Sequence[bytes], first: int, now: float) -> tuple[int, int] | None:
        """Pin the last state after one of the blocks with these keys up to which this core has all blocks from number
        `first` on, as many as can be leased. Return the number of its block, and of its row among those of states; None
        if there is none."""
        self.expire(now)
        if (states := self._states) is None or not self._host_cache.is_caching:
            return None
        end = min(first, len(keys))
        while end < min(len(keys), first + self._num_free) and self._has_block(keys[end]):
            end += 1
        for block in reversed(range(end)):
            if sum(len(lease.states) for lease in self._leases.values()) >= states.max_rows:
                self.num_refused += 1
                return None
            if (row := states.pin(keys[block])) is not None:
                self._leases.setdefault(lease_id, _Lease(now + LEASE_S)).states.append(row)
                return block, states.number(row)
        return None

    def _has_block(self, key: bytes) -> bool:
        return self._host_cache.pool.lookup(key) is not None or self._device_pool.lookup(key) is not None

    def extend(self, lease_id: bytes, now: float) -> bool:
        """Let a lease last for at least EXTENSION_S further seconds; return whether it exists."""
        self.expire(now)
        if (lease := self._leases.get(lease_id)) is None:
            return False
        lease.deadline = max(lease.deadline, now + EXTENSION_S)
        return True

    def release(self, lease_ids: Iterable[bytes]) -> None:
        """End leases. Unknown ones are ignored."""
        for lease_id in list(lease_ids):
            if (lease := self._leases.pop(lease_id, None)) is not None:
                self._host_cache.pool.free(lease.rows)
                if self._states is not None:
                    self._states.release(lease.states)

    def release_all(self) -> None:
        """End all leases, because the process that holds them for other pods has ended."""
        self.release(self._leases)

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        self.release([lease_id for lease_id, lease in self._leases.items() if now >= lease.deadline])
