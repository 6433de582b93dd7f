# SPDX-License-Identifier: Apache-2.0
"""How an adapter comes into a slot of a GPU: behind the steps that are queued, on a stream for loads alone."""

from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

import torch

from quire_engine.lora.device_slots import DeviceAdapterSlots


class _Cuda:
    """What loads use of torch.cuda, which has no streams without a GPU; `seen`: what was done, in order."""

    def __init__(self):
        self.seen = []
        self._numbers, self._events = count(), count()

    def Stream(self, device):
        name = f"stream {next(self._numbers)} of {device}"
        return SimpleNamespace(
            name=name,
            wait_event=lambda event: self.seen.append((name, "waits for", event)),
            synchronize=lambda: self.seen.append((name, "is waited for")),
        )

    def current_stream(self, device):
        return SimpleNamespace(record_event=lambda: f"event {next(self._events)}")

    @contextmanager
    def stream(self, stream):
        self.seen.append((stream.name, "begins"))
        yield
        self.seen.append((stream.name, "ends"))


def test_loads_of_a_gpu_share_a_stream_and_wait_for_what_is_queued(monkeypatch):
    cuda = _Cuda()
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    slots = SimpleNamespace(write=lambda slot, adapter: cuda.seen.append((adapter, "in", slot)))
    made = DeviceAdapterSlots([], slots, torch.device("cuda", 1))
    loads = [made.copy_to_slot("adapter a", 3), made.copy_to_slot("adapter b", 0)]
    # A copy waits for the steps queued when it was requested, and not for later ones.
    assert cuda.seen == []
    for load in loads:
        load()
    own = "stream 0 of cuda:1"
    assert cuda.seen == [
        step
        for event, adapter, slot in (("event 0", "adapter a", 3), ("event 1", "adapter b", 0))
        for step in (
            (own, "begins"),
            (own, "waits for", event),
            (adapter, "in", slot),
            (own, "ends"),
            (own, "is waited for"),
        )
    ]
