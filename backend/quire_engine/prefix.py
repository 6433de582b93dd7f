# SPDX-License-Identifier: Apache-2.0
"""PrefixCache: finds computed blocks by what they hold, and offers new ones. Which block goes is the pool's business.

The scheduler calls it; it knows tokens and hashes, no tensor and no order of sequences.
"""

from quire_engine.blocks import BlockPool, ContentKey
from quire_engine.request import BlockId, Sequence


class PrefixCache:
    """Blocks of equal prefixes: the same tokens from the start, adapter and salt."""

    def __init__(self, blocks: BlockPool, key: ContentKey, enabled: bool) -> None:
        self._blocks = blocks
        self._key = key
        self._enabled = enabled
        self.num_queries = 0
        """Tokens looked up for sequences that start."""
        self.num_hits = 0
        """Tokens found of them."""

    def find(self, sequence: Sequence) -> list[BlockId]:
        """The longest run of full blocks from the start that are cached; at least one token stays to be computed."""
        prefix: list[BlockId] = []
        if self._enabled:
            for index in range((sequence.num_tokens - 1) // self._key.block_size):
                block = self._blocks.find(self._hash(sequence, index))
                if block is None:
                    break
                prefix.append(block)
        return prefix

    def count(self, num_tokens: int, num_found: int) -> None:
        """A sequence starts with `num_found` of its tokens found."""
        self.num_queries += num_tokens
        self.num_hits += num_found

    def publish(self, sequence: Sequence, start: int, end: int) -> None:
        """Offer the blocks that computing tokens [start, end) of a sequence filled."""
        if self._enabled:
            for index in range(start // self._key.block_size, end // self._key.block_size):
                self._blocks.publish(sequence.block_table[index], self._hash(sequence, index))

    def _hash(self, sequence: Sequence, index: int) -> bytes:
        """Content hash of full block `index`; those before it have theirs."""
        hashes = sequence.block_hashes
        if index == len(hashes):
            parent = hashes[-1] if hashes else self._key.root(sequence.adapter, sequence.cache_salt)
            start = index * self._key.block_size
            hashes.append(self._key.extend(parent, sequence.tokens(start, start + self._key.block_size)))
        return hashes[index]
