# SPDX-License-Identifier: Apache-2.0
"""A mirror of a prefix cache that sees only its events, as a router does."""

from collections.abc import Iterable

from quire_engine.kv_cache.block_events import BlockEvent, BlocksStored
from quire_engine.kv_cache.block_hash import BlockHasher, group_hash


class BlockMirror:
    """The keys of all blocks that are cached according to the events. Every key is computed again from its tokens."""

    def __init__(self, hasher: BlockHasher) -> None:
        self._hasher = hasher
        self.keys: set[bytes] = set()
        self._index_by_key: dict[bytes, int] = {}

    def apply(self, events: Iterable[BlockEvent]) -> None:
        for event in events:
            if not isinstance(event, BlocksStored):
                assert self.keys >= set(event.keys), "a block was removed that was not stored"
                self.keys -= set(event.keys)
                continue
            assert not self.keys & set(event.keys), "a block was stored twice"
            self.keys |= set(event.keys)
            hasher, digest, size = self._hasher, event.adapter_digest, self._hasher.block_size
            assert len(event.token_ids) == len(event.keys) * size
            first, tokens = 0, event.token_ids[:size]
            parent = hasher.root(digest, event.cache_salt)
            if event.parent_key is not None:
                first, parent = self._index_by_key[event.parent_key] + 1, event.parent_key[:32]
            if (event.parent_key is None or event.has_base_parent) and group_hash(
                hasher.extend(parent, tokens), event.group
            ) != event.keys[0]:  # the adapter starts inside of this block
                base = parent if event.parent_key else hasher.root(None, event.cache_salt)
                starts = range(max(first * size, 1), (first + 1) * size)
                parents = [hasher.switch(base, first, digest, start) for start in starts]
                [parent] = [p for p in parents if group_hash(hasher.extend(p, tokens), event.group) == event.keys[0]]
            for index, key in enumerate(event.keys):
                parent = hasher.extend(parent, event.token_ids[index * size : (index + 1) * size])
                assert key == group_hash(parent, event.group)
                self._index_by_key[key] = first + index
