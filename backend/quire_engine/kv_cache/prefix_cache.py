# SPDX-License-Identifier: Apache-2.0
"""PrefixCache: finds blocks that hold what a sequence begins with, and offers new ones. Which go is the pool's.

The scheduler calls it; it knows tokens and hashes, no tensor and no order of sequences.
"""

from dataclasses import dataclass, field

from quire_engine.kv_cache.block_pool import BlockHasher, BlockPool
from quire_engine.sequence import BlockId, Sequence


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Tokens [0, num_tokens) of a sequence, and the blocks that hold them already."""

    num_tokens: int
    blocks: list[BlockId]
    """Those that the prefix fills, in order: to be shared."""
    copy_sources: list[BlockId]
    """The one that it ends in, if it does not end with a block: the sequence writes the rest of it in a copy."""
    host_blocks: list[BlockId] = field(default_factory=list)
    """Places in host memory of those that follow `blocks` instead, when the sequence was swapped out."""


class PrefixCache:
    """Blocks of equal prefixes: the same tokens from the start, adapter and salt."""

    def __init__(self, block_pool: BlockPool, block_hasher: BlockHasher, enabled: bool) -> None:
        """Disabled, it finds nothing but what a fork shares with its leader."""
        self._block_pool = block_pool
        self._block_hasher = block_hasher
        self._enabled = enabled
        self.num_queries = 0
        """Tokens looked up for sequences that start."""
        self.num_hits = 0
        """Tokens found of them."""

    def match(self, sequence: Sequence) -> PrefixHit:
        """The longest prefix that is cached, that its leader holds or that was swapped out.

        At least one token stays to be computed.

        None of a prompt whose logits are wanted: all of it is computed.
        """
        if sequence.needs_prompt_logprobs:
            return PrefixHit(0, [], [])
        parent, block_size = sequence.parent, self._block_hasher.block_size
        if parent is not None and self._uses_long_rope(parent) != self._uses_long_rope(sequence):
            parent = None
        if parent is not None and not sequence.block_hashes:
            sequence.block_hashes = parent.block_hashes[: len(sequence.prompt_token_ids) // block_size]
        cached_blocks = self._cached_blocks(sequence) if self._enabled else []
        num_cached_tokens = min(len(cached_blocks) * block_size, sequence.num_tokens - 1)
        num_parent_tokens = 0
        if parent is not None:
            num_parent_tokens = min(parent.num_computed_tokens, len(sequence.prompt_token_ids), sequence.num_tokens - 1)
        if parent is not None and num_parent_tokens > num_cached_tokens:
            hit = self._make_hit(parent.block_table, num_parent_tokens)
        else:
            hit = self._make_hit(cached_blocks, num_cached_tokens)
        return self._extend_with_swapped(sequence, hit)

    def full_blocks_only(self, hit: PrefixHit) -> PrefixHit:
        """`prefix` up to its last full block, which needs no copy."""
        return self._make_hit(hit.blocks, len(hit.blocks) * self._block_hasher.block_size)

    def invalidate_if_rope_switched(self, sequence: Sequence) -> bool:
        """Whether what a sequence has in its blocks became useless with its last token; its hashes are then gone."""
        uses_long_rope = self._block_hasher.uses_long_rope
        if uses_long_rope(sequence.num_computed_tokens) or not uses_long_rope(sequence.num_tokens):
            return False
        sequence.block_hashes = []
        return True

    def record_hit(self, sequence: Sequence, hit: PrefixHit) -> None:
        """A sequence starts for the first time, with what was found of it."""
        self.num_queries += sequence.num_tokens
        self.num_hits += hit.num_tokens
        # What the outputs of one request share with each other says nothing about the next request.
        if sequence.parent_id is None:
            self._block_pool.protect(hit.blocks + hit.copy_sources)

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Offer the blocks that a sequence's computed tokens fill."""
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
        """The longer prefix that a swapped sequence has, if what it left behind is still there."""
        num_matched_blocks, num_shared_blocks = len(hit.blocks), sequence.num_shared_blocks
        if hit.num_tokens >= sequence.num_swapped_tokens or num_matched_blocks < num_shared_blocks:
            return hit
        return PrefixHit(
            sequence.num_swapped_tokens, hit.blocks, [], sequence.host_blocks[num_matched_blocks - num_shared_blocks :]
        )

    def _cached_blocks(self, sequence: Sequence) -> list[BlockId]:
        """The longest run of full blocks from the start that are cached."""
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
        """Content hash of full block `index`."""
        hashes = sequence.block_hashes
        # Those before it have theirs, but for those that a fork shares with a leader whose step is in flight.
        while index >= len(hashes):
            parent_hash = hashes[-1] if hashes else self._root_hash(sequence)
            start = len(hashes) * self._block_hasher.block_size
            hashes.append(
                self._block_hasher.extend(parent_hash, sequence.tokens(start, start + self._block_hasher.block_size))
            )
        return hashes[index]
