# SPDX-License-Identifier: Apache-2.0
"""An adapter of random matrices on every module of a runner that takes any, embedding and output projection among
them, made without a file."""

import torch

from quire_engine.lora.peft.adapter import HostAdapter
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_kernels import PackedAdapter


def random_adapter(runner: DeviceModelRunner, lora_rank: int, generator: torch.Generator) -> PackedAdapter:
    """Large enough that it changes what is generated."""
    slots, pairs = runner.adapter_store.slots, {}
    assert slots is not None
    for places, module in zip(slots._module_keys, slots._slots.modules, strict=True):
        for place, width in zip(places, module.target.widths, strict=True):
            a = torch.randn(lora_rank, module.target.in_features, generator=generator)
            pairs[place] = a / 4, torch.randn(width, lora_rank, generator=generator) / 4
    return runner.adapter_store.pack(HostAdapter(lora_rank, pairs))
