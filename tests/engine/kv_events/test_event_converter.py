# SPDX-License-Identifier: Apache-2.0
"""For any order of events and aliases, a subscriber knows exactly the blocks that requests can reach."""

from collections.abc import Iterable

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.kv_subscriber import BlockIndex, BlockStored, decode

from quire_engine.kv_cache.block_events import BlockEvent, BlockEventLog, BlocksRemoved, BlocksStored
from quire_engine.kv_cache.block_hash import BlockHasher, group_hash
from quire_engine.kv_cache.block_pool import BlockPool
from quire_engine.kv_cache.host_cache import HostCache
from quire_engine.kv_cache.prefix_cache import PrefixCache
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.kv_events.event_converter import EventConverter
from quire_engine.kv_events.wire_events import EventBatch, WireEvent
from quire_engine.sequence import Sequence
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.model.kv_layout import KVLayout
from quire_spec.protocol.messages import ImageInput

HASHER = BlockHasher("m", "float32", 4, "float32")
LAYOUT = KVLayout(1, (0, 1), (0, 0), 2, 1, 5)
NAMES, DIGESTS = "ab", ("d1", "d2")


def as_seen(events: Iterable[WireEvent]) -> list:
    """Return events after they were encoded by us and decoded by vLLM's definitions."""
    return decode(msgspec.msgpack.encode(EventBatch(0.0, list(events), 0))).events


def stored(word: list[int], digest: str | None = None, salt: str | None = None, group: int = 0) -> BlocksStored:
    """Return the event for a sequence of blocks, each filled with one number."""
    keys, parent = [], HASHER.root(digest, salt)
    for number in word:
        parent = HASHER.extend(parent, [number] * 4)
        keys.append(group_hash(parent, group))
    return BlocksStored(keys, None, [n for number in word for n in [number] * 4], digest, salt, group)


def test_blocks_of_an_adapter_follow_those_of_the_base_model_before_its_invocation():
    converter, base = EventConverter(LAYOUT, 4), stored([1, 2])
    list(converter.set_names({"a": "d1"}))
    parent = HASHER.switch(base.keys[-1], 2, "d1", 9)
    invoked = [HASHER.extend(parent, [3] * 4)]
    invoked.append(HASHER.extend(invoked[0], [4] * 4))
    events = as_seen(
        converter.convert(
            [
                base,
                BlocksStored(invoked[:1], base.keys[-1], [3] * 4, "d1", has_base_parent=True),
                BlocksStored(invoked[1:], invoked[0], [4] * 4, "d1"),
            ]
        )
    )
    assert [event.lora_name for event in events] == [None, "a", "a"]
    assert events[1].parent_block_hash == events[0].block_hashes[-1]
    assert events[2].parent_block_hash == events[1].block_hashes[-1]


class ConverterMachine(RuleBasedStateMachine):
    """Blocks of two adapters and of the base model, while two names move between the adapters."""

    @initialize()
    def start(self) -> None:
        self.converter = EventConverter(LAYOUT, 4)
        self.index = BlockIndex()
        self.names: dict[str, str] = {}
        # Cached blocks by key: adapter, tokens and group.
        self.cached: dict[bytes, tuple[str | None, tuple[int, ...], int]] = {}
        # What a subscriber must know. An adapter's blocks are announced only under the names that it has when they are
        # stored.
        self.announced: set[tuple[int, str | None, tuple[int, ...]]] = set()

    def apply(self, events: list[BlockEvent]) -> None:
        self.index.apply(as_seen(self.converter.convert(events)))

    @rule(
        word=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        digest=st.sampled_from([None, *DIGESTS]),
        group=st.integers(0, 1),
    )
    def store(self, word: list[int], digest: str | None, group: int) -> None:
        event = stored(word, digest, None, group)
        first = next((i for i, key in enumerate(event.keys) if key not in self.cached), len(word))
        new_keys = event.keys[first:]
        if not new_keys or any(key in self.cached for key in new_keys):
            # The engine stores each run of new blocks separately.
            return
        parent = event.keys[first - 1] if first else None
        self.apply([BlocksStored(new_keys, parent, event.token_ids[4 * first :], digest, None, group)])
        names = [None] if digest is None else [name for name, d in self.names.items() if d == digest]
        for i, key in enumerate(new_keys, first + 1):
            tokens = tuple(event.token_ids[: 4 * i])
            self.cached[key] = digest, tokens, group
            self.announced |= {(group, name, tokens) for name in names}

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.cached:
            key = data.draw(st.sampled_from(sorted(self.cached)))
            digest, tokens, group = self.cached.pop(key)
            self.apply([BlocksRemoved([key], group)])
            names = [None] if digest is None else [name for name, d in self.names.items() if d == digest]
            self.announced -= {(group, name, tokens) for name in names}

    @rule(names=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(DIGESTS)))
    def rename(self, names: dict[str, str]) -> None:
        self.index.apply(as_seen(self.converter.set_names(names)))
        lost = {name for name, digest in self.names.items() if names.get(name) != digest}
        self.announced = {block for block in self.announced if block[1] not in lost}
        self.names = names

    @invariant()
    def subscriber_knows_the_blocks(self) -> None:
        known = [(group, *prefix) for (group, _), prefix in self.index.prefixes.items()]
        assert len(known) == len(self.announced)
        # The beginning of a block is not known if it was stored while the adapter had another name.
        assert {block for block in known if -1 not in block[2]} <= self.announced
        assert {block for block in known if block[1] is None} == {b for b in self.announced if b[1] is None}


