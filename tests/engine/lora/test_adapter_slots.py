# SPDX-License-Identifier: Apache-2.0
"""Copies of adapters into slots of a GPU run after the queued steps, on a stream only for loads."""

from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

import torch

from quire_engine.lora.device_slots import DeviceAdapterSlots


class _Cuda:
    """Fake of torch.cuda, which has no streams without a GPU. `calls` records what was done, in order."""

    def __init__(self):
        self.calls = []
        self._numbers, self._events = count(), count()

    def Stream(self, device):
        name = f"stream {next(self._numbers)} of {device}"
        return SimpleNamespace(
            name=name,
            wait_event=lambda event: self.calls.append((name, "waits for", event)),
            synchronize=lambda: self.calls.append((name, "is waited for")),
        )

    def current_stream(self, device):
        return SimpleNamespace(record_event=lambda: f"event {next(self._events)}")

    @contextmanager
    def stream(self, stream):
        self.calls.append((stream.name, "begins"))
        yield
        self.calls.append((stream.name, "ends"))


def test_gpu_loads_share_a_stream_and_wait_for_queued_work(monkeypatch):
    cuda = _Cuda()
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    slots = SimpleNamespace(write=lambda slot, adapter: cuda.calls.append((adapter, "in", slot)))
    device_slots = DeviceAdapterSlots([], slots, torch.device("cuda", 1))
    loads = [device_slots.copy_to_slot("adapter a", 3), device_slots.copy_to_slot("adapter b", 0)]
    # A copy waits for the work queued when it was requested, and not for later work.
    assert cuda.calls == []
    for load in loads:
        load()
    stream = "stream 0 of cuda:1"
    assert cuda.calls == [
        call
        for event, adapter, slot in (("event 0", "adapter a", 3), ("event 1", "adapter b", 0))
        for call in (
            (stream, "begins"),
            (stream, "waits for", event),
            (adapter, "in", slot),
            (stream, "ends"),
            (stream, "is waited for"),
        )
    ]
