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

    def apply(self, events: Iterable[BlockEvent]) -> None:
        for event in events:
            if not isinstance(event, BlocksStored):
                assert self.keys >= set(event.keys), "a block was removed that was not stored"
                self.keys -= set(event.keys)
                continue
            assert not self.keys & set(event.keys), "a block was stored twice"
            self.keys |= set(event.keys)
            parent = event.parent_key and event.parent_key[:32]
            parent = parent or self._hasher.root(event.adapter_digest, event.cache_salt)
            size = self._hasher.block_size
            assert len(event.token_ids) == len(event.keys) * size
            for index, key in enumerate(event.keys):
                parent = self._hasher.extend(parent, event.token_ids[index * size : (index + 1) * size])
                assert key == group_hash(parent, event.group)
