# SPDX-License-Identifier: Apache-2.0
"""BlockPool: who holds which KV block, and which contents can be shared. ContentKey: the identity of those contents.

Knows ids, reference counts and hashes; never an address, a tensor or a sequence. The scheduler calls it. Offload and
transfer of blocks use the same surface: `hash_of` names what a block holds, `allocate` + `publish` + `release` take
contents in, `find` + `share` give them out.
"""

import hashlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire_engine.sequence import BlockId
from quire_spec.errors import Internal

LAYOUT_VERSION = 1
"""Raise it with any change to the bytes of a KV block, so that blocks of two versions never meet."""


@dataclass(frozen=True, slots=True)
class BlockHasher:
    """Everything besides the tokens that decides the bytes of a block, hashed over a fixed binary encoding.

    Block i of a sequence is named by sha256(name of block i - 1, its tokens as little-endian uint32); the name before
    block 0 is `root`. Equal names mean equal bytes on every replica, whatever the language or run that computed them.
    """

    model_digest: str
    """Digest of the checkpoint."""
    kv_dtype: str
    block_size: int
    long_rope_threshold: int | None = None
    """Tokens beyond which all of a sequence's keys are rotated otherwise, see ModelShape; None: never."""

    def uses_long_rope(self, num_tokens: int) -> bool:
        """Whether the keys of a sequence of so many tokens are rotated as those of long ones."""
        return self.long_rope_threshold is not None and num_tokens > self.long_rope_threshold

    def root(self, adapter_digest: str | None, cache_salt: str | None, *, long_rope: bool = False) -> bytes:
        """Name of the empty prefix, 32 bytes. Each field carries its presence and length, so none runs into another."""
        fields = [
            str(LAYOUT_VERSION),
            self.model_digest,
            self.kv_dtype,
            str(self.block_size),
            adapter_digest,
            cache_salt,
        ]
        if long_rope:
            fields.append("beyond switch")
        return hashlib.sha256(b"".join(_encode_field(field) for field in fields)).digest()

    def extend(self, parent_hash: bytes, token_ids: Sequence[int]) -> bytes:
        """Name of the full block `token_ids` [block_size] that follows `parent`, 32 bytes."""
        assert len(token_ids) == self.block_size
        return hashlib.sha256(parent_hash + struct.pack(f"<{self.block_size}I", *token_ids)).digest()


