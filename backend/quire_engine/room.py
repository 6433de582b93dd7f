# SPDX-License-Identifier: Apache-2.0
"""Room: whether one more sequence can run beside those that do, and who would have to leave for it. Decides nothing."""

from quire_engine.blocks import BlockPool
from quire_engine.draft import Draft
from quire_engine.line import Line
from quire_engine.prefix import Prefix
from quire_engine.request import Sequence
from quire_engine.tables import BlockTables


class Room:
    """Seats, which are `max_num_seqs`, and free blocks, of which one for each running sequence is kept in reserve."""

    def __init__(self, max_num_seqs: int, running: Line, blocks: BlockPool, tables: BlockTables) -> None:
        self._max_num_seqs = max_num_seqs
        self._running = running
        self._blocks = blocks
        self._tables = tables

    def has_seat(self, draft: Draft, num_leaving: int = 0) -> bool:
        """Whether there is a seat, those promised to forks left aside, if so many running sequences leave."""
        return len(self._running) - num_leaving + len(draft.promised) < self._max_num_seqs

    def leavers(self, sequence: Sequence, prefix: Prefix, draft: Draft) -> list[Sequence] | None:
        """The fewest less urgent sequences, last in rank first, without which this one can start; None if it cannot."""
        if self._fits(sequence, prefix, draft):
            return []
        if not self._running or self._running.last.priority <= sequence.priority:
            return None
        lesser = [s for s in self._running if s.priority > sequence.priority and s is not sequence.leader][::-1]
        # At most what they hold: spares the counting where it would be for nothing.
        if not self._fits(sequence, prefix, draft, len(lesser), sum(len(s.block_table) for s in lesser)):
            return None
        for num_leaving, num_released in enumerate(self._tables.num_released(lesser, prefix), 1):
            if self._fits(sequence, prefix, draft, num_leaving, num_released):
                return lesser[:num_leaving]
        return None

    def _fits(
        self, sequence: Sequence, prefix: Prefix, draft: Draft, num_leaving: int = 0, num_released: int = 0
    ) -> bool:
        """Whether a sequence can start, if that many running ones leave and release that many blocks."""
        num_running = len(self._running) - num_leaving
        reserve = num_running + len(draft.promised) + 1 if num_running else 0
        needed = self._tables.num_needed(sequence, prefix) + reserve
        return self.has_seat(draft, num_leaving) and needed <= self._blocks.num_free + num_released
