# SPDX-License-Identifier: Apache-2.0
"""Adapter slots of a model on the device, filled from host copies.

The registry decides which adapter goes into which slot, `lora.peft` reads adapters, and quire_kernels defines the
memory layout of slots. `worker.adapter_store` keeps the host copies and calls this module.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from quire_engine.lora.peft.adapter import HostAdapter
from quire_engine.lora.peft.lora_module import NO_LAYER
from quire_engine.models.base import CausalLM
from quire_kernels import LoRAPair, LoRASlots, LoRATarget, PackedAdapter
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import InvalidArgument
from quire_spec.model.memory_sizing import vocab_module_rank

ModuleKey = tuple[int, str]
"""Key of a module that adapters can change: the number of the layer, and the name of the module in the layer."""


class DeviceAdapterSlots:
    """The adapter slots on the device."""

    def __init__(self, module_keys: Sequence[Sequence[ModuleKey]], slots: LoRASlots, device: torch.device) -> None:
        """Wrap the slots of a model.

        Args:
            module_keys: for each module of `slots`, the keys of its slices.
            device: device of the slots. A GPU copies from pinned memory while it computes.
        """
        self._module_keys = tuple(tuple(slices) for slices in module_keys)
        self._slots = slots
        self._device = device
        # All loads use one stream. torch reuses 32 streams in turn. If each load had its own stream, a load could get
        # the stream that copies tokens to the host, and would delay the tokens. Each stream would also keep memory.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots on the device."""
        return self._slots.num_bytes

    def pack(self, adapter: HostAdapter) -> PackedAdapter:
        """Convert an adapter to the form that `copy_to_slot` requires. Safe to call from any thread.

        Raises:
            InvalidArgument: the adapter needs more pages than all slots have together.
        """
        modules = zip(self._module_keys, self._slots.modules, strict=True)
        packed_adapter = self._slots.pack(
            [
                [
                    _pad_outputs(adapter.pairs.get(key), width)
                    for key, width in zip(keys, module.target.widths, strict=True)
                ]
                for keys, module in modules
            ],
            [[adapter.transforms.get(key) for key in slices] for slices in self._module_keys],
        )
        if (num_pages := self._slots.count_pages(packed_adapter)) > self._slots.num_pages:
            raise InvalidArgument(
                f"the adapter needs {num_pages} pages of LoRA rank with its magnitudes, biases and norms, and all "
                f"slots have {self._slots.num_pages}; raise max_loaded_lora_ranks (spec.lora.maxLoadedRanks)"
            )
        return packed_adapter if self._stream is None else packed_adapter.pin_memory()

    def count_pages(self, packed_adapter: PackedAdapter) -> int:
        """Return how many pages an adapter needs."""
        return self._slots.count_pages(packed_adapter)

    def copy_to_slot(self, packed_adapter: PackedAdapter, adapter_slot: int, first_page: int) -> Callable[[], None]:
        """Return a function that copies an adapter from host memory into a slot, whose pages begin at `first_page`; any
        thread can call it.

        On a GPU the copy runs on a separate stream. This stream waits for the work that is already queued, because a
        step may still read the slot. The copy does not delay work that is queued later. When the function returns, the
        copy is done.
        """
        queued_work = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()
        return lambda: self._copy(adapter_slot, first_page, packed_adapter, queued_work)

    @torch.inference_mode()
    def _copy(self, slot: int, first_page: int, adapter: PackedAdapter, queued_work: "torch.cuda.Event | None") -> None:
        if self._stream is None or queued_work is None:
            self._slots.write(slot, adapter, first_page)
            return
        # The context also sets the current device. Without it, a new thread would use the first device.
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(queued_work)
            self._slots.write(slot, adapter, first_page)
        self._stream.synchronize()


def _pad_outputs(pair: LoRAPair | None, width: int) -> LoRAPair | None:
    """Add output features of 0, because routers are padded to the panels of compiled kernels."""
    return (
        pair
        if pair is None or pair[1].shape[-2] == width
        else (pair[0], F.pad(pair[1], (0, 0, 0, width - len(pair[1]))))
    )


def create_slots(
    model: CausalLM, config: EngineConfig, num_pages: int, dtype: torch.dtype, device: torch.device
) -> DeviceAdapterSlots:
    """Create slots for every module that adapters can change, and attach them to the modules. All tensor-parallel ranks
    have `num_pages` pages, in which an adapter has the same place on each rank."""
    sites = [each for each in model.adapter_sites() if config.lora_experts or not each[1].num_experts]
    module_keys = [[(layer, name) for name in site.slices] for layer, site in sites]
    vocab_size, embedding_size = model.embed_tokens.shape
    has_outer_parts = model.shape.has_outer_parts
    vocab_rank = config.max_lora_rank + (vocab_module_rank(model.shape) if config.lora_modules_to_save else 0)
    norms = dict(model.norms())
    # The linears are in the order in which a step computes them.
    embedding = LoRATarget(vocab_size, (embedding_size,), is_embedding=True, max_rank=vocab_rank)
    lm_head = LoRATarget(embedding_size, (vocab_size,), max_rank=vocab_rank)
    targets = [
        *([embedding] if has_outer_parts else []),
        *(
            LoRATarget(s.in_features, tuple(s.slices.values()), num_experts=s.num_experts, is_absorbed=s.is_absorbed)
            for _, s in sites
        ),
        *([lm_head] if has_outer_parts else []),
        *(LoRATarget(0, (norm.size,), is_norm=True) for norm in norms.values()),
    ]
    outer_names = [*(["lm_head"] if has_outer_parts else []), *norms]
    embedding_keys = [[(NO_LAYER, "embed_tokens")]] if has_outer_parts else []
    module_keys = [*embedding_keys, *module_keys, *([(NO_LAYER, name)] for name in outer_names)]
    like = torch.empty(0, dtype=dtype, device=device)
    slots = LoRASlots(targets, config.max_loras, config.max_lora_rank, like, num_pages)
    modules = iter(slots.modules)
    model.embedding_adapters = next(modules) if has_outer_parts else None
    for part in (*(site for _, site in sites), *([model.lm_head] if has_outer_parts else []), *norms.values()):
        part.adapters = next(modules)
    model.adapted_norms, model.eager_slots = tuple(norms.values()), slots.eager_slots
    return DeviceAdapterSlots(module_keys, slots, device)
