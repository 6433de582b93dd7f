# SPDX-License-Identifier: Apache-2.0
"""BlockTables: gives sequences their blocks and takes them back. Who gets them, and when, is the scheduler's to say."""

from collections import Counter
from collections.abc import Iterable, Sequence

from quire_engine import request
from quire_engine.blocks import BlockPool
from quire_engine.prefix import Prefix, PrefixCache
from quire_engine.request import BlockId
from quire_engine.step import BlockCopy, Span, StepPlan
from quire_spec.errors import Internal


class BlockTables:
    """The block tables of all running sequences.

    A table never has more blocks than its sequence's tokens fill, the last one in part, and a block that is shared or
    cached is never written: a sequence that would, because what it shares ends within a block, starts with a copy.
    """

    def __init__(self, blocks: BlockPool, prefixes: PrefixCache, block_size: int) -> None:
        self._blocks = blocks
        self._prefixes = prefixes
        self._block_size = block_size
        self.num_block_copies = 0

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self._block_size)

    def num_needed(self, sequence: request.Sequence, prefix: Prefix) -> int:
        """Free blocks that `start` takes."""
        fresh = self.num_blocks(sequence.num_tokens) - len(prefix.blocks)
        return fresh + self._blocks.num_idle(prefix.blocks) + self._blocks.num_idle(prefix.copied)

    def start(self, sequence: request.Sequence, prefix: Prefix) -> list[BlockCopy]:
        """Give a sequence blocks for all its tokens; returns the copy that the first fresh one begins as, if any."""
        # Shared before anything is allocated, which might evict them; what is copied, until the step is over.
        self._blocks.share(prefix.blocks + prefix.copied)
        fresh = self._blocks.allocate(self.num_blocks(sequence.num_tokens) - len(prefix.blocks))
        sequence.block_table = prefix.blocks + fresh
        sequence.num_computed_tokens = prefix.num_tokens
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = prefix.num_tokens
        sequence.num_published_blocks = len(prefix.blocks)
        self.num_block_copies += len(prefix.copied)
        return [BlockCopy(source, fresh[0]) for source in prefix.copied]

    def grow(self, sequence: request.Sequence) -> bool:
        """Make sure that a sequence has a block for its next token; False if there is none."""
        if sequence.num_computed_tokens == len(sequence.block_table) * self._block_size:
            if self._blocks.num_free == 0:
                return False
            sequence.block_table += self._blocks.allocate(1)
        return True

    def stop(self, sequence: request.Sequence) -> None:
        """Take a sequence's blocks."""
        self._blocks.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0

    def land(self, plan: StepPlan) -> None:
        """A step is over, and its copies are made."""
        self._blocks.release([copy.source for copy in plan.copies])

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

    def check_integrity(self, holders: Sequence[request.Sequence], plan: StepPlan | None) -> None:
        """Raise Internal unless the pool is held by exactly `holders` and the step in flight, if there is one."""
        short = [s.id for s in holders if len(s.block_table) < self.num_blocks(s.num_computed_tokens)]
        if short:
            raise Internal(f"block tables: sequences {short} lack blocks")
        copied = [copy.source for copy in plan.copies] if plan is not None else []
        self._blocks.check_integrity([*(s.block_table for s in holders), copied])
        if plan is not None:
            self._check_writes(plan.spans, Counter(block for s in holders for block in s.block_table))

    def _check_writes(self, spans: list[Span], num_holders: Counter[BlockId]) -> None:
        """Raise Internal if a span writes a block that anybody else reads, or may find in the cache."""
        for span in spans:
            written = span.sequence.block_table[span.start // self._block_size : self.num_blocks(span.end)]
            if shared := [b for b in written if num_holders[b] > 1 or self._blocks.hash_of(b) is not None]:
                raise Internal(f"block tables: {span.sequence.id} writes blocks {shared}, which others may read")
