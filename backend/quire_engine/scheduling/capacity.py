# SPDX-License-Identifier: Apache-2.0
"""Capacity check: whether one more sequence can run, and which running sequences must be preempted for it.

It changes nothing; the scheduler decides and preempts."""

from quire_engine.kv_cache.block_manager import BlockManager
from quire_engine.kv_cache.block_pool import BlockPool
from quire_engine.kv_cache.prefix_cache import PrefixHit
from quire_engine.scheduling.request_queue import RequestQueue
from quire_engine.sequence import Sequence
from quire_engine.step.builder import StepPlanBuilder


class CapacityCheck:
    """Limits of a step: `max_num_seqs`, and free blocks minus a reserve of one block per running sequence."""

    def __init__(
        self, max_num_seqs: int, running: RequestQueue, block_pool: BlockPool, block_manager: BlockManager
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._running = running
        self._block_pool = block_pool
        self._block_manager = block_manager

    def has_free_seq(self, builder: StepPlanBuilder, num_preempted: int = 0) -> bool:
        """Return whether fewer than `max_num_seqs` sequences run after `num_preempted` of them stop.

        Pending forks count as running.
        """
        return len(self._running) - num_preempted + len(builder.pending_forks) < self._max_num_seqs

    def preemption_victims(
        self, sequence: Sequence, prefix: PrefixHit, builder: StepPlanBuilder
    ) -> list[Sequence] | None:
        """Return the fewest running sequences, least urgent first, that must stop so that `sequence` can start.

        None if it cannot start even without all less urgent sequences.
        """
        if self._fits(sequence, prefix, builder):
            return []
        if not self._running or self._running.least_urgent.priority <= sequence.priority:
            return None
        candidates = [s for s in self._running if s.priority > sequence.priority and s is not sequence.parent][::-1]
        # An upper bound first: without it, the exact count would often be wasted work.
        if not self._fits(sequence, prefix, builder, len(candidates), sum(len(s.block_table) for s in candidates)):
            return None
        for num_preempted, num_freed_blocks in enumerate(
            self._block_manager.num_blocks_freed_by(candidates, prefix), 1
        ):
            if self._fits(sequence, prefix, builder, num_preempted, num_freed_blocks):
                return candidates[:num_preempted]
        return None

    def _fits(
        self,
        sequence: Sequence,
        prefix: PrefixHit,
        builder: StepPlanBuilder,
        num_preempted: int = 0,
        num_freed_blocks: int = 0,
    ) -> bool:
        """Return whether a sequence can start if `num_preempted` running ones stop and free `num_freed_blocks`."""
        num_running = len(self._running) - num_preempted
        num_reserved = num_running + len(builder.pending_forks) + 1 if num_running else 0
        num_needed = self._block_manager.num_blocks_needed(sequence, prefix) + num_reserved
        return self.has_free_seq(builder, num_preempted) and num_needed <= self._block_pool.num_free + num_freed_blocks
