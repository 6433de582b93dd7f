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

from quire_engine.request import BlockId
from quire_spec.errors import Internal

LAYOUT_VERSION = 1
"""Raise it with any change to the bytes of a KV block, so that blocks of two versions never meet."""


@dataclass(frozen=True, slots=True)
class ContentKey:
    """Everything besides the tokens that decides the bytes of a block, hashed over a fixed binary encoding.

    Block i of a sequence is named by sha256(name of block i - 1, its tokens as little-endian uint32); the name before
    block 0 is `root`. Equal names mean equal bytes on every replica, whatever the language or run that computed them.
    """

    model: str
    """Digest of the checkpoint."""
    kv_dtype: str
    block_size: int
    rope_switch: int | None = None
    """Tokens beyond which all of a sequence's keys are rotated otherwise, see ModelShape; None: never."""

    def beyond_switch(self, num_tokens: int) -> bool:
        """Whether the keys of a sequence of so many tokens are rotated as those of long ones."""
        return self.rope_switch is not None and num_tokens > self.rope_switch

    def root(self, adapter: str | None, salt: str | None, *, beyond_switch: bool = False) -> bytes:
        """Name of the empty prefix, 32 bytes. Each field carries its presence and length, so none runs into another."""
        fields = [str(LAYOUT_VERSION), self.model, self.kv_dtype, str(self.block_size), adapter, salt]
        if beyond_switch:
            fields.append("beyond switch")
        return hashlib.sha256(b"".join(_encode(field) for field in fields)).digest()

    def extend(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Name of the full block `token_ids` [block_size] that follows `parent`, 32 bytes."""
        assert len(token_ids) == self.block_size
        return hashlib.sha256(parent + struct.pack(f"<{self.block_size}I", *token_ids)).digest()


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

    def __init__(self, num_blocks: int, praised_share: float = 0.5) -> None:
        self.num_blocks = num_blocks
        self._max_praised = int(num_blocks * praised_share)
        self._counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, BlockId] = {}
        self._empty = [BlockId(i) for i in reversed(range(num_blocks))]
        # Both ordered from the block to give up first to the one released last; a block is idle in one of them.
        self._idle: OrderedDict[BlockId, None] = OrderedDict()
        self._idle_praised: OrderedDict[BlockId, None] = OrderedDict()
        self._praised = [False] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: empty and idle ones."""
        return len(self._empty) + len(self._idle) + len(self._idle_praised)

    @property
    def num_used(self) -> int:
        """Blocks that a sequence holds."""
        return self.num_blocks - self.num_free

    def find(self, content: bytes) -> BlockId | None:
        """The block that holds `content`, held or idle."""
        return self._by_hash.get(content)

    def hash_of(self, block: BlockId) -> bytes | None:
        """What `block` is published as."""
        return self._hashes[block]

    def num_holders(self, block: BlockId) -> int:
        """How often `block` is held."""
        return self._counts[block]

    def num_idle(self, blocks: Iterable[BlockId]) -> int:
        """How many of `blocks` nobody holds: sharing them takes them from the free ones."""
        return sum(1 for block in blocks if self._counts[block] == 0)

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Hold blocks that `find` returned. Their contents are not to be written."""
        for block in blocks:
            if self._counts[block] == 0:
                del (self._idle_praised if self._praised[block] else self._idle)[block]
            self._counts[block] += 1

    def praise(self, blocks: Iterable[BlockId]) -> None:
        """Held blocks turned out to be of use to others than those who computed them."""
        for block in blocks:
            assert self._counts[block] > 0
            self._praised[block] = self._max_praised > 0

    def allocate(self, num: int) -> list[BlockId]:
        """Hold `num` blocks for new contents; when there are no empty ones, idle ones lose theirs."""
        assert num <= self.num_free, f"{num} blocks asked, {self.num_free} free"
        blocks = [self._take() for _ in range(num)]
        for block in blocks:
            self._counts[block] = 1
        return blocks

    def publish(self, block: BlockId, content: bytes) -> None:
        """Say what a held, fully computed block holds.

        A twin with the same content stays the one that is found: tables never change under a running sequence, so
        the later block just stays anonymous.
        """
        assert self._counts[block] > 0 and self._hashes[block] is None
        if content not in self._by_hash:
            self._by_hash[content] = block
            self._hashes[block] = content

    def release(self, table: Sequence[BlockId]) -> None:
        """Let go of a sequence's blocks, given in order.

        The tail goes first, so that it is evicted first: a prefix is of use without its tail, a tail is not without
        its prefix.
        """
        for block in reversed(table):
            self._counts[block] -= 1
            if self._counts[block] > 0:
                continue
            assert self._counts[block] == 0, f"block {block} was released more often than held"
            if self._hashes[block] is None:
                self._empty.append(block)
            elif self._praised[block]:
                self._idle_praised[block] = None
            else:
                self._idle[block] = None
        while len(self._idle_praised) > self._max_praised:
            oldest, _ = self._idle_praised.popitem(last=False)
            self._praised[oldest] = False
            self._idle[oldest] = None

    def check_integrity(self, tables: Iterable[Sequence[BlockId]]) -> None:
        """Raise Internal, with the counts, unless the pool is whole and held by exactly `tables`."""
        held = Counter(block for table in tables for block in table)
        wrong = [b for b in range(self.num_blocks) if self._counts[b] != held[BlockId(b)]]
        idle = [*self._idle, *self._idle_praised]
        free = [*self._empty, *idle]
        num_held = sum(1 for count in self._counts if count > 0)
        published = {b for b, content in enumerate(self._hashes) if content is not None}
        faults = {
            "reference counts differ from the tables": bool(wrong),
            "a block is free twice": len(set(free)) != len(free),
            "a free block is held": any(self._counts[b] for b in free),
            "blocks are lost": len(free) + num_held != self.num_blocks,
            "an empty block is published": any(b in published for b in self._empty),
            "an idle block has no contents": any(b not in published for b in idle),
            "praise is not where the blocks are": any(self._praised[b] for b in (*self._empty, *self._idle))
            or not all(self._praised[b] for b in self._idle_praised),
            "too many are praised": len(self._idle_praised) > self._max_praised,
            "hashes and blocks do not match": published != set(self._by_hash.values())
            or any(self._hashes[b] != content for content, b in self._by_hash.items()),
        }
        if found := [fault for fault, present in faults.items() if present]:
            raise Internal(
                f"block pool: {'; '.join(found)}: {self.num_blocks} blocks, {num_held} held, {len(idle)} idle, "
                f"{len(self._empty)} empty, {len(published)} published; wrong counts at {wrong[:8]}"
            )

    def _take(self) -> BlockId:
        if self._empty:
            return self._empty.pop()
        block, _ = (self._idle or self._idle_praised).popitem(last=False)
        self._praised[block] = False
        content = self._hashes[block]
        assert content is not None
        del self._by_hash[content]
        self._hashes[block] = None
        return block


def _encode(field: str | None) -> bytes:
    if field is None:
        return b"\0"
    # A salt comes from a client's JSON and may hold half a surrogate pair, which plain UTF-8 refuses.
    data = field.encode("utf-8", "surrogatepass")
    return b"\1" + struct.pack("<I", len(data)) + data
