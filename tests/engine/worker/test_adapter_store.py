# SPDX-License-Identifier: Apache-2.0
"""The adapter store: host copies by digest, and slots that contain exactly the adapter loaded last."""

import dataclasses

import pytest
from support.single_steps import CONFIG

from quire_engine.lora.adapter_info import AdapterInfo
from quire_engine.sequence import SlotId
from quire_engine.step.plan import SlotLoad
from quire_engine.worker.adapter_store import AdapterStore, StoredAdapter
from quire_engine.worker.model_runner import DeviceModelRunner


class _FakeSlots:
    """Packs an adapter as a string and records copies to slots."""

    num_bytes = 100

    def __init__(self):
        self.copies = []

    def pack(self, adapter):
        return f"packed {adapter}"

    def copy_to_slot(self, packed_adapter, adapter_slot, first_page):
        return lambda: self.copies.append((packed_adapter, adapter_slot, first_page))


@pytest.fixture
def store():
    return AdapterStore(_FakeSlots(), lambda path: path)


def test_load_copies_the_host_copy_of_the_time_of_the_call(store):
    store.store("d0", StoredAdapter("first", AdapterInfo()))
    copy_to_slot = store.load_slot(SlotLoad("d0", SlotId(3), 40))
    store.store("d0", StoredAdapter("second", AdapterInfo()))
    store.discard("d0")
    assert store.slots.copies == []
    copy_to_slot()
    assert store.slots.copies == [("first", 3, 40)]


def test_model_without_lora_has_no_slots(llama_folder, llama_shape):
    runner = DeviceModelRunner(dataclasses.replace(CONFIG, enable_lora=False), llama_shape, llama_folder)
    assert runner.adapter_store.slots is None and runner.memory.lora_bytes == 0
