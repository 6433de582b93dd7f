# SPDX-License-Identifier: Apache-2.0
"""The adapter store: host copies by digest, and slots that contain exactly the adapter loaded last."""

import dataclasses

import pytest
from support.single_steps import CONFIG, random_prompt, run_prompt
from support.tiny_checkpoints import make_adapter

from quire_engine.sequence import SlotId
from quire_engine.step.plan import SlotLoad
from quire_engine.worker.adapter_store import AdapterStore
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_spec.model.memory_sizing import lora_slot_bytes


class _FakeSlots:
    """Packs an adapter as a string and records copies to slots."""

    num_bytes = 100

    def __init__(self):
        self.copies = []

    def pack(self, adapter):
        return f"packed {adapter}"

    def copy_to_slot(self, packed_adapter, adapter_slot):
        return lambda: self.copies.append((packed_adapter, adapter_slot))


@pytest.fixture
def store():
    return AdapterStore(_FakeSlots(), lambda path: path)


def test_read_packs_for_the_slots(store):
    assert store.read("d0") == "packed d0"
    assert store.slot_bytes == 100 and store.digests == set()


def test_load_copies_the_host_copy_of_the_time_of_the_call(store):
    store.store("d0", "first")
    copy_to_slot = store.load_slot(SlotLoad("d0", SlotId(3)))
    store.store("d0", "second")
    store.discard("d0")
    assert store.slots.copies == []
    copy_to_slot()
    assert store.slots.copies == [("first", 3)]


def test_discard_ignores_unknown_digests(store):
    store.store("d0", "packed")
    store.discard("other")
    assert store.digests == {"d0"}
    store.discard("d0")
    assert store.digests == set()
    AdapterStore(None, lambda path: path).discard("d0")


def test_model_without_lora_has_no_slots(llama_folder, llama_shape):
    runner = DeviceModelRunner(dataclasses.replace(CONFIG, enable_lora=False), llama_shape, llama_folder)
    assert runner.adapter_store.slots is None and runner.memory.lora_bytes == 0


def test_slot_contains_the_adapter_loaded_last(llama_folder, llama_shape, tmp_path):
    runner = DeviceModelRunner(CONFIG, llama_shape, llama_folder)
    assert runner.adapter_store.slot_bytes == runner.memory.lora_bytes == 2 * lora_slot_bytes(llama_shape, 8, 4)
    for seed in range(3):
        packed_adapter = runner.read_adapter(make_adapter(llama_folder, tmp_path / str(seed), seed=seed))
        assert runner.host_bytes(packed_adapter) > 0
        runner.store_adapter(f"d{seed}", packed_adapter)
    digests, prompt = ("d0", "d1", "d2"), random_prompt(20)

    def first_token(slot, *loads):
        return run_prompt(runner, prompt, slot, loads).token_ids

    tokens = [first_token(0, (digest, 0)) for digest in digests]
    assert [first_token(1, (digest, 1)) for digest in digests] == tokens
    # Discarding a host copy does not change the slots.
    runner.discard_adapter("d2")
    assert first_token(1) == first_token(0) == tokens[2]
    assert first_token(1, ("d0", 1)) == tokens[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smaller_adapter_overwrites_a_larger_one_completely(dtype, llama_folder, llama_shape, tmp_path):
    runner = DeviceModelRunner(dataclasses.replace(CONFIG, dtype=dtype), llama_shape, llama_folder)
    for name, config in {"large": {}, "small": {"r": 1, "target_modules": ["v_proj"]}}.items():
        runner.store_adapter(name, runner.read_adapter(make_adapter(llama_folder, tmp_path / name, **config)))
    prompt = random_prompt(30)

    def logprobs(name):
        return run_prompt(runner, prompt, 0, [(name, 0)], logprobs=20).logprobs

    in_empty_slot = logprobs("small")
    assert logprobs("large") != in_empty_slot
    assert logprobs("small") == in_empty_slot
