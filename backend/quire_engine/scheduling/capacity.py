# SPDX-License-Identifier: Apache-2.0
"""Capacity check: whether one more sequence can run, and which running sequences must be preempted for it.

The check changes nothing; the scheduler decides and preempts."""

from collections import Counter, abc

from quire_engine.kv_cache.block_manager import BlockManager
from quire_engine.kv_cache.block_pool import BlockPool
from quire_engine.kv_cache.prefix_cache import PrefixHit
from quire_engine.scheduling.beam_scheduler import BeamScheduler
from quire_engine.scheduling.request_queue import RequestQueue
from quire_engine.sequence import Sequence
from quire_engine.step.builder import StepPlanBuilder


class CapacityCheck:
    """Checks the two limits of a step: the number of sequences, and the number of free blocks.

    At most `max_num_seqs` sequences run. For each running sequence, one free block per group of layers stays in
    reserve.
    """

    def __init__(
        self,
        max_num_seqs: int,
        running: RequestQueue,
        block_pool: BlockPool,
        block_manager: BlockManager,
        beams: BeamScheduler,
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._running = running
        self._block_pool = block_pool
        self._block_manager = block_manager
        self._beams = beams

    def has_free_seq(
        self, sequence: Sequence, builder: StepPlanBuilder, preempted: abc.Sequence[Sequence] = ()
    ) -> bool:
        """Return whether `sequence` can start without exceeding `max_num_seqs`, after the sequences in `preempted` have
        stopped.

        Pending forks are counted as running. When the first beam of a search starts, all beams of the search are
        counted.
        """
        if sequence.resumes_beam_group:
            return True
        return self._num_places(builder, preempted) + _num_places_of(sequence) <= self._max_num_seqs

    def preemption_victims(
        self, sequence: Sequence, prefix: PrefixHit, builder: StepPlanBuilder
    ) -> list[Sequence] | None:
        """Return the running sequences that must stop so that `sequence` can start.

        They are as few as possible, and the least urgent one comes first. The result is None if `sequence` cannot start
        even if all less urgent sequences stop. All beams of a group stop together.
        """
        if self._fits(sequence, prefix, builder):
            return []
        if sequence.resumes_beam_group:
            # A beam that resumes is treated like a decoding sequence, which also preempts sequences of the same
            # priority.
            group = sequence.beam_group
            candidates = [s for s in self._running if s.sort_key > sequence.sort_key and s.beam_group is not group]
        elif self.can_preempt(sequence):
            candidates = self._less_entitled(sequence)
        else:
            return None
        # Beams that resume are planned before more urgent sequences. A more urgent sequence must not preempt a sequence
        # that this step already computes or restores.
        planned = [*(span.sequence for span in builder.prefills), *builder.restoring]
        computed = {sequence.beam_group or sequence for sequence in planned}
        candidates = [s for s in reversed(candidates) if (s.beam_group or s) not in computed]
        # An upper bound is checked first, because the exact count takes longer and is often not necessary.
        if not self._fits(sequence, prefix, builder, candidates, sum(len(s.block_table) for s in candidates)):
            return None
        for num_preempted, num_freed_blocks in enumerate(
            self._block_manager.num_blocks_freed_by(candidates, prefix), 1
        ):
            if self._fits(sequence, prefix, builder, candidates[:num_preempted], num_freed_blocks):
                return candidates[:num_preempted]
        return None

    def can_preempt(self, sequence: Sequence) -> bool:
        """Return whether there may be running sequences that must stop for `sequence` if it does not fit."""
        if not self._running:
            return False
        return self._running.least_urgent.priority > sequence.priority or (
            self._running.least_urgent.priority == sequence.priority and bool(self._num_surplus(sequence))
        )

    def _less_entitled(self, sequence: Sequence) -> list[Sequence]:
        """Return the running sequences that can be preempted for `sequence`, the most urgent one first.

        They have a lower priority, or they have the same priority and belong to a client that has much more running
        sequences. The most urgent sequence of all is never among those, so that it finishes.
        """
        surplus, most_urgent = self._num_surplus(sequence), self._running.most_urgent
        candidates = []
        counted_groups = {most_urgent.beam_group or most_urgent: False}
        for s in reversed(self._running.snapshot()):
            if s is sequence.parent or s.priority < sequence.priority:
                continue
            if s.priority == sequence.priority:
                unit = s.beam_group or s
                if unit not in counted_groups:
                    num_stopped = _num_places_of(s)
                    counted_groups[unit] = num_stopped <= surplus[s.client]
                    surplus[s.client] -= num_stopped * counted_groups[unit]
                if not counted_groups[unit]:
                    continue
            candidates.append(s)
        return candidates[::-1]

    def _num_surplus(self, sequence: Sequence) -> Counter[str]:
        """Return how many sequences of each other client can be preempted for the client of `sequence`.

        A client is preempted only if it has at least twice as many running sequences as the other client will have. If
        the difference could be smaller, clients with almost equal shares would preempt each other all the time.
        """
        num_running = self._running.num_by_client
        num_own = num_running[sequence.client] + _num_places_of(sequence)
        return Counter({client: num - num_own for client, num in num_running.items() if num >= 2 * num_own})

    def _fits(
        self,
        sequence: Sequence,
        prefix: PrefixHit,
        builder: StepPlanBuilder,
        preempted: abc.Sequence[Sequence] = (),
        num_freed_blocks: int = 0,
    ) -> bool:
        """Return whether a sequence can start after the running sequences in `preempted` have stopped and have released
        `num_freed_blocks` blocks."""
        num_places = self._num_places(builder, preempted)
        num_reserved = num_places + 1 if num_places and not sequence.resumes_beam_group else 0
        num_needed = self._block_manager.num_blocks_needed(sequence, prefix)
        num_needed += num_reserved * self._block_manager.num_groups
        return (
            self.has_free_seq(sequence, builder, preempted)
            and num_needed <= self._block_pool.num_free + num_freed_blocks
        )

    def _num_places(self, builder: StepPlanBuilder, preempted: abc.Sequence[Sequence] = ()) -> int:
        """Return how many sequences run or have a reserved place after the sequences in `preempted` have stopped."""
        num_places = len(self._running) + self._beams.num_unused_places + len(builder.pending_forks)
        stopped_groups = {s.beam_group for s in preempted if s.beam_group is not None}
        num_stopped = sum(s.beam_group is None for s in preempted) + sum(group.width for group in stopped_groups)
        return num_places - num_stopped


def _num_places_of(sequence: Sequence) -> int:
    """Return how many places a sequence and the other beams of its search occupy."""
    return 1 if sequence.beam_group is None else sequence.beam_group.width