TestConverterMachine = ConverterMachine.TestCase
TestConverterMachine.settings = settings(max_examples=80, stateful_step_count=30)


def test_fields_are_those_of_vllm() -> None:
    converter = EventConverter(LAYOUT, 4)
    list(converter.set_names({"pirate": "d1", "privateer": "d1"}))
    events = as_seen(converter.convert([stored([1, 2], "d1", "salt", 1), stored([3])]))
    assert all(isinstance(event, BlockStored) for event in events)
    first, second, base = events
    assert (first.lora_name, second.lora_name, base.lora_name) == ("pirate", "privateer", None)
    assert first.extra_keys == [("pirate", "salt"), ("pirate",)] and base.extra_keys == [None]
    assert (first.group_idx, first.kv_cache_spec_kind, first.kv_cache_spec_sliding_window) == (1, "sliding_window", 5)
    assert (base.group_idx, base.kv_cache_spec_kind, base.kv_cache_spec_sliding_window) == (0, "full_attention", None)
    assert (base.medium, base.block_size, base.lora_id, base.token_ids) == ("GPU", 4, None, [3] * 4)
    hashes = [block_hash for event in events for block_hash in event.block_hashes]
    assert len(set(hashes)) == 5 and all(0 <= block_hash < 2**64 for block_hash in hashes)


def test_blocks_name_their_images() -> None:
    """As in vLLM: the digest, and the offset of the image from the start of the block."""
    pool = BlockPool(4)
    pool.event_log = BlockEventLog()
    cache = PrefixCache(pool, HASHER, KVLayout(), True, HostCache(SwapCosts(), 4, False))
    images = (ImageInput(2, 3, b"\x01" * 32, (0, 0)), ImageInput(5, 1, b"\x02" * 32, (0, 0)))
    sequence = Sequence(0, [7] * 16, SamplingParams(), seed=0, max_output_tokens=1, cache_salt="salt", images=images)
    sequence.block_table, sequence.num_computed_tokens = pool.allocate(4), 12
    cache.cache_full_blocks(sequence)
    (event,) = as_seen(EventConverter(KVLayout(), 4).convert(pool.event_log.pop()))
    first, second = "01" * 32, "02" * 32
    assert event.extra_keys == [([first, 2], "salt"), ([first, -2], [second, 1]), None]


def test_blocks_of_an_alias_are_removed_when_it_moves() -> None:
    converter = EventConverter(KVLayout(), 4)
    index = BlockIndex()
    index.apply(as_seen(converter.set_names({"sql": "d1"})))
    index.apply(as_seen(converter.convert([stored([1, 2], "d1"), stored([7])])))
    assert index.cached_tokens([1] * 4 + [2] * 4, "sql", 4) == 8
    index.apply(as_seen(converter.set_names({"sql": "d2"})))
    assert index.cached_tokens([1] * 4, "sql", 4) == 0 and index.cached_tokens([7] * 4, None, 4) == 4
    # The engine evicts the old blocks later, which subscribers do not see any more.
    assert as_seen(converter.convert([BlocksRemoved(stored([1, 2], "d1").keys)])) == []


def test_copies_in_host_memory_have_the_hash_of_the_block_on_the_device() -> None:
    converter = EventConverter(KVLayout(), 4)
    list(converter.set_names({"sql": "d1"}))
    block = stored([1], "d1")
    (on_device,) = as_seen(converter.convert([block]))
    (copy,) = as_seen(converter.convert([BlocksStored(block.keys, None, [], medium="CPU")]))
    assert (copy.block_hashes, copy.lora_name, copy.medium) == (on_device.block_hashes, "sql", "CPU")
    # The copy outlives the block on the device.
    assert [e.medium for e in as_seen(converter.convert([BlocksRemoved(block.keys)]))] == ["GPU"]
    # The file is written from that copy, and outlives it.
    (file,) = as_seen(converter.convert([BlocksStored(block.keys, None, [], medium="STORAGE")]))
    assert (file.block_hashes, file.lora_name, file.medium) == (on_device.block_hashes, "sql", "STORAGE")
    for medium in ("CPU", "STORAGE"):
        (removed,) = as_seen(converter.convert([BlocksRemoved(block.keys, medium=medium)]))
        assert (removed.block_hashes, removed.medium) == (on_device.block_hashes, medium)
    # A file of an earlier process is read for a request with the adapter.
    (read,) = as_seen(converter.convert([BlocksStored(block.keys, None, [], "d1", medium="CPU")]))
    assert (read.block_hashes, read.lora_name) == (on_device.block_hashes, "sql")
