# SPDX-License-Identifier: Apache-2.0
"""Events of the prefix cache: which full blocks were cached, and which cached blocks were evicted.

The block pool and the prefix cache record them in a log, in the order in which they happen, but only if the pool has a
log. The owner of the engine takes the events after each step: other processes and other machines learn from them which
prompts this engine has cached.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from quire_engine.kv_cache.block_hash import group_of
from quire_spec.constants import AdapterDigest
from quire_spec.protocol.messages import BlockChanges

Medium = Literal["GPU", "CPU", "STORAGE"]
"""Where a block is: in the memory of the device that computes, in host memory, or in a folder. The words are vLLM's."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Successive full blocks of one group of layers that were cached."""

    keys: list[bytes]
    """The hash of each block; see PrefixCache. The hash of a block in group 0 has 32 bytes."""
    parent_key: bytes | None
    """The hash of the block before them in the same group; None if they begin the sequence."""
    token_ids: list[int]
    """The tokens of all blocks [len(keys) * block_size]."""
    adapter_digest: AdapterDigest | None = None
    cache_salt: str | None = None
    group: int = 0
    medium: Medium = "GPU"
    images: list[list[tuple[str, int]]] = field(default_factory=list)
    """The images of each block: the digest in hexadecimal, and the position of its first token minus that of the first
    token of the block. Empty if nothing is known about them."""
    has_base_parent: bool = False
    """Whether the adapter does not apply to the parent, which is a block of the base model."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Cached blocks that were evicted."""

    keys: list[bytes]
    group: int = 0
    medium: Medium = "GPU"


BlockEvent = BlocksStored | BlocksRemoved


@dataclass(slots=True)
class BlockEventLog:
    """The events that `pop` has not returned yet. Blocks that follow each other are collected in one event."""

    _events: list[BlockEvent] = field(default_factory=list)

    def add_stored(self, block: BlocksStored) -> None:
        """Record that one block was cached."""
        last = self._events[-1] if self._events else None
        # A block that has the last key as its parent has the same group and salt.
        if (
            isinstance(last, BlocksStored)
            and last.keys[-1] == block.parent_key
            and (last.medium, last.adapter_digest) == (block.medium, block.adapter_digest)
        ):
            last.keys.extend(block.keys)
            last.token_ids.extend(block.token_ids)
            last.images.extend(block.images)
        else:
            self._events.append(block)

    def add_removed(self, key: bytes, medium: Medium = "GPU") -> None:
        """Record that a block was evicted."""
        last, group = self._events[-1] if self._events else None, group_of(key)
        if isinstance(last, BlocksRemoved) and (last.group, last.medium) == (group, medium):
            last.keys.append(key)
        else:
            self._events.append(BlocksRemoved([key], group, medium))

    def pop(self) -> list[BlockEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events


def block_changes(events: Sequence[BlockEvent]) -> BlockChanges | None:
    """Return which blocks of group 0 entered and left the memory of the device; None if there are none.

    A prompt can be found in the cache only as far as its blocks of group 0 are cached, because this group has no
    sliding window unless all groups have one.
    """
    is_cached: dict[bytes, bool] = {}
    for event in events:
        if event.group == 0 and event.medium == "GPU":
            is_cached |= dict.fromkeys(event.keys, isinstance(event, BlocksStored))
    if not is_cached:
        return None
    return BlockChanges([k for k, cached in is_cached.items() if cached], [k for k, c in is_cached.items() if not c])