class BlockPool:
    """A fixed number of blocks, each in one of three states.

    held   reference count > 0: some sequence's table has it
    idle   count 0, contents published: found by hash until the block is needed for something else
    empty  count 0, no contents

    Idle blocks go least recently released first, those that were found again by another sequence (`praise`) after all
    others: so a prompt that many begin with outlives any number of prompts that come once. Praised ones fill at most
    `praised_share` of the pool while idle; beyond, the oldest of them line up with the others as if just released, so
    that what was popular once goes too. Source: segmented LRU (Karedla, Love, Wherry: "Caching strategies to improve
    disk system performance", IEEE Computer 27(3), 1994).
    """

    def __init__(self, num_blocks: int, protected_ratio: float = 0.5) -> None:
        self.num_blocks = num_blocks
        self._max_protected = int(num_blocks * protected_ratio)
        self._ref_counts = [0] * num_blocks
        self._block_hashes: list[bytes | None] = [None] * num_blocks
        self._block_by_hash: dict[bytes, BlockId] = {}
        self._empty = [BlockId(i) for i in reversed(range(num_blocks))]
        # Both ordered from the block to give up first to the one released last; a block is idle in one of them.
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()
        self._evictable_protected: OrderedDict[BlockId, None] = OrderedDict()
        self._is_protected = [False] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: empty and idle ones."""
        return len(self._empty) + len(self._evictable) + len(self._evictable_protected)

    @property
    def num_used(self) -> int:
        """Blocks that a sequence holds."""
        return self.num_blocks - self.num_free

    def lookup(self, block_hash: bytes) -> BlockId | None:
        """The block that holds `content`, held or idle."""
        return self._block_by_hash.get(block_hash)

    def get_hash(self, block: BlockId) -> bytes | None:
        """What `block` is published as."""
        return self._block_hashes[block]

    def ref_count(self, block: BlockId) -> int:
        """How often `block` is held."""
        return self._ref_counts[block]

    def num_evictable(self, blocks: Iterable[BlockId]) -> int:
        """How many of `blocks` nobody holds: sharing them takes them from the free ones."""
        return sum(1 for block in blocks if self._ref_counts[block] == 0)

    def acquire(self, blocks: Iterable[BlockId]) -> None:
        """Hold blocks that `find` returned. Their contents are not to be written."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del (self._evictable_protected if self._is_protected[block] else self._evictable)[block]
            self._ref_counts[block] += 1

    def protect(self, blocks: Iterable[BlockId]) -> None:
        """Held blocks turned out to be of use to others than those who computed them."""
        for block in blocks:
            assert self._ref_counts[block] > 0
            self._is_protected[block] = self._max_protected > 0

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Hold `num` blocks for new contents; when there are no empty ones, idle ones lose theirs."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks asked, {self.num_free} free"
        blocks = [self._pop_free_block() for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def cache_block(self, block: BlockId, block_hash: bytes) -> None:
        """Say what a held, fully computed block holds.

        A twin with the same content stays the one that is found: tables never change under a running sequence, so
        the later block just stays anonymous.
        """
        assert self._ref_counts[block] > 0 and self._block_hashes[block] is None
        if block_hash not in self._block_by_hash:
            self._block_by_hash[block_hash] = block
            self._block_hashes[block] = block_hash

    def free(self, block_table: Sequence[BlockId]) -> None:
        """Let go of a sequence's blocks, given in order.

        The tail goes first, so that it is evicted first: a prefix is of use without its tail, a tail is not without
        its prefix.
        """
        for block in reversed(block_table):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] > 0:
                continue
            assert self._ref_counts[block] == 0, f"block {block} was released more often than held"
            if self._block_hashes[block] is None:
                self._empty.append(block)
            elif self._is_protected[block]:
                self._evictable_protected[block] = None
            else:
                self._evictable[block] = None
        while len(self._evictable_protected) > self._max_protected:
            oldest, _ = self._evictable_protected.popitem(last=False)
            self._is_protected[oldest] = False
            self._evictable[oldest] = None

    def check_integrity(self, block_tables: Iterable[Sequence[BlockId]]) -> None:
        """Raise Internal, with the counts, unless the pool is whole and held by exactly `tables`."""
        expected_counts = Counter(block for table in block_tables for block in table)
        mismatched = [b for b in range(self.num_blocks) if self._ref_counts[b] != expected_counts[BlockId(b)]]
        evictable = [*self._evictable, *self._evictable_protected]
        free_blocks = [*self._empty, *evictable]
        num_referenced = sum(1 for count in self._ref_counts if count > 0)
        cached = {b for b, block_hash in enumerate(self._block_hashes) if block_hash is not None}
        violations = {
            "reference counts differ from the tables": bool(mismatched),
            "a block is free twice": len(set(free_blocks)) != len(free_blocks),
            "a free block is held": any(self._ref_counts[b] for b in free_blocks),
            "blocks are lost": len(free_blocks) + num_referenced != self.num_blocks,
            "an empty block is published": any(b in cached for b in self._empty),
            "an idle block has no contents": any(b not in cached for b in evictable),
            "praise is not where the blocks are": any(self._is_protected[b] for b in (*self._empty, *self._evictable))
            or not all(self._is_protected[b] for b in self._evictable_protected),
            "too many are praised": len(self._evictable_protected) > self._max_protected,
            "hashes and blocks do not match": cached != set(self._block_by_hash.values())
            or any(self._block_hashes[b] != content for content, b in self._block_by_hash.items()),
        }
        if present_violations := [violation for violation, is_violated in violations.items() if is_violated]:
            raise Internal(
                f"block pool: {'; '.join(present_violations)}: {self.num_blocks} blocks, {num_referenced} held, "
                f"{len(evictable)} idle, "
                f"{len(self._empty)} empty, {len(cached)} published; wrong counts at {mismatched[:8]}"
            )

    def _pop_free_block(self) -> BlockId:
        if self._empty:
            return self._empty.pop()
        block, _ = (self._evictable or self._evictable_protected).popitem(last=False)
        self._is_protected[block] = False
        block_hash = self._block_hashes[block]
        assert block_hash is not None
        del self._block_by_hash[block_hash]
        self._block_hashes[block] = None
        return block


def _encode_field(field: str | None) -> bytes:
    if field is None:
        return b"\0"
    # A salt comes from a client's JSON and may hold half a surrogate pair, which plain UTF-8 refuses.
    data = field.encode("utf-8", "surrogatepass")
    return b"\1" + struct.pack("<I", len(data)) + data
