# SPDX-License-Identifier: Apache-2.0
"""KV events in the format of vLLM, as structs that msgspec encodes as MessagePack.

A batch is an array. An event is a map whose key `type` contains the name of its class. The names and the meaning of all
fields are vLLM's (vllm/distributed/kv_events.py).
"""

import msgspec

ExternalHash = int
"""Identifies a block for subscribers, as an unsigned integer of 64 bits. It is derived from the hash of the block and
from the name of the adapter."""
ExtraKey = str | tuple[str, int]
"""What a block depends on besides tokens: a name or a salt, or the digest of an image and its offset."""


class _Event(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag=True):
    pass


class BlockStored(_Event, frozen=True):
    """Successive blocks were stored."""

    block_hashes: list[ExternalHash]
    parent_block_hash: ExternalHash | None
    """The block before them; None if they begin a sequence."""
    token_ids: list[int]
    """The tokens of all blocks [len(block_hashes) * block_size]."""
    block_size: int
    lora_id: int | None
    """Always None. In vLLM, it is deprecated."""
    medium: str
    lora_name: str | None
    extra_keys: list[list[ExtraKey] | None]
    """For each block: the name of the adapter, the digest of each image with the position at which it begins in the
    block, which is negative if it begins before it, and for the first block of a sequence the cache salt. None if the
    block has none of them."""
    group_idx: int
    kv_cache_spec_kind: str
    """full_attention or sliding_window."""
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(_Event, frozen=True):
    """Blocks were removed, or cannot be reached any more."""

    block_hashes: list[ExternalHash]
    medium: str
    group_idx: int


class AllBlocksCleared(_Event, frozen=True):
    """No block is stored, or it is not known which ones are."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The events of one step."""

    ts: float
    """Time at which the batch was published, in seconds since 1970."""
    events: list[WireEvent]
    data_parallel_rank: int | None = None
