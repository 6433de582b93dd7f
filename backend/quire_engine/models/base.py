# SPDX-License-Identifier: Apache-2.0
"""Base class of all models: the interface that the model runner uses.

`weights/loader.py` fills the parameters; the model runner builds the batches.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import AdapterSite, Linear, ParamFactory
from quire_engine.models.layers.module import Module
from quire_engine.models.layers.norm import Norm, find_norms
from quire_engine.models.layers.vocab_parallel import build_lm_head, embedding_shard, num_vocab_rows, parallel_embedding
from quire_engine.weights.loader import load_weights
from quire_engine.weights.param_shard import LoadTarget
from quire_engine.weights.quantized.quantized_tensors import QuantizedTensors
from quire_kernels import HugePageArena, ModuleSlots, supports_embedding
from quire_spec.model.model_config import ModelConfig


class CausalLM(ABC):
    """Computes logits from token ids.

    Parameters are allocated but not filled: `weights.loader` fills them, using `tensors`.
    """

    NAMES: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Maps attributes to the names that the checkpoint uses for them, if these differ."""
    layers: Sequence[Module]

    def __init__(self, shape: ModelConfig, factory: ParamFactory) -> None:
        """`shape` is the configuration of this rank's shard."""
        self.shape = shape
        self.communicator = factory.communicator
        # Only the first pipeline stage stores these parts. The others have no memory for them.
        outer = factory if shape.has_outer_parts else replace(factory, device=torch.device("meta"))
        self.embed_tokens = outer.empty(num_vocab_rows(shape, factory), shape.embedding_size)
        self.lm_head = build_lm_head(shape, outer, self.embed_tokens if shape.tie_word_embeddings else None)
        self.outer_linears: list[Linear] = [self.lm_head] if shape.has_outer_parts else []
        """Linear layers outside the layers that this rank stores."""
        self.embedding_adapters: ModuleSlots | None = None
        self.adapted_norms: Sequence[Norm] = ()
        """The norms that adapters can replace; empty without adapters."""
        self.eager_slots: Set[int] = frozenset()
        """Slots whose adapter a CUDA graph cannot compute; see LoRASlots."""
        self.aux_hidden_state_layers: tuple[int, ...] = ()
        """The next forward pass keeps the inputs of the layers with these indices, for a draft head. The index
        num_layers stands for the output of the last layer. Architectures in ARCHITECTURES_WITHOUT_HEADS never keep
        inputs.
        """
        self.aux_hidden_states: Tensor | None = None
        """The layer inputs that the last forward pass kept: [num_tokens, len(aux_hidden_state_layers) *
        hidden_size]."""
        self.build_layers(factory)
        self.num_bytes = sum(tensor.nbytes for _, tensor in self.tensors())
        """Bytes of all parameters on this rank; before `pack`, quantized weights are counted with their dequantized
        size.
        """
        self.num_bytes += sum(linear.unread_bytes for linear in self.outer_linears)
        self.num_bytes += sum(layer.unread_bytes for layer in self.layers)

    def __call__(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor | None:
        """Compute the batch and write its keys and values to the KV cache.

        Returns:
            Hidden states [num_logits, hidden_size] for `compute_logits`; None if the batch needs no logits.
        """
        hidden = self.forward_layers(batch, kv_cache)
        return None if batch.num_logits == 0 else select_logit_rows(hidden, batch)

    @abstractmethod
    def build_layers(self, factory: ParamFactory) -> None:
        """Allocate the layers between embedding and output projection."""

    @abstractmethod
    def forward_layers(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """Write keys and values to the KV cache; return the last layer's output [num_tokens, hidden_size]."""

    @abstractmethod
    def final_norm(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Return what the output projection reads, [num_rows, embedding_size]; this is `last_hidden_state` of
        transformers. The arguments are those of `compute_logits`."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute the logits [num_rows, vocab_size] from the hidden states [num_rows, hidden_size]. `batch` must
        contain only these rows, see ForwardBatch.for_logit_rows.
        """

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Return the embeddings of the batch's tokens, a new tensor [num_tokens, embedding_size]."""
        return parallel_embedding(batch, self.embed_tokens, self.embedding_adapters, self.communicator)

    def embed_inputs(self, batch: ForwardBatch) -> Tensor:
        """Return the input of the first layer, a new tensor [num_tokens, embedding_size]: the embeddings of the tokens,
        or those of images, or what the previous pipeline stage has computed."""
        if batch.hidden is not None:
            return batch.hidden
        hidden = self.embed(batch)
        if batch.images is not None:
            assert batch.images.rows is not None
            hidden.index_copy_(0, batch.images.rows, batch.images.embeddings)
        return hidden

    def adapter_sites(self) -> Iterator[tuple[int, Linear | AdapterSite]]:
        """Yield the parts of the layers that adapters can change, each with its layer index in the whole model."""
        for index, layer in enumerate(self.layers, self.shape.first_layer):
            yield from ((index, site) for site in layer.adapter_sites())

    def norms(self) -> Iterator[tuple[str, Norm]]:
        """Yield the norms with learned weights, each with its name in the checkpoint."""
        parent = self.shape.architecture_info.parent_path
        path = self.shape.architecture_info.layers_path
        layers = ((f"{path}.{index}", layer) for index, layer in enumerate(self.layers, self.shape.first_layer))
        outer = ((parent + self.NAMES.get(n, n), part) for n, part in vars(self).items() if isinstance(part, Norm))
        for name, part in (*layers, *(outer if self.shape.has_outer_parts else ())):
            yield from ((path, norm) for path, norm in find_norms(part, name) if norm.size)

    def norm_sizes(self) -> dict[str, int]:
        """Return the sizes of the norms of the whole model, by name. The layers of all pipeline stages have the same
        norms."""
        shape, parent = self.shape, self.shape.architecture_info.parent_path
        path = self.shape.architecture_info.layers_path
        sizes = {name: norm.size for name, norm in self.norms()}
        if shape.stage is not None:
            own = [(name, norm.size) for name, norm in find_norms(self.layers[0], "") if norm.size]
            names = [(f"{path}.{i}{name}", n) for i in range(shape.stage.total_layers) for name, n in own]
            outer = ((self.NAMES.get(n, n), p) for n, p in vars(self).items() if isinstance(p, Norm))
            sizes |= dict(names) | {f"{parent}{name}": norm.size for name, norm in outer if norm.size}
        return sizes

    def linears(self) -> Iterator[tuple[int, Linear]]:
        """Yield the linear layers, each with its layer index."""
        yield from ((index, site) for index, site in self.adapter_sites() if isinstance(site, Linear))

    def tensors(self) -> Iterator[tuple[str, LoadTarget]]:
        """Yield the name of every tensor in the checkpoint, and the parameter or shard into which the tensor is
        loaded."""
        parent = self.shape.architecture_info.parent_path
        if self.shape.has_outer_parts:
            yield from self._outer_tensors(parent)
        for index, layer in enumerate(self.layers, self.shape.first_layer):
            yield from layer.tensors(f"{self.shape.architecture_info.layers_path}.{index}.")

    def _outer_tensors(self, parent: str) -> Iterator[tuple[str, LoadTarget]]:
        """Yield the tensors that belong to no layer."""
        yield (
            f"{parent}{self.shape.architecture_info.embedding}.weight",
            embedding_shard(self.embed_tokens, self.communicator),
        )
        yield from self.top_level_tensors(parent)
        for name, target in self.lm_head.tensors(""):
            is_tied = self.shape.tie_word_embeddings and name.endswith(".weight")
            if not is_tied and self.shape.head == "lm":
                yield name, target

    @abstractmethod
    def top_level_tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """Yield the tensors under `prefix` that belong neither to the embedding nor to a layer."""

    def load(
        self, folder: Path, checkpoint: QuantizedTensors | None = None, *, progress: bool = False, stream: bool = False
    ) -> None:
        """Fill the parameters from the checkpoint in `folder`; see `load_weights` for the arguments and the errors."""
        parent, has_outer_parts = self.shape.architecture_info.parent_path, self.shape.has_outer_parts
        of_stage_0 = () if has_outer_parts else ("lm_head.", *(name for name, _ in self._outer_tensors(parent)))
        load_weights(
            folder,
            self.tensors(),
            tied_to=self.shape.tied_embedding_name if has_outer_parts else None,
            progress=progress,
            checkpoint=checkpoint,
            stream=stream,
            unused_prefixes=(*self.shape.unused_prefixes, *of_stage_0),
        )

    def pack(self) -> None:
        """Repack the loaded weights of all layers for speed; `tensors` must not be used afterwards."""
        arena, loaded_bytes = HugePageArena(), self._num_packed_bytes()
        for layer in self.layers:
            layer.pack(arena)
        for linear in self.outer_linears:
            linear.pack(arena)
        if self.shape.tie_word_embeddings and self.shape.has_outer_parts and supports_embedding(self.lm_head.weight):
            self.embed_tokens = self.lm_head.weight
        self.num_bytes += self._num_packed_bytes() - loaded_bytes

    def _num_packed_bytes(self) -> int:
        """Return the bytes of the linear layers and the experts. An output projection that is tied to the embedding
        does not count."""
        outer = sum(linear.num_bytes for linear in self.outer_linears if linear.weight is not self.embed_tokens)
        return outer + sum(layer.packed_bytes for layer in self.layers)


def select_logit_rows(hidden: Tensor, batch: ForwardBatch) -> Tensor:
    """Return the hidden states [num_logits, hidden_size] of the tokens that need logits."""
    return hidden if batch.logit_rows is None else hidden[batch.logit_rows]
