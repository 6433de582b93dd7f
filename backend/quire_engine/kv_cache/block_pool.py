# SPDX-License-Identifier: Apache-2.0
"""Pool of KV blocks: reference counts, cached contents and eviction.

The pool contains block ids, reference counts and hashes, but no addresses, tensors or sequences. The block manager and
the prefix cache call it. KV offload and KV transfer can use the same methods. `get_hash` identifies the contents of a
block. `allocate`, `cache_block` and `free` add contents. `lookup` and `acquire` give access to them.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from quire_engine.kv_cache.block_events import BlockEventLog, Medium
from quire_engine.sequence import BlockId
from quire_spec.errors import Internal


class BlockPool:
    """A fixed number of blocks, each in one of three states.

    - used: the reference count is positive, because the block is in the table of at least one sequence.
    - evictable: the reference count is 0, and the contents are cached. `lookup` returns the block until it is evicted.
    - empty: the reference count is 0, and there are no contents.

    Eviction is segmented LRU. The block that was freed least recently is evicted first. A block becomes protected when
    another sequence reuses it (`protect`). Protected blocks are evicted last. Therefore, a shared prompt prefix stays
    cached, no matter how many prompts occur only once. Evictable protected blocks occupy at most `protected_ratio` of
    the pool. If there are more of them, the oldest ones lose their protection. In this way, contents that are no longer
    popular are evicted too.

    Source: Karedla, Love, Wherry: "Caching strategies to improve disk system performance", IEEE Computer 27(3), 1994
    """

    def __init__(self, num_blocks: int, protected_ratio: float = 0.5, medium: Medium = "GPU") -> None:
        self.num_blocks = num_blocks
        self._medium: Medium = medium
        self._max_protected = int(num_blocks * protected_ratio)
        self._ref_counts = [0] * num_blocks
        self._block_hashes: list[bytes | None] = [None] * num_blocks
        self._block_by_hash: dict[bytes, BlockId] = {}
        self._empty = [BlockId(i) for i in reversed(range(num_blocks))]
        # Both queues are in the order in which their blocks are evicted. The block that was freed last is at the end.
        # An evictable block is in exactly one of them.
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()
        self._evictable_protected: OrderedDict[BlockId, None] = OrderedDict()
        self._is_protected = [False] * num_blocks
        self.event_log: BlockEventLog | None = None
        """Receives the events of cached blocks; None if they are not observed."""

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can return: empty blocks and evictable blocks."""
        return len(self._empty) + len(self._evictable) + len(self._evictable_protected)

    @property
    def num_used(self) -> int:
        """Number of blocks in the table of at least one sequence."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Number of blocks whose contents are cached, whether they are used or evictable."""
        return len(self._block_by_hash)

    def lookup(self, block_hash: bytes) -> BlockId | None:
        """Return the used or evictable block whose contents have this hash."""
        return self._block_by_hash.get(block_hash)

    def get_hash(self, block: BlockId) -> bytes | None:
        """Return the hash under which `block` is cached."""
        return self._block_hashes[block]

    def ref_count(self, block: BlockId) -> int:
        """Return the reference count of `block`."""
        return self._ref_counts[block]

    def num_evictable(self, blocks: Iterable[BlockId]) -> int:
        """Return how many of `blocks` are not used by any sequence.

        When these blocks are acquired, `num_free` decreases by this number.
        """
        return sum(1 for block in blocks if self._ref_counts[block] == 0)

    def acquire(self, blocks: Iterable[BlockId]) -> None:
        """Take a reference to blocks that `lookup` returned. The contents of these blocks must not be overwritten."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del (self._evictable_protected if self._is_protected[block] else self._evictable)[block]
            self._ref_counts[block] += 1

    def protect(self, blocks: Iterable[BlockId]) -> None:
        """Mark used blocks as protected, because a second sequence has reused them."""
        for block in blocks:
            assert self._ref_counts[block] > 0
            self._is_protected[block] = self._max_protected > 0

    def touch(self, block: BlockId) -> None:
        """Mark a cached block as used, as if a sequence had acquired and freed it again."""
        self.acquire([block])
        self.free([block])

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Take a reference to `num_blocks` blocks for new contents; evict blocks if too few are empty."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks requested, {self.num_free} free"
        blocks = [self._pop_free_block() for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def cached_hashes(self) -> list[bytes]:
        """Return the hashes of all cached blocks."""
        return list(self._block_by_hash)

    def cache_block(self, block: BlockId, block_hash: bytes) -> bool:
        """Cache a used, fully computed block under the hash of its contents. Return whether it is cached now.

        If another block is already cached under this hash, that block stays cached instead of this one. The table of a
        running sequence never changes, so a duplicate is never replaced.
        """
        assert self._ref_counts[block] > 0 and self._block_hashes[block] is None
        if block_hash in self._block_by_hash:
            return False
        self._block_by_hash[block_hash] = block
        self._block_hashes[block] = block_hash
        return True

    def free(self, block_table: Sequence[BlockId]) -> None:
        """Release one reference to each block in the block table of a sequence.

        The last block is freed first and thus evicted first, because a block is useless without the blocks before it.
        """
        for block in reversed(block_table):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] > 0:
                continue
            assert self._ref_counts[block] == 0, f"block {block} was freed more often than acquired"
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
        """Check that every block is in exactly one state and that `block_tables` contain all references.

        Otherwise, raise Internal with the counts.
        """
        expected_counts = Counter(block for table in block_tables for block in table)
        mismatched = [b for b in range(self.num_blocks) if self._ref_counts[b] != expected_counts[BlockId(b)]]
        evictable = [*self._evictable, *self._evictable_protected]
        free_blocks = [*self._empty, *evictable]
        num_referenced = sum(1 for count in self._ref_counts if count > 0)
        cached = {b for b, block_hash in enumerate(self._block_hashes) if block_hash is not None}
        violations = {
            "reference counts differ from the tables": bool(mismatched),
            "a block is free twice": len(set(free_blocks)) != len(free_blocks),
            "a free block has references": any(self._ref_counts[b] for b in free_blocks),
            "blocks are missing": len(free_blocks) + num_referenced != self.num_blocks,
            "an empty block is cached": any(b in cached for b in self._empty),
            "an evictable block has no contents": any(b not in cached for b in evictable),
            "a block is in the wrong eviction queue": any(
                self._is_protected[b] for b in (*self._empty, *self._evictable)
            )
            or not all(self._is_protected[b] for b in self._evictable_protected),
            "too many blocks are protected": len(self._evictable_protected) > self._max_protected,
            "hashes and blocks do not match": cached != set(self._block_by_hash.values())
            or any(self._block_hashes[b] != block_hash for block_hash, b in self._block_by_hash.items()),
        }
        if present_violations := [violation for violation, is_violated in violations.items() if is_violated]:
            raise Internal(
                f"block pool: {'; '.join(present_violations)}: {self.num_blocks} blocks, {num_referenced} used, "
                f"{len(evictable)} evictable, {len(self._empty)} empty, {len(cached)} cached; "
                f"wrong counts at {mismatched[:8]}"
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
        if self.event_log is not None:
            self.event_log.add_removed(block_hash, self._medium)
        return block
