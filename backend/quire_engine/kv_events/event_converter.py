# SPDX-License-Identifier: Apache-2.0
"""Converts events of the prefix cache to KV events for subscribers. Pure.

The engine knows an adapter by the digest of its content, but subscribers know it by its names. A name is an alias,
which can move to another digest. The blocks of the previous content then stay in the cache, but no request can reach
them any more. Therefore, they are announced as removed.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from quire_engine.kv_cache.block_events import BlockEvent, BlocksRemoved, BlocksStored, Medium
from quire_engine.kv_cache.block_hash import block_hash_of, group_of
from quire_engine.kv_events.wire_events import BlockRemoved, BlockStored, ExternalHash, ExtraKey, WireEvent
from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.model.kv_layout import KVLayout

_Block = tuple[bytes, Medium]


class EventConverter:
    """The names of the adapters, and the blocks of adapters that are stored."""

    def __init__(self, layout: KVLayout, block_size: int) -> None:
        self._block_size = block_size
        self._windows: Sequence[int | None] = [
            None if group < layout.num_full_groups else layout.window for group in range(layout.num_groups)
        ]
        self._names: dict[AdapterDigest, list[AdapterName]] = {}
        # Blocks of the base model are not in these mappings.
        self._digest_by_block: dict[_Block, AdapterDigest] = {}
        self._blocks_by_digest: defaultdict[AdapterDigest, dict[_Block, None]] = defaultdict(dict)

    def convert(self, events: Iterable[BlockEvent]) -> Iterator[WireEvent]:
        """Yield the KV events for the events of a step."""
        for event in events:
            yield from self._stored(event) if isinstance(event, BlocksStored) else self._removed(event)

    def set_names(self, digest_by_name: Mapping[AdapterName, AdapterDigest]) -> Iterator[WireEvent]:
        """Change the names of the adapters. Yield the removal of all blocks that lose a name."""
        names: defaultdict[AdapterDigest, list[AdapterName]] = defaultdict(list)
        for name, digest in sorted(digest_by_name.items()):
            names[digest].append(name)
        previous, self._names = self._names, dict(names)
        for digest, old_names in previous.items():
            lost = [name for name in old_names if name not in names.get(digest, ())]
            for block in self._blocks_by_digest.get(digest, ()) if lost else ():
                yield from (_removal([block[0]], name, block[1]) for name in lost)

    def clear(self) -> None:
        """Forget all blocks."""
        self._digest_by_block.clear()
        self._blocks_by_digest.clear()

    def _stored(self, event: BlocksStored) -> Iterator[BlockStored]:
        digest, window = event.adapter_digest, self._windows[event.group]
        if event.medium != "GPU" and digest is None:
            # A copy of a block that is on the device or in host memory. As in vLLM, its event has no tokens.
            key = event.keys[0]
            digest = self._digest_by_block.get((key, "GPU")) or self._digest_by_block.get((key, "CPU"))
        names: Sequence[AdapterName | None] = [None] if digest is None else self._names.get(digest, ())
        if digest is not None:
            blocks = dict.fromkeys((key, event.medium) for key in event.keys)
            self._blocks_by_digest[digest] |= blocks
            self._digest_by_block |= dict.fromkeys(blocks, digest)
        for name in names:
            parts: list[ExtraKey] = [] if name is None else [name]
            images = event.images or [[] for _ in event.keys]
            extra_keys = [[*parts, *each] for each in images]
            if event.cache_salt and not event.parent_key:
                extra_keys[0].append(event.cache_salt)
            yield BlockStored(
                [external_hash(key, name) for key in event.keys],
                None
                if event.parent_key is None
                else external_hash(event.parent_key, None if event.has_base_parent else name),
                event.token_ids,
                self._block_size,
                None,
                event.medium,
                name,
                [each or None for each in extra_keys],
                event.group,
                "full_attention" if window is None else "sliding_window",
                window,
            )

    def _removed(self, event: BlocksRemoved) -> Iterator[BlockRemoved]:
        if not self._digest_by_block:
            yield _removal(event.keys, None, event.medium)
            return
        for key in event.keys:
            digest = self._digest_by_block.pop((key, event.medium), None)
            if digest is None:
                yield _removal([key], None, event.medium)
                continue
            blocks = self._blocks_by_digest[digest]
            del blocks[key, event.medium]
            if not blocks:
                del self._blocks_by_digest[digest]
            yield from (_removal([key], name, event.medium) for name in self._names.get(digest, ()))


def external_hash(key: bytes, name: AdapterName | None) -> ExternalHash:
    """Return the hash of a block for subscribers. It does not depend on the group, which events contain separately."""
    block_hash = block_hash_of(key)
    if name is not None:
        block_hash = hashlib.sha256(block_hash + name.encode()).digest()
    return int.from_bytes(block_hash[:8], "big")


def _removal(keys: Sequence[bytes], name: AdapterName | None, medium: Medium) -> BlockRemoved:
    return BlockRemoved([external_hash(key, name) for key in keys], medium, group_of(keys[0]))
