# SPDX-License-Identifier: Apache-2.0
"""Adapter slots of a model, filled from host copies. Which adapter goes where is the registry's business (adapters.py);
what an adapter is, peft.py's; how it lies in memory, quire_kernels'."""

from collections.abc import Callable, Sequence

import torch

from quire_engine.lora.peft.adapter import NO_LAYER, HostAdapter
from quire_engine.models.base import CausalLM
from quire_kernels import LoRASlots, LoRATarget, PackedAdapter
from quire_spec.engine.config import EngineConfig

ModuleKey = tuple[int, str]
"""A module that adapters change, by its layer and its name there."""


class DeviceAdapterSlots:
    """The slots on the device, and the host copies that fill them."""

    def __init__(self, module_keys: Sequence[Sequence[ModuleKey]], slots: LoRASlots, device: torch.device) -> None:
        """`places`: of each of the slots' modules, the place of each slice; `device`: of the slots. A GPU copies from
        pinned memory, while it computes."""
        self._module_keys = tuple(tuple(slices) for slices in module_keys)
        self._slots = slots
        self._device = device
        # One for all loads: torch hands out 32 in turn, so that one for each would in time be that on which tokens go
        # to the host, and they would wait behind an adapter. It would also keep memory on each of them.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots on the device."""
        return self._slots.num_bytes

    def pack(self, adapter: HostAdapter) -> PackedAdapter:
        """An adapter as `hold` keeps it, for any thread."""
        packed_adapter = self._slots.pack(
            [[adapter.pairs.get(module_key) for module_key in slices] for slices in self._module_keys]
        )
        return packed_adapter if self._stream is None else packed_adapter.pin_memory()

    def copy_to_slot(self, packed_adapter: PackedAdapter, adapter_slot: int) -> Callable[[], None]:
        """The work of copying an adapter from host memory into a slot, for any thread.

        On a GPU it is done on a stream for loads alone, which waits for the work that is queued now (a step may still
        read what is in the slot) and holds up none that is queued later. When it returns, the copy is there.
        """
        queued_work = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()
        return lambda: self._copy(adapter_slot, packed_adapter, queued_work)

    @torch.inference_mode()
    def _copy(self, adapter_slot: int, adapter: PackedAdapter, queued_work: "torch.cuda.Event | None") -> None:
        if self._stream is None or queued_work is None:
            self._slots.write(adapter_slot, adapter)
            return
        # Within it, its device is current: a new thread's is the first one, whichever its process uses.
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(queued_work)
            self._slots.write(adapter_slot, adapter)
        self._stream.synchronize()


def create_slots(model: CausalLM, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> DeviceAdapterSlots:
    """Slots for every module of a model that adapters change; the modules know them from then on."""
    linears = list(model.linears())
    sites = [LoRATarget(linear.in_features, tuple(linear.slices.values())) for _, linear in linears]
    module_keys = [[(layer, name) for name in linear.slices] for layer, linear in linears]
    vocab_size, embedding_size = model.embed_tokens.shape
    # In the order in which a step computes them.
    sites = [
        LoRATarget(vocab_size, (embedding_size,), is_embedding=True),
        *sites,
        LoRATarget(embedding_size, (vocab_size,)),
    ]
    module_keys = [[(NO_LAYER, "embed_tokens")], *module_keys, [(NO_LAYER, "lm_head")]]
    slots = LoRASlots(sites, config.max_loras, config.max_lora_rank, torch.empty(0, dtype=dtype, device=device))
    modules = list(slots.modules)
    model.embedding_adapters, model.lm_head.adapters = modules.pop(0), modules.pop()
    for (_, linear), module in zip(linears, modules, strict=True):
        linear.adapters = module
    return DeviceAdapterSlots(module_keys, slots, device)
