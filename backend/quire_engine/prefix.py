# SPDX-License-Identifier: Apache-2.0
"""PrefixCache: finds blocks that hold what a sequence begins with, and offers new ones. Which go is the pool's.

The scheduler calls it; it knows tokens and hashes, no tensor and no order of sequences.
"""

from dataclasses import dataclass, field

from quire_engine.blocks import BlockPool, ContentKey
from quire_engine.request import BlockId, Sequence


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens [0, num_tokens) of a sequence, and the blocks that hold them already."""

    num_tokens: int
    blocks: list[BlockId]
    """Those that the prefix fills, in order: to be shared."""
    copied: list[BlockId]
    """The one that it ends in, if it does not end with a block: the sequence writes the rest of it in a copy."""
    host_blocks: list[BlockId] = field(default_factory=list)
    """Places in host memory of those that follow `blocks` instead, when the sequence was swapped out."""


class PrefixCache:
    """Blocks of equal prefixes: the same tokens from the start, adapter and salt."""

    def __init__(self, blocks: BlockPool, key: ContentKey, enabled: bool) -> None:
        """Disabled, it finds nothing but what a fork shares with its leader."""
        self._blocks = blocks
        self._key = key
        self._enabled = enabled
        self.num_queries = 0
        """Tokens looked up for sequences that start."""
        self.num_hits = 0
        """Tokens found of them."""

    def find(self, sequence: Sequence) -> Prefix:
        """The longest prefix that is cached, that its leader holds or that was swapped out.

        At least one token stays to be computed.

        None of a prompt whose logits are wanted: all of it is computed.
        """
        if sequence.scoring:
            return Prefix(0, [], [])
        leader, size = sequence.leader, self._key.block_size
        if leader is not None and self._beyond_switch(leader) != self._beyond_switch(sequence):
            leader = None
        if leader is not None and not sequence.block_hashes:
            sequence.block_hashes = leader.block_hashes[: len(sequence.prompt_token_ids) // size]
        cached = self._cached(sequence) if self._enabled else []
        num_cached = min(len(cached) * size, sequence.num_tokens - 1)
        num_led = 0
        if leader is not None:
            num_led = min(leader.num_computed_tokens, len(sequence.prompt_token_ids), sequence.num_tokens - 1)
        if leader is not None and num_led > num_cached:
            prefix = self._prefix(leader.block_table, num_led)
        else:
            prefix = self._prefix(cached, num_cached)
        return self._with_swapped(sequence, prefix)

    def whole(self, prefix: Prefix) -> Prefix:
        """`prefix` up to its last full block, which needs no copy."""
        return self._prefix(prefix.blocks, len(prefix.blocks) * self._key.block_size)

    def outgrown(self, sequence: Sequence) -> bool:
        """Whether what a sequence has in its blocks became useless with its last token; its hashes are then gone."""
        beyond = self._key.beyond_switch
        if beyond(sequence.num_computed_tokens) or not beyond(sequence.num_tokens):
            return False
        sequence.block_hashes = []
        return True

    def started(self, sequence: Sequence, prefix: Prefix) -> None:
        """A sequence starts for the first time, with what was found of it."""
        self.num_queries += sequence.num_tokens
        self.num_hits += prefix.num_tokens
        # What the outputs of one request share with each other says nothing about the next request.
        if sequence.fork_of is None:
            self._blocks.praise(prefix.blocks + prefix.copied)

    def publish(self, sequence: Sequence) -> None:
        """Offer the blocks that a sequence's computed tokens fill."""
        num_full = sequence.num_computed_tokens // self._key.block_size
        if self._enabled and num_full > sequence.num_published_blocks:
            for index in range(sequence.num_published_blocks, num_full):
                self._blocks.publish(sequence.block_table[index], self._hash(sequence, index))
            sequence.num_published_blocks = num_full

    def _prefix(self, blocks: list[BlockId], num_tokens: int) -> Prefix:
        full, rest = divmod(num_tokens, self._key.block_size)
        return Prefix(num_tokens, blocks[:full], blocks[full : full + 1] if rest else [])

    def _with_swapped(self, sequence: Sequence, prefix: Prefix) -> Prefix:
        """The longer prefix that a swapped sequence has, if what it left behind is still there."""
        num_found, num_left = len(prefix.blocks), sequence.num_left_blocks
        if prefix.num_tokens >= sequence.num_swapped_tokens or num_found < num_left:
            return prefix
        return Prefix(sequence.num_swapped_tokens, prefix.blocks, [], sequence.host_blocks[num_found - num_left :])

    def _cached(self, sequence: Sequence) -> list[BlockId]:
        """The longest run of full blocks from the start that are cached."""
        found: list[BlockId] = []
        for index in range(sequence.num_tokens // self._key.block_size):
            block = self._blocks.find(self._hash(sequence, index))
            if block is None:
                break
            found.append(block)
        return found

    def _beyond_switch(self, sequence: Sequence) -> bool:
        return self._key.beyond_switch(sequence.num_tokens)

    def _root(self, sequence: Sequence) -> bytes:
        beyond = self._beyond_switch(sequence)
        return self._key.root(sequence.adapter, sequence.cache_salt, beyond_switch=beyond)

    def _hash(self, sequence: Sequence, index: int) -> bytes:
        """Content hash of full block `index`."""
        hashes = sequence.block_hashes
        # Those before it have theirs, but for those that a fork shares with a leader whose step is in flight.
        while index >= len(hashes):
            parent = hashes[-1] if hashes else self._root(sequence)
            start = len(hashes) * self._key.block_size
            hashes.append(self._key.extend(parent, sequence.tokens(start, start + self._key.block_size)))
        return hashes[index]
