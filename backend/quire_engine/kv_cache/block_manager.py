# SPDX-License-Identifier: Apache-2.0
"""Block tables: allocates KV blocks to sequences and frees them, on the device and in host memory.

The scheduler decides which sequence gets blocks, and when."""

from collections import Counter, abc
from collections.abc import Iterable
from itertools import takewhile

from quire_engine.kv_cache.block_pool import BlockPool
from quire_engine.kv_cache.host_cache import HostCache
from quire_engine.kv_cache.prefix_cache import PrefixHit
from quire_engine.sequence import BlockId, Sequence
from quire_engine.step.builder import StepPlanBuilder
from quire_engine.step.plan import BlockCopy, ScheduledSpan, StepPlan, SwapCopy
from quire_spec.errors import Internal
from quire_spec.model.kv_layout import KVLayout


class BlockManager:
    """The block tables of all running sequences.

    A block table contains only blocks that the tokens of its sequence need, including the tokens of the last draft. A
    shared or cached block is never written: if the shared prefix of a sequence ends within a block, the sequence gets a
    copy of that block.

    While a sequence runs, blocks of layers with a sliding window are freed when all their tokens are outside the
    window. If the layers are divided into groups (see KVLayout), one block of each group is allocated at a time.
    """

    def __init__(self, block_pool: BlockPool, block_size: int, host_cache: HostCache, layout: KVLayout) -> None:
        self._block_pool = block_pool
        self._layout = layout
        self._block_size = block_size
        self._num_groups = layout.num_groups
        self._host_cache = host_cache
        self._host_pool = host_cache.pool
        # The sequences that the earlier step in flight swaps out. A step that is planned ahead never preempts.
        self._swapping_out: list[Sequence] = []
        self.num_block_copies = 0
        self.num_swapped_out_blocks = 0
        self.num_swapped_in_blocks = 0

    @property
    def num_groups(self) -> int:
        """Number of groups of layers, which is the number of blocks that a sequence gets at a time; see KVLayout."""
        return self._num_groups

    @property
    def num_host_blocks(self) -> int:
        """Number of blocks that fit in host memory."""
        return self._host_pool.num_blocks

    @property
    def num_used_host_blocks(self) -> int:
        """Number of blocks in host memory that are in use."""
        return self._host_pool.num_used

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self._block_size) * self._num_groups

    def num_blocks_needed(self, sequence: Sequence, prefix: PrefixHit) -> int:
        """Return how many free blocks `allocate` needs."""
        num_new_blocks = self.num_blocks(sequence.num_tokens) - len(prefix.blocks)
        return (
            num_new_blocks
            + self._block_pool.num_evictable(prefix.held_blocks)
            + self._block_pool.num_evictable(prefix.copy_sources)
        )

    def allocate(self, sequence: Sequence, prefix: PrefixHit, builder: StepPlanBuilder) -> None:
        """Give a sequence blocks for all its tokens, and plan the copies that fill new blocks from shared blocks.

        If the prefix has host blocks, the sequence gets a reference to them. Call `restore` until it has none left."""
        # Shared blocks are acquired first, because the allocation below could evict them. Copy sources stay acquired
        # until the step is complete.
        self._block_pool.acquire(prefix.held_blocks + prefix.copy_sources)
        new_blocks = self._block_pool.allocate(self.num_blocks(sequence.num_tokens) - len(prefix.blocks))
        sequence.block_table = prefix.blocks + new_blocks
        sequence.num_freed_entries, sequence.kept_blocks = prefix.num_freed_entries, list(prefix.kept_blocks)
        sequence.num_computed_tokens = (
            len(prefix.blocks) * self._block_size if prefix.host_blocks else prefix.num_tokens
        )
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = prefix.num_tokens
        sequence.num_cached_blocks = len(prefix.blocks) // self._num_groups
        builder.copies += map(BlockCopy, prefix.copy_sources, new_blocks)
        self.num_block_copies += len(prefix.copy_sources)
        self.hold_host_blocks(prefix)
        self.drop_swapped(sequence)
        if prefix.host_blocks:
            sequence.host_blocks, sequence.num_swapped_tokens = list(prefix.host_blocks), prefix.num_tokens

    def hold_host_blocks(self, prefix: PrefixHit) -> None:
        """Take a reference to the host blocks of a prefix, so that they are not evicted."""
        self._host_pool.acquire(prefix.host_blocks)

    def release_host_blocks(self, prefix: PrefixHit) -> None:
        """Release the references of `hold_host_blocks`."""
        self._host_pool.free(prefix.host_blocks)

    def restore(self, sequence: Sequence, builder: StepPlanBuilder, max_blocks: int) -> bool:
        """Plan to copy at most `max_blocks` host blocks of a running sequence to its blocks.

        Return whether the sequence has no host blocks left, so that the same step can compute its next tokens.
        """
        host_blocks = sequence.host_blocks[:max_blocks]
        if host_blocks:
            first = sequence.num_computed_tokens // self._block_size
            blocks = sequence.block_table[first : first + len(host_blocks)]
            # The references to the host blocks now belong to the step.
            builder.swap_ins += map(SwapCopy, blocks, host_blocks)
            builder.copy_budget -= len(host_blocks)
            builder.restoring.append(sequence)
            sequence.host_blocks = sequence.host_blocks[max_blocks:]
            num_tokens = (first + len(host_blocks)) * self._block_size
            sequence.num_computed_tokens = min(num_tokens, sequence.num_swapped_tokens)
            self.num_swapped_in_blocks += len(host_blocks)
        if not sequence.host_blocks:
            sequence.num_swapped_tokens = 0
        return not sequence.host_blocks

    def store_requested(self, builder: StepPlanBuilder) -> None:
        """Plan copies of blocks to the cache in host memory, as many as the step has room for."""
        self._host_cache.plan_copies(self._block_pool, builder)

    def needs_block(self, sequence: Sequence) -> bool:
        """Return whether the sequence lacks a block for its next token."""
        return sequence.num_computed_tokens * self._num_groups == len(sequence.block_table) * self._block_size

    def append_block(self, sequence: Sequence) -> bool:
        """Ensure that the sequence has a block for its next token. Return False if no block is free."""
        if self.needs_block(sequence):
            if self._block_pool.num_free < self._num_groups:
                return False
            sequence.block_table += self._block_pool.allocate(self._num_groups)
        return True

    def append_blocks(self, beams: abc.Sequence[Sequence], builder: StepPlanBuilder) -> bool:
        """Ensure that each beam has a block of its own for its next token. Return False if too few blocks are free.

        Beams share all blocks with the beam from which they continue. If several beams need to write to the same block,
        all beams except one get a copy of the block (copy-on-write).
        """
        num_groups = self._num_groups
        lacking, copying = [], []
        written_blocks: set[BlockId] = set()
        for beam in beams:
            if self.needs_block(beam):
                lacking.append(beam)
            elif beam.block_table[-1] in written_blocks:
                copying.append(beam)
            else:
                written_blocks.add(beam.block_table[-1])
        if (len(lacking) + len(copying)) * num_groups > self._block_pool.num_free:
            return False
        for beam in lacking:
            beam.block_table += self._block_pool.allocate(num_groups)
        for beam in copying:
            # The beam's reference to the source block now belongs to the copy, until the step is complete. The table
            # must be a new list: if a runner already knows a list, it sends only the entries that were added at the
            # end.
            blocks = self._block_pool.allocate(num_groups)
            builder.copies += map(BlockCopy, beam.block_table[-num_groups:], blocks)
            beam.block_table = beam.block_table[:-num_groups] + blocks
        self.num_block_copies += len(copying) * num_groups
        return True

    def cancel_copy(self, beam: Sequence, builder: StepPlanBuilder) -> None:
        """Undo the copy that `append_blocks` planned for a beam, if any."""
        written_blocks = beam.block_table[-self._num_groups :]
        cancelled = [copy for copy in builder.copies if copy.destination in written_blocks]
        if cancelled:
            beam.block_table = beam.block_table[: -self._num_groups] + [copy.source for copy in cancelled]
            self._block_pool.free([copy.destination for copy in cancelled])
            builder.copies = [copy for copy in builder.copies if copy.destination not in written_blocks]
            self.num_block_copies -= len(cancelled)

    def share(self, sequence: Sequence) -> None:
        """Take a further reference to the blocks of a sequence, because a beam forks from it."""
        self._block_pool.acquire(sequence.held_blocks)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Ensure that a sequence has blocks for `num_tokens` tokens. Return False if the free blocks are too few."""
        num_missing = self.num_blocks(num_tokens) - len(sequence.block_table)
        if num_missing > self._block_pool.num_free:
            return False
        if num_missing > 0:
            sequence.block_table += self._block_pool.allocate(num_missing)
        return True

    def free(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence."""
        self._block_pool.free(sequence.held_blocks)
        sequence.block_table, sequence.num_freed_entries, sequence.kept_blocks = [], 0, []
        sequence.num_computed_tokens = 0

    def free_outside_window(self, sequence: Sequence) -> None:
        """Free the blocks that are outside the sliding window of their layers, because later steps do not read them.

        A step in flight does not read these blocks either, because its tokens follow the computed tokens.
        """
        layout, first = self._layout, sequence.num_freed_entries
        end = layout.num_outside_window(sequence.num_computed_tokens, self._block_size) * self._num_groups
        if end <= first:
            return
        kept_blocks, freed_blocks = layout.split_entries(sequence.block_table[first:end])
        self._block_pool.free(freed_blocks)
        sequence.kept_blocks += kept_blocks
        sequence.block_table[first:end] = layout.without_freed(sequence.block_table[first:end])
        sequence.num_freed_entries = end

    def swap_out(self, sequence: Sequence, builder: StepPlanBuilder) -> None:
        """Plan to copy the computed blocks of a sequence to host memory.

        This happens only if the blocks fit there, and if copying them takes less time than computing them again.

        Call `free` afterwards. Blocks that other sequences share are not copied, because they will most likely still be
        cached. Blocks that are neither copied nor cached are computed again.
        """
        # What it has not restored yet is computed again, unless it is cached.
        self.drop_swapped(sequence)
        computed_blocks = sequence.block_table[: self.num_blocks(sequence.num_computed_tokens)]
        full_blocks = computed_blocks[: sequence.num_computed_tokens // self._block_size]
        num_shared_blocks = sum(1 for _ in takewhile(lambda b: self._block_pool.ref_count(b) > 1, full_blocks))
        blocks_to_swap = computed_blocks[num_shared_blocks:]
        num_tokens = sequence.num_computed_tokens - num_shared_blocks * self._block_size
        if (
            sequence.num_freed_entries
            or len(blocks_to_swap) > self._host_pool.num_free
            or sequence.state_row >= 0  # its state is not kept, so that it continues from a snapshot
            or sequence.needs_hidden_states
            or not self._host_cache.costs.is_worthwhile(len(blocks_to_swap), num_tokens)
        ):
            return
        sequence.host_blocks = self._host_pool.allocate(len(blocks_to_swap))
        sequence.num_shared_blocks = num_shared_blocks
        sequence.num_swapped_tokens = sequence.num_computed_tokens
        builder.swap_outs += [SwapCopy(*pair) for pair in zip(blocks_to_swap, sequence.host_blocks, strict=True)]
        self.num_swapped_out_blocks += len(blocks_to_swap)
        self._swapping_out.append(sequence)

    def drop_swapped(self, sequence: Sequence) -> None:
        """Free the host blocks of a sequence."""
        self._host_pool.free(sequence.host_blocks)
        sequence.host_blocks, sequence.num_swapped_tokens = [], 0

    def complete_step(self, plan: StepPlan, step_failed: bool) -> None:
        """When a step is complete, release the blocks that its copies have read. They can be on the device or in host
        memory. If the step failed, also drop its copies to host memory."""
        self._block_pool.free([copy.source for copy in plan.copies])
        self._host_cache.complete_step(plan, step_failed)
        for sequence in self._swapping_out if step_failed else []:
            self.drop_swapped(sequence)
        self._swapping_out = []

    def num_blocks_freed_by(self, sequences: Iterable[Sequence], prefix: PrefixHit) -> list[int]:
        """Return how many blocks become free if the first sequence stops, if the first two stop, and so on.

        Blocks of `prefix` are not counted.
        """
        excluded_blocks, num_freed_refs = {*prefix.blocks, *prefix.copy_sources}, Counter[BlockId]()
        total, totals = 0, []
        for sequence in sequences:
            num_freed_refs.update(sequence.held_blocks)
            total += sum(
                1
                for block in sequence.held_blocks
                if num_freed_refs[block] == self._block_pool.ref_count(block) and block not in excluded_blocks
            )
            totals.append(total)
        return totals

    def check_integrity(
        self,
        block_holders: abc.Sequence[Sequence],
        waiting: Iterable[Sequence],
        plans: abc.Sequence[StepPlan],
        held_rows: abc.Sequence[abc.Sequence[BlockId]] = (),
    ) -> None:
        """Check which blocks of the pools are used.

        Raise Internal unless they are exactly the blocks of these sequences and of the steps in flight.

        Only `block_holders` can have blocks. `held_rows` are host blocks that transfers use.
        """
        ids_lacking_blocks = [
            s.id for s in block_holders if len(s.block_table) < self.num_blocks(s.num_computed_tokens)
        ]
        if ids_lacking_blocks:
            raise Internal(f"block tables: sequences {ids_lacking_blocks} lack blocks")
        swap_in_sources = [copy.host_block for plan in plans for copy in plan.swap_ins]
        host_block_holders = (*block_holders, *waiting)
        self._host_cache.check_integrity([*(s.host_blocks for s in host_block_holders), swap_in_sources, *held_rows])
        copy_sources = [copy.source for plan in plans for copy in plan.copies]
        self._block_pool.check_integrity([*(s.held_blocks for s in block_holders), copy_sources])
        # Only the writes of the last step in flight are checked, because it can share blocks that earlier steps write.
        if plans:
            self._check_writes(plans[-1].spans, Counter(block for s in block_holders for block in s.held_blocks))

    def _check_writes(self, spans: list[ScheduledSpan], ref_counts: Counter[BlockId]) -> None:
        """Raise Internal if a span writes a block that is shared, cached or free."""
        for span in spans:
            first = span.start // self._block_size * self._num_groups
            written_blocks = span.sequence.block_table[first : self.num_blocks(span.end)]
            if shared_blocks := [
                b for b in written_blocks if ref_counts[b] != 1 or self._block_pool.get_hash(b) is not None
            ]:
                raise Internal(f"block tables: sequence {span.sequence.id} writes the shared blocks {shared_blocks}")
