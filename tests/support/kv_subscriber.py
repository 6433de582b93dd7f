# SPDX-License-Identifier: Apache-2.0
"""A subscriber of KV events. It decodes them with struct definitions like those of vLLM, and mirrors the blocks."""

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

# These definitions repeat vllm/distributed/kv_events.py, so that a change of ours cannot change them too.


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Base class for all KV cache-related events."""


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class BlockIndex:
    """The blocks that are stored according to the events: for each group and hash, the name and all tokens of the
    prefix."""

    def __init__(self) -> None:
        self.prefixes: dict[tuple[int | None, bytes | int], tuple[str | None, tuple[int, ...]]] = {}

    def apply(self, events: list[Any]) -> None:
        for event in events:
            match event:
                case AllBlocksCleared():
                    self.prefixes.clear()
                case BlockRemoved():
                    for block_hash in event.block_hashes:
                        self.prefixes.pop((event.group_idx, block_hash), None)
                case BlockStored():
                    self._store(event)

    def _store(self, event: BlockStored) -> None:
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        assert event.extra_keys is not None and len(event.extra_keys) == len(event.block_hashes)
        prefix: tuple[int, ...] = ()
        if event.parent_block_hash is not None:
            # A prefix whose beginning was evicted in the meantime has no known tokens.
            prefix = self.prefixes.get((event.group_idx, event.parent_block_hash), (None, (-1,)))[1]
        for index, block_hash in enumerate(event.block_hashes):
            prefix += tuple(event.token_ids[index * event.block_size : (index + 1) * event.block_size])
            self.prefixes[event.group_idx, block_hash] = event.lora_name, prefix

    def cached_tokens(self, token_ids: list[int], name: str | None = None, block_size: int = 16) -> int:
        """Return how many tokens of a prompt are cached."""
        cached = set(self.prefixes.values())
        lengths = range(block_size, len(token_ids) + 1, block_size)
        return max((n for n in lengths if (name, tuple(token_ids[:n])) in cached), default=0)


class KVSubscriber:
    """Connections to both sockets of an engine."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.subscribe(b"")
        self._replay_endpoint = replay_endpoint

    def receive(self, timeout_s: float = 10.0) -> tuple[bytes, int, KVEventBatch]:
        """Return topic, sequence number and batch of the next message."""
        assert self.socket.poll(timeout_s * 1000), "no message"
        topic, number, payload = self.socket.recv_multipart()
        return topic, struct.unpack(">Q", number)[0], decode(payload)

    def replay(self, first: int, timeout_s: float = 10.0) -> Iterator[tuple[bytes, int, KVEventBatch]]:
        """Request the batches from `first` on, and yield them."""
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.connect(self._replay_endpoint)
            dealer.send_multipart((b"", struct.pack(">Q", first)))
            while True:
                assert dealer.poll(timeout_s * 1000), "no answer"
                empty, topic, number, payload = dealer.recv_multipart()
                assert empty == b""
                if struct.unpack(">q", number)[0] == -1:
                    assert (topic, payload) == (b"", b"")
                    return
                yield topic, struct.unpack(">Q", number)[0], decode(payload)

    def close(self) -> None:
        self._context.destroy(linger=0)
