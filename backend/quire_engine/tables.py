# SPDX-License-Identifier: Apache-2.0
"""BlockTables: gives sequences their blocks and takes them back. Who gets them, and when, is the scheduler's to say."""

from collections import Counter
from collections.abc import Iterable, Sequence

from quire_engine import request
from quire_engine.blocks import BlockPool
from quire_engine.draft import Draft
from quire_engine.prefix import Prefix
from quire_engine.request import BlockId
from quire_engine.step import BlockCopy, HostCopy, Span, StepPlan
from quire_engine.swap import SwapSpace
from quire_spec.errors import Internal


class BlockTables:
    """The block tables of all running sequences.

    A table never has more blocks than its sequence's tokens fill, the last one in part, and a block that is shared or
    cached is never written: a sequence that would, because what it shares ends within a block, starts with a copy.
    """

    def __init__(self, blocks: BlockPool, block_size: int, swap: SwapSpace) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._swap = swap
        self._host = BlockPool(swap.num_blocks)
        # What the step in flight reads or writes in host memory; one that is planned ahead does neither.
        self._returning: list[BlockId] = []
        self._leaving: list[request.Sequence] = []
        self.num_block_copies = 0
        self.num_swapped_out_blocks = 0
        self.num_swapped_in_blocks = 0

    @property
    def num_host_blocks(self) -> int:
        """Places in host memory."""
        return self._host.num_blocks

    @property
    def num_used_host_blocks(self) -> int:
        """Places in host memory that are taken."""
        return self._host.num_used

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self._block_size)

    def num_needed(self, sequence: request.Sequence, prefix: Prefix) -> int:
        """Free blocks that `start` takes."""
        fresh = self.num_blocks(sequence.num_tokens) - len(prefix.blocks)
        return fresh + self._blocks.num_idle(prefix.blocks) + self._blocks.num_idle(prefix.copied)

    def start(self, sequence: request.Sequence, prefix: Prefix, draft: Draft) -> None:
        """Give a sequence blocks for all its tokens, and have those filled that others or host memory hold."""
        # Shared before anything is allocated, which might evict them; what is copied, until the step is over.
        self._blocks.share(prefix.blocks + prefix.copied)
        fresh = self._blocks.allocate(self.num_blocks(sequence.num_tokens) - len(prefix.blocks))
        sequence.block_table = prefix.blocks + fresh
        sequence.num_computed_tokens = prefix.num_tokens
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = prefix.num_tokens
        sequence.num_published_blocks = len(prefix.blocks)
        draft.copies += [BlockCopy(source, fresh[0]) for source in prefix.copied]
        draft.swap_ins += [HostCopy(block, host) for block, host in zip(fresh, prefix.host_blocks, strict=False)]
        self.num_block_copies += len(prefix.copied)
        self.num_swapped_in_blocks += len(prefix.host_blocks)
        # They are read in the step.
        self._returning += sequence.host_blocks
        sequence.host_blocks, sequence.num_swapped_tokens = [], 0

    def lacks_block(self, sequence: request.Sequence) -> bool:
        """Whether a sequence has no block for its next token."""
        return sequence.num_computed_tokens == len(sequence.block_table) * self._block_size

    def grow(self, sequence: request.Sequence) -> bool:
        """Make sure that a sequence has a block for its next token; False if there is none."""
        if self.lacks_block(sequence):
            if self._blocks.num_free == 0:
                return False
            sequence.block_table += self._blocks.allocate(1)
        return True

    def stop(self, sequence: request.Sequence) -> None:
        """Take a sequence's blocks."""
        self._blocks.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0

    def swap_out(self, sequence: request.Sequence, draft: Draft) -> None:
        """Keep what a sequence has computed in host memory, if that pays and there is room; then `stop` it.

        Blocks that others hold too are left: they will most likely be found again. What is not kept is computed again.
        """
        num_left = 0
        kept = sequence.block_table[: self.num_blocks(sequence.num_computed_tokens)]
        while num_left < len(kept) and self._blocks.num_holders(kept[num_left]) > 1:
            num_left += 1
        kept = kept[num_left:]
        num_tokens = sequence.num_computed_tokens - num_left * self._block_size
        if len(kept) > self._host.num_free or sequence.scoring or not self._swap.pays(len(kept), num_tokens):
            return
        sequence.host_blocks, sequence.num_left_blocks = self._host.allocate(len(kept)), num_left
        sequence.num_swapped_tokens = sequence.num_computed_tokens
        draft.swap_outs += [HostCopy(*pair) for pair in zip(kept, sequence.host_blocks, strict=True)]
        self.num_swapped_out_blocks += len(kept)
        self._leaving.append(sequence)

    def forget(self, sequence: request.Sequence) -> None:
        """Give up what is kept of a sequence in host memory."""
        self._host.release(sequence.host_blocks)
        sequence.host_blocks, sequence.num_swapped_tokens = [], 0

    def land(self, plan: StepPlan, failed: bool) -> None:
        """A step is over: its copies are made, or nobody knows."""
        self._blocks.release([copy.source for copy in plan.copies])
        self._host.release(self._returning)
        self._returning = []
        for sequence in self._leaving if failed else []:
            self.forget(sequence)
        self._leaving = []

    def num_released(self, sequences: Iterable[request.Sequence], prefix: Prefix) -> list[int]:
        """How many blocks, those of `prefix` excepted, become free if the first one, two, ... of `sequences` stop."""
        kept, num_stopped = {*prefix.blocks, *prefix.copied}, Counter[BlockId]()
        total, totals = 0, []
        for sequence in sequences:
            num_stopped.update(sequence.block_table)
            total += sum(
                1
                for block in sequence.block_table
                if num_stopped[block] == self._blocks.num_holders(block) and block not in kept
            )
            totals.append(total)
        return totals

    def check_integrity(
        self, holders: Sequence[request.Sequence], waiting: Iterable[request.Sequence], plans: Sequence[StepPlan]
    ) -> None:
        """Raise Internal unless the pools are held by exactly these sequences and the steps in flight.

        `holders` may have blocks, `waiting` may have places in host memory.
        """
        short = [s.id for s in holders if len(s.block_table) < self.num_blocks(s.num_computed_tokens)]
        if short:
            raise Internal(f"block tables: sequences {short} lack blocks")
        self._host.check_integrity([*(s.host_blocks for s in waiting), self._returning])
        copied = [copy.source for plan in plans for copy in plan.copies]
        self._blocks.check_integrity([*(s.block_table for s in holders), copied])
        # What an earlier one writes may be read by the last one, which runs after it.
        if plans:
            self._check_writes(plans[-1].spans, Counter(block for s in holders for block in s.block_table))

    def _check_writes(self, spans: list[Span], num_holders: Counter[BlockId]) -> None:
        """Raise Internal if a span writes a block that anybody else reads, or may find in the cache."""
        for span in spans:
            written = span.sequence.block_table[span.start // self._block_size : self.num_blocks(span.end)]
            if shared := [b for b in written if num_holders[b] > 1 or self._blocks.hash_of(b) is not None]:
                raise Internal(f"block tables: {span.sequence.id} writes blocks {shared}, which others may read")
