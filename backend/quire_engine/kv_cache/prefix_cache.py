# SPDX-License-Identifier: Apache-2.0
"""Prefix cache: finds KV blocks that already contain the beginning of a sequence, and caches newly computed blocks.

The scheduler calls it. The cache works on tokens and hashes. It does not depend on tensors or on the order of
sequences. The block pool decides which blocks are evicted.
"""

from dataclasses import dataclass, field, replace

from quire_engine.kv_cache.block_events import BlocksStored
from quire_engine.kv_cache.block_hash import BlockHasher, group_hash
from quire_engine.kv_cache.block_pool import BlockPool
from quire_engine.kv_cache.host_cache import HostCache
from quire_engine.kv_cache.host_states import HostStates
from quire_engine.kv_cache.state_pool import StatePool
from quire_engine.sequence import BlockId, Sequence
from quire_spec.constants import AdapterDigest
from quire_spec.model.kv_layout import KVLayout
from quire_spec.protocol.kv_transfer_params import PromptKeys


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Tokens [0, num_tokens) of a sequence, and the blocks that already contain them."""

    num_tokens: int
    blocks: list[BlockId]
    """The first entries of the block table. The prefix fills the blocks of these entries completely. The sequence
    shares these blocks."""
    copy_sources: list[BlockId]
    """The blocks that contain the end of the prefix, if it does not end at a block boundary. The sequence continues in
    copies of these blocks."""
    num_freed_entries: int = 0
    """`num_freed_entries` and `kept_blocks` are explained in Sequence."""
    kept_blocks: list[BlockId] = field(default_factory=list)
    host_blocks: list[BlockId] = field(default_factory=list)
    """Host blocks that contain the tokens after `blocks`. They belong to the sequence if it is swapped out, or to the
    cache in host memory. If there are any, there are no `copy_sources`."""

    @property
    def held_blocks(self) -> list[BlockId]:
        """The blocks to which the sequence takes a reference. Freed entries of `blocks` are not among them."""
        return self.kept_blocks + self.blocks[self.num_freed_entries :]


class PrefixCache:
    """Shares blocks between sequences with the same first tokens, adapter and salt. Blocks before the invocation of an
    adapter are those of the base model.

    If the layers are divided into groups, each group has its own blocks. The blocks of a group with a sliding window
    can be evicted while the blocks of other groups stay cached. Therefore, a prefix can end at a position only if the
    whole window before this position is cached.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        block_hasher: BlockHasher,
        layout: KVLayout,
        enabled: bool,
        host_cache: HostCache,
        state_pool: StatePool | None = None,
        host_states: HostStates | None = None,
    ) -> None:
        """Create the cache. A fork shares the blocks of its parent even if the cache is disabled. With a `state_pool`,
        a prefix ends where a snapshot of the state exists, there or in `host_states`."""
        self._block_pool = block_pool
        self._host_cache = host_cache
        self._layout = layout
        self._block_hasher = block_hasher
        self._enabled = enabled
        self._state_pool = state_pool
        self._host_states = host_states or HostStates()
        self.num_queries = 0
        """Number of tokens of all sequences that started."""
        self.num_hits = 0
        """Number of tokens that were found in the cache when their sequences started."""
        self.num_host_queries = 0
        """Number of tokens that were looked up in host memory, because the device did not have them."""
        self.num_host_hits = 0
        """Number of tokens that were found in host memory when their sequences started."""

    def match(self, sequence: Sequence) -> PrefixHit:
        """Return the longest prefix of a sequence for which KV blocks exist.

        These blocks can be cached on the device or in host memory, shared with the sequence's parent, or swapped out.

        The prefix is shorter than the sequence, so that at least one token is computed. The prefix is empty while the
        request needs prompt log probabilities or pools all tokens, because the hidden state of every prompt token is
        then necessary.
        """
        if sequence.needs_hidden_states:
            return PrefixHit(0, [], [])
        parent, block_size = sequence.parent, self._block_hasher.block_size
        if parent is not None and (
            parent.num_freed_entries or self._uses_long_rope(parent) != self._uses_long_rope(sequence)
        ):
            parent = None
        if parent is not None and not sequence.block_hashes:
            sequence.block_hashes = parent.block_hashes[: len(sequence.prompt_token_ids) // block_size]
        max_tokens = sequence.num_prefill_tokens - 1
        cached_blocks = self._cached_blocks(sequence, max_tokens) if self._enabled else []
        num_cached_tokens = min(len(cached_blocks) // self._layout.num_groups * block_size, max_tokens)
        num_parent_tokens = 0
        if parent is not None:
            num_parent_tokens = min(parent.num_computed_tokens, len(sequence.prompt_token_ids), max_tokens)
        if parent is not None and num_parent_tokens > num_cached_tokens:
            hit = self._make_hit(parent.block_table, num_parent_tokens)
        else:
            hit = self._make_hit(cached_blocks, num_cached_tokens)
        if self._state_pool is not None:
            return self._cut_to_snapshot(sequence, hit, self._state_pool, max_tokens)
        return self._extend_with_host(sequence, self._extend_with_swapped(sequence, hit), max_tokens)

    def missing_blocks(self, sequence: Sequence) -> dict[bytes, AdapterDigest | None]:
        """Return the keys of the full blocks after those that `match` finds, and the adapter of each block. A sequence
        could restore these blocks if a store had them."""
        if sequence.needs_hidden_states or not self._enabled:
            return {}
        hit, block_size = self.match(sequence), self._block_hasher.block_size
        max_tokens = sequence.num_prefill_tokens - 1
        if hit.num_tokens >= max_tokens or hit.copy_sources:
            return {}
        # A state contains all tokens of its prefix, and the last token is computed again.
        last = -(-max_tokens // block_size) if self._state_pool is None else max_tokens // block_size
        end = min(sequence.num_tokens // block_size, last)
        return {
            self.block_hash(sequence, index): sequence.adapter_until((index + 1) * block_size)
            for index in range(len(hit.blocks) + len(hit.host_blocks), end)
        }

    def has_block(self, key: bytes) -> bool:
        """Return whether the device or host memory has the block with this key."""
        return self._block_pool.lookup(key) is not None or self._host_cache.pool.lookup(key) is not None

    def prompt_keys(self, sequence: Sequence) -> PromptKeys:
        """Return the keys of the full blocks of a sequence that has no output yet."""
        num_blocks, root = sequence.num_tokens // self._block_hasher.block_size, self._root_hash(sequence)
        digest = self.block_hash(sequence, num_blocks - 1) if num_blocks else root
        return PromptKeys(root.hex(), num_blocks * self._block_hasher.block_size, digest.hex())

    def full_blocks_only(self, hit: PrefixHit) -> PrefixHit:
        """Return the part of `hit` that consists of full blocks. A sequence that continues after this part does not
        need a copy of any block."""
        num_rows = len(hit.blocks) // self._layout.num_groups
        return self._make_hit(hit.blocks, num_rows * self._block_hasher.block_size)

    def invalidate_if_rope_switched(self, sequence: Sequence) -> bool:
        """If the last token of a sequence crossed the long-rope threshold, drop the sequence's block hashes and return
        True.

        After such a switch, all keys of the sequence must be computed again.
        """
        uses_long_rope = self._block_hasher.uses_long_rope
        if uses_long_rope(sequence.num_computed_tokens) or not uses_long_rope(sequence.num_tokens):
            return False
        sequence.block_hashes = []
        return True

    def record_hit(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Count the cached tokens of a sequence that starts for the first time, and protect its shared blocks."""
        num_host_tokens = hit.num_tokens - len(hit.blocks) * self._block_hasher.block_size if hit.host_blocks else 0
        self.num_queries += sequence.num_tokens
        self.num_hits += hit.num_tokens - num_host_tokens
        self.num_host_queries += sequence.num_tokens - (hit.num_tokens - num_host_tokens)
        self.num_host_hits += num_host_tokens
        self._host_cache.num_loaded_blocks += len(hit.host_blocks)
        # The hits of forks do not protect blocks. The outputs of one request share its prompt, but this does not mean
        # that other requests use this prompt too.
        if sequence.parent_id is None:
            self._block_pool.protect(reused := hit.held_blocks + hit.copy_sources)
            self._host_cache.request(map(self._block_pool.get_hash, reused))
            self._host_cache.pool.protect(hit.host_blocks)

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Cache the blocks that the computed tokens of a sequence fill."""
        num_full = sequence.num_computed_tokens // self._block_hasher.block_size
        if self._enabled and num_full > sequence.num_cached_blocks:
            num_groups, event_log = self._layout.num_groups, self._block_pool.event_log
            for group in range(num_groups):
                for index in range(sequence.num_cached_blocks, num_full):
                    key = group_hash(self.block_hash(sequence, index), group)
                    is_new = self._block_pool.cache_block(sequence.block_table[index * num_groups + group], key)
                    if is_new and event_log is not None:
                        event_log.add_stored(self._stored_event(sequence, index, group))
            sequence.num_cached_blocks = num_full

    def _make_hit(self, blocks: list[BlockId], num_tokens: int) -> PrefixHit:
        """Return the PrefixHit for the first `num_tokens` tokens.

        `blocks` is a block table or the beginning of one.
        """
        num_groups = self._layout.num_groups
        num_full_blocks, num_partial_tokens = divmod(num_tokens, self._block_hasher.block_size)
        end = num_full_blocks * num_groups
        copy_sources = blocks[end : end + num_groups] if num_partial_tokens else []
        if num_groups == 1:
            return PrefixHit(num_tokens, blocks[:end], copy_sources)
        first = self._num_unread(num_full_blocks) * num_groups
        kept_blocks, _ = self._layout.split_entries(blocks[:first])
        entries = self._layout.without_freed(blocks[:first]) + blocks[first:end]
        return PrefixHit(num_tokens, entries, copy_sources, first, kept_blocks)

    def _cut_to_snapshot(self, sequence: Sequence, hit: PrefixHit, pool: StatePool, max_tokens: int) -> PrefixHit:
        """Return the longest part of `hit`, extended by blocks in host memory, at whose end a snapshot of the state
        exists. Host memory is used only if it is faster than computing the tokens."""
        block_size, host = self._block_hasher.block_size, self._host_states
        num_blocks = hit.num_tokens // block_size
        last = max_tokens // block_size
        rows = self._host_cache.find(self.block_hash(sequence, i) for i in range(num_blocks, last))
        sequence.num_matched_tokens = (num_blocks + len(rows)) * block_size
        device_end, end = num_blocks, num_blocks + len(rows)
        while device_end and self.block_hash(sequence, device_end - 1) not in pool:
            device_end -= 1
        while end > device_end and (key := self.block_hash(sequence, end - 1)) not in pool and key not in host:
            end -= 1
        num_copied = max(end - num_blocks, 0)
        if end > device_end:
            costs, is_on_device = self._host_cache.costs, self.block_hash(sequence, end - 1) in pool
            num_copies = num_copied + (0 if is_on_device else costs.num_blocks_per_state)
            if costs.is_worthwhile(num_copies, (end - device_end) * block_size):
                prefix = self._make_hit(hit.blocks, (end - num_copied) * block_size)
                return replace(prefix, num_tokens=end * block_size, host_blocks=rows[:num_copied])
        return self._make_hit(hit.blocks, device_end * block_size)

    def _num_unread(self, num_blocks: int) -> int:
        """Return how many blocks at the start of a prefix are outside the sliding window of every later token.

        `num_blocks` is the number of full blocks in the prefix. Tokens after the full blocks are ignored, so that
        `full_blocks_only` does not change the result.
        """
        block_size = self._block_hasher.block_size
        return self._layout.num_outside_window(num_blocks * block_size, block_size)

    def _extend_with_swapped(self, sequence: Sequence, hit: PrefixHit) -> PrefixHit:
        """Extend `hit` by the host blocks of a swapped sequence, if the blocks before them are still cached."""
        num_matched_blocks, num_shared_blocks = len(hit.blocks), sequence.num_shared_blocks
        if hit.num_tokens >= sequence.num_swapped_tokens or num_matched_blocks < num_shared_blocks:
            return hit
        return PrefixHit(
            min(sequence.num_swapped_tokens, sequence.num_prefill_tokens - 1),
            hit.blocks,
            [],
            host_blocks=sequence.host_blocks[num_matched_blocks - num_shared_blocks :],
        )

    def _extend_with_host(self, sequence: Sequence, hit: PrefixHit, max_tokens: int) -> PrefixHit:
        """Extend `hit` by blocks that are cached in host memory, if this is faster than computing their tokens."""
        block_size, first = self._block_hasher.block_size, len(hit.blocks)
        if hit.host_blocks or not self._enabled or hit.num_tokens >= max_tokens or not self._host_cache.is_caching:
            return hit
        # The last block can contain the last token, although this token is computed again: the sequence has a copy.
        end = min(sequence.num_tokens // block_size, -(-max_tokens // block_size))
        rows = self._host_cache.find(self.block_hash(sequence, index) for index in range(first, end))
        num_tokens = min((first + len(rows)) * block_size, max_tokens)
        if not rows or not self._host_cache.costs.is_worthwhile(len(rows), num_tokens - hit.num_tokens):
            return hit
        return PrefixHit(num_tokens, hit.blocks, [], hit.num_freed_entries, hit.kept_blocks, rows)

    def _cached_blocks(self, sequence: Sequence, max_tokens: int) -> list[BlockId]:
        """Return the cached full blocks from the start of a sequence up to the first block that is not cached.

        If there are several groups, a row contains one block of each group. If a block of layers with a window is not
        cached, the first block of its row replaces it. Rows at the end are dropped, so that the tokens that are
        computed next do not read such a replacement. The caller uses the result for at most `max_tokens` tokens.
        """
        block_size, num_groups = self._block_hasher.block_size, self._layout.num_groups
        blocks: list[BlockId] = []
        num_usable_rows = first_complete_row = 0
        for index in range(sequence.num_tokens // block_size):
            row = [self._block_pool.lookup(key) for key in self._keys(sequence, index)]
            found = [block for block in row if block is not None]
            if len(found) == num_groups:
                blocks += found
            else:
                if None in row[: max(self._layout.num_full_groups, 1)]:
                    break
                first_complete_row = index + 1
                blocks += [found[0] if block is None else block for block in row]
            if first_complete_row <= self._num_unread(min((index + 1) * block_size, max_tokens) // block_size):
                num_usable_rows = index + 1
        return blocks[: num_usable_rows * num_groups]

    def _keys(self, sequence: Sequence, index: int) -> list[bytes]:
        """Return the hashes of full block `index` of a sequence, one for each group of layers."""
        block_hash = self.block_hash(sequence, index)
        return [group_hash(block_hash, group) for group in range(self._layout.num_groups)]

    def _stored_event(self, sequence: Sequence, index: int, group: int) -> BlocksStored:
        """Return the event for full block `index`."""
        block_size, hashes = self._block_hasher.block_size, sequence.block_hashes
        start, end = index * block_size, (index + 1) * block_size
        images = [
            (image.digest.hex(), image.start - start)
            for image in sequence.images
            if image.start < end and start < image.start + image.num_tokens
        ]
        return BlocksStored(
            [group_hash(hashes[index], group)],
            group_hash(hashes[index - 1], group) if index else None,
            sequence.tokens(start, end),
            sequence.adapter_until(end),
            sequence.cache_salt,
            group,
            images=[images],
            has_base_parent=index > 0 and sequence.adapter_until(start) is None,
        )

    def _uses_long_rope(self, sequence: Sequence) -> bool:
        return self._block_hasher.uses_long_rope(sequence.num_tokens)

    def _root_hash(self, sequence: Sequence) -> bytes:
        long_rope = self._uses_long_rope(sequence)
        return self._block_hasher.root(sequence.adapter_until(1), sequence.cache_salt, long_rope=long_rope)

    def block_hash(self, sequence: Sequence, index: int) -> bytes:
        """Return the content hash of full block `index`."""
        hashes = sequence.block_hashes
        # Earlier hashes are missing only if a fork shares blocks with a parent whose step is in flight.
        while index >= len(hashes):
            parent_hash = self._block_hasher.switch(
                hashes[-1] if hashes else self._root_hash(sequence),
                len(hashes),
                sequence.adapter_digest,
                sequence.adapter_start,
            )
            start = len(hashes) * self._block_hasher.block_size
            end = start + self._block_hasher.block_size
            # The hashes of later blocks depend on that of the block in which the image begins.
            for image in sequence.images:
                if start <= image.start < end:
                    parent_hash = self._block_hasher.add_image(parent_hash, image.start, image.digest)
            hashes.append(self._block_hasher.extend(parent_hash, sequence.tokens(start, end)))
        return hashes[index]
