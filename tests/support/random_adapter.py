# SPDX-License-Identifier: Apache-2.0
"""A random adapter for every module of a runner, including embedding and output projection, created without files."""

import torch

from quire_engine.lora.peft.adapter import HostAdapter
from quire_engine.worker.adapter_store import StoredAdapter
from quire_engine.worker.model_runner import DeviceModelRunner


def random_adapter(runner: DeviceModelRunner, lora_rank: int, generator: torch.Generator) -> StoredAdapter:
    """Return an adapter large enough to change the generated tokens."""
    slots, pairs = runner.adapter_store.slots, {}
    assert slots is not None
    for module_keys, module in zip(slots._module_keys, slots._slots.modules, strict=True):
        for module_key, width in () if module.target.is_norm else zip(module_keys, module.target.widths, strict=True):
            a = torch.randn(lora_rank, module.target.in_features, generator=generator)
            pairs[module_key] = a / 4, torch.randn(width, lora_rank, generator=generator) / 4
    return runner.adapter_store.pack(HostAdapter(lora_rank, pairs))
