# SPDX-License-Identifier: Apache-2.0
"""Host memory for KV blocks: which of its rows hold blocks of preempted sequences, and which hold cached blocks.

Policy only. The block manager and the prefix cache call it; the model runner makes the copies (`host_swap`)."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from quire_engine.kv_cache.block_events import BlocksStored
from quire_engine.kv_cache.block_pool import BlockPool
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.sequence import BlockId
from quire_engine.step.builder import StepPlanBuilder
from quire_engine.step.plan import StepPlan, SwapCopy


class HostCache:
    """Rows of host memory, each of which holds one block.

    A row belongs to a preempted sequence, or it caches a block under its key. Cached rows are evicted for other blocks,
    and the least recently used ones are evicted first (see BlockPool).

    A block is stored when it is used for the second time, because most prompts occur only once. The copy is part of a
    later step, and each step has room for only a few copies. Therefore, the eviction of a block from the device never
    waits for a copy. The key of a block is not visible before the step that copies it is complete.
    """

    def __init__(self, costs: SwapCosts, block_size: int, enabled: bool) -> None:
        """If `enabled` is false, no block is cached, and the rows are used only for preempted sequences."""
        self.pool = BlockPool(costs.num_host_blocks, medium="CPU")
        self.costs = costs
        self.is_caching = enabled and costs.is_worthwhile(1, block_size)
        """Whether blocks are cached. They are not if copying a block takes longer than computing it."""
        # Keys of blocks that were used for the second time and are not stored yet, in the order of their use.
        self._requested: OrderedDict[bytes, None] = OrderedDict()
        # The rows that steps in flight fill, and the keys under which they will be cached.
        self._storing: dict[BlockId, bytes] = {}
        self.on_stored: Callable[[BlockId, bytes], None] | None = None
        """Called with each row that was filled, and its key, while the row has a reference."""
        self.num_stored_blocks = 0
        """Number of blocks that were copied to the cache."""
        self.num_loaded_blocks = 0
        """Number of cached blocks that new sequences have used."""

    @property
    def storing_rows(self) -> list[BlockId]:
        """The rows that steps in flight fill with blocks for the cache."""
        return list(self._storing)

    def find(self, keys: Iterable[bytes]) -> list[BlockId]:
        """Return the rows that contain the blocks with these keys, up to the first block that is not cached."""
        rows: list[BlockId] = []
        for key in keys if self.is_caching else ():
            if (row := self.pool.lookup(key)) is None:
                break
            rows.append(row)
        return rows

    def request(self, keys: Iterable[bytes | None]) -> None:
        """Called with the keys of blocks that were used again, so that later steps store them."""
        for key in keys if self.is_caching else ():
            if key is None:
                continue
            if (row := self.pool.lookup(key)) is not None:
                self.pool.touch(row)
            elif key not in self._requested and len(self._requested) < self.pool.num_blocks:
                self._requested[key] = None

    def plan_copies(self, device_pool: BlockPool, builder: StepPlanBuilder) -> None:
        """Plan copies of requested blocks that the device still has, as many as the step has room for."""
        in_progress = set(self._storing.values())
        while self._requested and builder.copy_budget > 0 and self.pool.num_free:
            key, _ = self._requested.popitem(last=False)
            block = device_pool.lookup(key)
            if block is None or key in in_progress or self.pool.lookup(key) is not None:
                continue
            [row] = self.pool.allocate(1)
            self._storing[row] = key
            builder.swap_outs.append(SwapCopy(block, row))
            builder.copy_budget -= 1

    def complete_step(self, plan: StepPlan, step_failed: bool) -> None:
        """When a step is complete, cache the rows that it has filled, and release the rows that it has read."""
        self.pool.free([copy.host_block for copy in plan.swap_ins])
        stored = [copy.host_block for copy in plan.swap_outs if copy.host_block in self._storing]
        for row in stored:
            key = self._storing.pop(row)
            if not step_failed:
                self.add(row, key)
        self.pool.free(stored)

    def add(self, row: BlockId, key: bytes) -> None:
        """Cache a row that was filled from the device, while it has a reference."""
        if self.pool.cache_block(row, key):
            self.num_stored_blocks += 1
            if self.pool.event_log is not None:
                self.pool.event_log.add_stored(BlocksStored([key], None, [], medium="CPU"))
            if self.on_stored is not None:
                self.on_stored(row, key)

    def check_integrity(self, row_lists: Sequence[Sequence[BlockId]]) -> None:
        """Raise Internal unless these lists, and the steps in flight, contain all references to rows."""
        self.pool.check_integrity([*row_lists, self.storing_rows])
