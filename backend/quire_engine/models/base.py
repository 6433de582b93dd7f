# SPDX-License-Identifier: Apache-2.0
"""CausalLM: what the model of every family is to the runner. Weights come from weights.py, batches from the runner."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import Linear, ParamFactory
from quire_engine.models.layers.vocab_parallel import build_lm_head, embedding_shard, num_vocab_rows, parallel_embedding
from quire_engine.weights.param_shard import LoadTarget
from quire_kernels import HugePageArena, ModuleSlots, supports_embedding
from quire_spec.model.model_config import ModelConfig


class DecoderLayer(Protocol):
    """A decoder layer, as far as families agree; what it is called with is their own business."""

    def linears(self) -> tuple[Linear, ...]:
        """The linears that adapters can change."""
        ...

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """The checkpoint's tensors under `prefix`, each as the part of a parameter that it fills."""
        ...


class CausalLM(ABC):
    """Token ids to logits.

    Parameters are allocated and not filled: weights.py does that, by `tensors`.
    """

    layers: Sequence[DecoderLayer]

    def __init__(self, shape: ModelConfig, factory: ParamFactory) -> None:
        """`shape`: of what this rank holds."""
        self.shape = shape
        self.communicator = factory.communicator
        self.embed_tokens = factory.empty(num_vocab_rows(shape, factory), shape.embedding_size)
        self.lm_head = build_lm_head(shape, factory, self.embed_tokens if shape.tie_word_embeddings else None)
        self.embedding_adapters: ModuleSlots | None = None
        self.build_layers(factory)
        self.num_bytes = sum(tensor.nbytes for _, tensor in self.tensors())
        """Bytes of all parameters on this rank."""

    def __call__(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor | None:
        """Compute the batch and store its keys and values in `kv`.

        Returns:
            [num_logits, hidden_size], for `project` to make logits of; None when the batch wants none.
        """
        hidden = self.forward_layers(batch, kv_cache)
        if batch.num_logits == 0:
            return None
        return hidden if batch.logit_rows is None else hidden[batch.logit_rows]

    @abstractmethod
    def build_layers(self, factory: ParamFactory) -> None:
        """Allocate what is between embedding and output projection."""

    @abstractmethod
    def forward_layers(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """What the last layer gives, [num_tokens, hidden_size]; keys and values go to `kv`."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """What the last layer gave for some tokens, [num_rows, hidden_size], to logits [num_rows, vocab_size]; `batch`:
        of these tokens, see Batch.of_logits."""

    def embed(self, batch: ForwardBatch) -> Tensor:
        """[num_tokens, embedding_size], a tensor of its own."""
        return parallel_embedding(batch, self.embed_tokens, self.embedding_adapters, self.communicator)

    def linears(self) -> Iterator[tuple[int, Linear]]:
        """The linears that adapters can change, each with its layer."""
        for index, layer in enumerate(self.layers):
            yield from ((index, linear) for linear in layer.linears())

    def tensors(self) -> Iterator[tuple[str, LoadTarget]]:
        """Every tensor of the checkpoint by name, as the part of a parameter that it fills; together, all of them."""
        parent = self.shape.architecture_info.layers_path.removesuffix(".layers")
        yield f"{parent}.embed_tokens.weight", embedding_shard(self.embed_tokens, self.communicator)
        for index, layer in enumerate(self.layers):
            yield from layer.tensors(f"{parent}.layers.{index}.")
        yield from self.top_level_tensors(f"{parent}.")
        if not self.shape.tie_word_embeddings:
            yield from self.lm_head.tensors("")

    @abstractmethod
    def top_level_tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """The tensors of what stands under `prefix` beside embedding and layers."""

    def pack(self) -> None:
        """Lay the loaded weights of all linears out for speed; `tensors` is of no use afterwards."""
        arena = HugePageArena()
        for _, linear in self.linears():
            linear.pack(arena)
        self.lm_head.pack(arena)
        if self.shape.tie_word_embeddings and supports_embedding(self.lm_head.weight):
            self.embed_tokens = self.lm_head.weight
