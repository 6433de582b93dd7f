# SPDX-License-Identifier: Apache-2.0
"""Stores adapters for one device.

It keeps copies of adapters in host memory, under the digest of their content. From there, it copies adapters to adapter
slots on the device. The model runner owns the store, and forwards calls of the engine core to it. The store does not
decide which adapters are in memory or in a slot. The adapter registry (`lora/registry.py`) decides this.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from quire_engine.images.support import why_no_images
from quire_engine.lora.adapter_info import AdapterInfo
from quire_engine.lora.adapter_source import AdapterSource, weighted_folders
from quire_engine.lora.device_slots import DeviceAdapterSlots, create_slots
from quire_engine.lora.peft.adapter import HostAdapter, read_adapter
from quire_engine.lora.peft.combination import combine
from quire_engine.models.base import CausalLM
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.sequence import SlotId
from quire_engine.step.plan import SlotLoad
from quire_engine.weights.score_head import ScoreHead
from quire_kernels import PackedAdapter
from quire_spec.constants import AdapterDigest
from quire_spec.engine.config import EngineConfig
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.pooler_config import PoolerConfig


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter that was read and packed."""

    packed: PackedAdapter
    info: AdapterInfo
    score: ScoreHead | None = None
    """See HostAdapter."""


class AdapterStore:
    """Reads and packs adapters, keeps them in host memory, and copies them to slots."""

    def __init__(self, slots: DeviceAdapterSlots | None, read_host_adapter: Callable[[Path], HostAdapter]) -> None:
        """Create an empty store.

        Args:
            slots: the adapter slots of the model; None if LoRA is disabled. In that case, only `discard` can be called.
            read_host_adapter: a function that reads the folder of an adapter, and checks that the adapter fits the
                model.
        """
        self.slots = slots
        self._read_host_adapter = read_host_adapter
        self._adapter_by_digest: dict[AdapterDigest, StoredAdapter] = {}
        self._score_by_slot: dict[SlotId, ScoreHead | None] = {}

    @classmethod
    def from_model(
        cls, model: CausalLM, config: EngineConfig, shape: ModelConfig, checkpoint: Path, factory: ParamFactory
    ) -> Self:
        """Create the adapter slots for a model, and the function that reads adapters for this model.

        Args:
            model: this rank's shard of the model; its modules use the slots from now on.
            config: configuration of the engine.
            shape: configuration of the whole model.
            checkpoint: folder of the base model.
            factory: dtype, device and communicator of the model.
        """
        slots = (
            create_slots(model, config, config.num_lora_pages(shape), factory.dtype, factory.device)
            if config.enable_lora
            else None
        )
        shard = None if factory.communicator is None else factory.communicator.shard
        reader = partial(read_adapter, shape=shape, max_rank=config.max_lora_rank, dtype=factory.dtype)
        reader = partial(reader, has_experts=config.lora_experts, has_vocab_modules=config.lora_modules_to_save)
        pooler = PoolerConfig.load(checkpoint, shape, config.convert, config.pooling_type)
        reader = partial(reader, has_heads=pooler is not None and pooler.task != "embed")
        reader = partial(reader, reads_images=why_no_images(config, shape, checkpoint) is None)
        norms = model.norm_sizes()
        return cls(slots, partial(reader, shard=shard, checkpoint=checkpoint, norms=norms))

    @property
    def slot_bytes(self) -> int:
        """Number of bytes that all slots use on the device."""
        return 0 if self.slots is None else self.slots.num_bytes

    @property
    def digests(self) -> frozenset[str]:
        """Content digests of the adapters in host memory."""
        return frozenset(self._adapter_by_digest)

    def read(self, source: AdapterSource) -> StoredAdapter:
        """Read an adapter's folder, or those of a sum, and pack it. Safe to call from any thread.

        Raises:
            InvalidArgument: a folder does not contain an adapter for this model, or the adapter cannot be served.
        """
        folders = weighted_folders(source)
        return self.pack(combine([(self._read_host_adapter(folder.path), folder.weight) for folder in folders]))

    def pack(self, adapter: HostAdapter) -> StoredAdapter:
        """Convert an adapter to the memory layout of the slots. Safe to call from any thread."""
        assert self.slots is not None
        packed = self.slots.pack(adapter)
        invocation, not_combinable = adapter.invocation_tokens, adapter.not_combinable
        num_pages = self.slots.count_pages(packed)
        num_bytes = packed.num_bytes + (0 if adapter.score is None else adapter.score.num_bytes)
        info = AdapterInfo(num_bytes, adapter.rank, invocation, not_combinable, num_pages)
        return StoredAdapter(packed, info, adapter.score)

    def score(self, adapter_slot: SlotId | None) -> ScoreHead | None:
        """Return the head of a classifier of the adapter in a slot; None if it has none."""
        return None if adapter_slot is None else self._score_by_slot.get(adapter_slot)

    def store(self, adapter_digest: AdapterDigest, adapter: StoredAdapter) -> None:
        """Keep an adapter in host memory, under the digest of its content."""
        self._adapter_by_digest[adapter_digest] = adapter

    def discard(self, adapter_digest: AdapterDigest) -> None:
        """Remove an adapter from host memory. Unknown digests are ignored.

        If a slot contains the adapter, the adapter stays in the slot.
        """
        self._adapter_by_digest.pop(adapter_digest, None)

    def load_slot(self, slot_load: SlotLoad) -> Callable[[], None]:
        """Return a function that copies an adapter into a slot.

        The function uses the copy of the adapter that is in host memory when `load_slot` is called. See `ModelRunner`.
        """
        assert self.slots is not None
        stored = self._adapter_by_digest[slot_load.adapter_digest]
        self._score_by_slot[slot_load.adapter_slot] = stored.score
        return self.slots.copy_to_slot(stored.packed, slot_load.adapter_slot, slot_load.first_page)
