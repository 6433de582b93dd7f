# SPDX-License-Identifier: Apache-2.0
"""Prefix cache: finds KV blocks that already contain the beginning of a sequence, and caches newly computed blocks.

The scheduler calls it. It works on tokens and hashes, and depends on neither tensors nor the order of sequences. The
block pool decides which blocks are evicted.
"""

from dataclasses import dataclass, field

from quire_engine.kv_cache.block_hash import BlockHasher
from quire_engine.kv_cache.block_pool import BlockPool
from quire_engine.sequence import BlockId, Sequence


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Tokens [0, num_tokens) of a sequence, and the blocks that already contain them."""

    num_tokens: int
    blocks: list[BlockId]
    """Blocks that the prefix fills completely, in order. The sequence shares them."""
    copy_sources: list[BlockId]
    """The block in which the prefix ends, if it ends within one. The sequence continues in a copy of it."""
    host_blocks: list[BlockId] = field(default_factory=list)
    """Host blocks with the tokens after `blocks`; only for a swapped-out sequence, which has no `copy_sources`."""


class PrefixCache:
    """Shares blocks between sequences with the same first tokens, adapter and salt."""

    def __init__(self, block_pool: BlockPool, block_hasher: BlockHasher, enabled: bool) -> None:
        """Create the cache. Even a disabled cache lets a fork share the blocks of its parent."""
        self._block_pool = block_pool
        self._block_hasher = block_hasher
        self._enabled = enabled
        self.num_queries = 0
        """Number of tokens of all sequences that started."""
        self.num_hits = 0
        """Number of tokens of started sequences that were found in the cache."""

    def match(self, sequence: Sequence) -> PrefixHit:
        """Return the longest prefix that is cached, shared with the parent or swapped out.

        The prefix leaves at least one token to compute. The prefix is empty while the request needs prompt log
        probabilities, because these require the logits of every prompt token.
        """
        if sequence.needs_prompt_logprobs:
            return PrefixHit(0, [], [])
        parent, block_size = sequence.parent, self._block_hasher.block_size
        if parent is not None and (
            parent.num_freed_blocks or self._uses_long_rope(parent) != self._uses_long_rope(sequence)
        ):
            parent = None
        if parent is not None and not sequence.block_hashes:
            sequence.block_hashes = parent.block_hashes[: len(sequence.prompt_token_ids) // block_size]
        cached_blocks = self._cached_blocks(sequence) if self._enabled else []
        max_tokens = sequence.num_prefill_tokens - 1
        num_cached_tokens = min(len(cached_blocks) * block_size, max_tokens)
        num_parent_tokens = 0
        if parent is not None:
            num_parent_tokens = min(parent.num_computed_tokens, len(sequence.prompt_token_ids), max_tokens)
        if parent is not None and num_parent_tokens > num_cached_tokens:
            hit = self._make_hit(parent.block_table, num_parent_tokens)
        else:
            hit = self._make_hit(cached_blocks, num_cached_tokens)
        return self._extend_with_swapped(sequence, hit)

    def full_blocks_only(self, hit: PrefixHit) -> PrefixHit:
        """Return the part of `hit` in full blocks, which needs no copy of a block."""
        return self._make_hit(hit.blocks, len(hit.blocks) * self._block_hasher.block_size)

    def invalidate_if_rope_switched(self, sequence: Sequence) -> bool:
        """Drop the block hashes of a sequence if its last token crossed the long-rope threshold; return whether it did.

        All keys of such a sequence must be computed again.
        """
        uses_long_rope = self._block_hasher.uses_long_rope
        if uses_long_rope(sequence.num_computed_tokens) or not uses_long_rope(sequence.num_tokens):
            return False
        sequence.block_hashes = []
        return True

    def record_hit(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Count the cached tokens of a sequence that starts for the first time, and protect its shared blocks."""
        self.num_queries += sequence.num_tokens
        self.num_hits += hit.num_tokens
        # Forks are not counted: outputs of one request share a prompt, which predicts nothing about other requests.
        if sequence.parent_id is None:
            self._block_pool.protect(hit.blocks + hit.copy_sources)

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Cache the blocks that the computed tokens of a sequence fill."""
        num_full = sequence.num_computed_tokens // self._block_hasher.block_size
        if self._enabled and num_full > sequence.num_cached_blocks:
            for index in range(sequence.num_cached_blocks, num_full):
                self._block_pool.cache_block(sequence.block_table[index], self._block_hash(sequence, index))
            sequence.num_cached_blocks = num_full

    def _make_hit(self, blocks: list[BlockId], num_tokens: int) -> PrefixHit:
        num_full_blocks, num_partial_tokens = divmod(num_tokens, self._block_hasher.block_size)
        return PrefixHit(
            num_tokens,
            blocks[:num_full_blocks],
            blocks[num_full_blocks : num_full_blocks + 1] if num_partial_tokens else [],
        )

    def _extend_with_swapped(self, sequence: Sequence, hit: PrefixHit) -> PrefixHit:
        """Extend `hit` by the host blocks of a swapped sequence, if the blocks before them are still cached."""
        num_matched_blocks, num_shared_blocks = len(hit.blocks), sequence.num_shared_blocks
        if hit.num_tokens >= sequence.num_swapped_tokens or num_matched_blocks < num_shared_blocks:
            return hit
        return PrefixHit(
            min(sequence.num_swapped_tokens, sequence.num_prefill_tokens - 1),
            hit.blocks,
            [],
            sequence.host_blocks[num_matched_blocks - num_shared_blocks :],
        )

    def _cached_blocks(self, sequence: Sequence) -> list[BlockId]:
        """Return the cached full blocks from the start of a sequence up to the first block that is not cached."""
        blocks: list[BlockId] = []
        for index in range(sequence.num_tokens // self._block_hasher.block_size):
            block = self._block_pool.lookup(self._block_hash(sequence, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _uses_long_rope(self, sequence: Sequence) -> bool:
        return self._block_hasher.uses_long_rope(sequence.num_tokens)

    def _root_hash(self, sequence: Sequence) -> bytes:
        long_rope = self._uses_long_rope(sequence)
        return self._block_hasher.root(sequence.adapter_digest, sequence.cache_salt, long_rope=long_rope)

    def _block_hash(self, sequence: Sequence, index: int) -> bytes:
        """Return the content hash of full block `index`."""
        hashes = sequence.block_hashes
        # Earlier hashes are missing only if a fork shares blocks with a parent whose step is in flight.
        while index >= len(hashes):
            parent_hash = hashes[-1] if hashes else self._root_hash(sequence)
            start = len(hashes) * self._block_hasher.block_size
            hashes.append(
                self._block_hasher.extend(parent_hash, sequence.tokens(start, start + self._block_hasher.block_size))
            )
        return hashes[index]
