# SPDX-License-Identifier: Apache-2.0
"""CausalLM: what the model of every family is to the runner. Weights come from weights.py, batches from the runner."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from quire_engine.batch import Batch
from quire_engine.kv import KVCache
from quire_engine.layers import Linear, Placement
from quire_engine.part import Target
from quire_engine.vocabulary import embed, embedding_target, num_rows, output_projection
from quire_kernels import HugePageArena, ModuleSlots, supports_embedding
from quire_spec.model.model_config import ModelConfig


class Layer(Protocol):
    """A decoder layer, as far as families agree; what it is called with is their own business."""

    def linears(self) -> tuple[Linear, ...]:
        """The linears that adapters can change."""
        ...

    def tensors(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """The checkpoint's tensors under `prefix`, each as the part of a parameter that it fills."""
        ...


class CausalLM(ABC):
    """Token ids to logits.

    Parameters are allocated and not filled: weights.py does that, by `tensors`.
    """

    layers: Sequence[Layer]

    def __init__(self, shape: ModelConfig, place: Placement) -> None:
        """`shape`: of what this rank holds."""
        self.shape = shape
        self.ranks = place.ranks
        self.embed_tokens = place.empty(num_rows(shape, place), shape.embedding_size)
        self.lm_head = output_projection(shape, place, self.embed_tokens if shape.tie_word_embeddings else None)
        self.embedding_adapters: ModuleSlots | None = None
        self.build(place)
        self.num_bytes = sum(tensor.nbytes for _, tensor in self.tensors())
        """Bytes of all parameters on this rank."""

    def __call__(self, batch: Batch, kv: KVCache) -> Tensor | None:
        """Compute the batch and store its keys and values in `kv`.

        Returns:
            [num_logits, hidden_size], for `project` to make logits of; None when the batch wants none.
        """
        hidden = self.decode(batch, kv)
        if batch.num_logits == 0:
            return None
        return hidden if batch.logit_rows is None else hidden[batch.logit_rows]

    @abstractmethod
    def build(self, place: Placement) -> None:
        """Allocate what is between embedding and output projection."""

    @abstractmethod
    def decode(self, batch: Batch, kv: KVCache) -> Tensor:
        """What the last layer gives, [num_tokens, hidden_size]; keys and values go to `kv`."""

    @abstractmethod
    def project(self, hidden: Tensor, batch: Batch) -> Tensor:
        """What the last layer gave for some tokens, [num_rows, hidden_size], to logits [num_rows, vocab_size]; `batch`:
        of these tokens, see Batch.of_logits."""

    def embed(self, batch: Batch) -> Tensor:
        """[num_tokens, embedding_size], a tensor of its own."""
        return embed(batch, self.embed_tokens, self.embedding_adapters, self.ranks)

    def linears(self) -> Iterator[tuple[int, Linear]]:
        """The linears that adapters can change, each with its layer."""
        for index, layer in enumerate(self.layers):
            yield from ((index, linear) for linear in layer.linears())

    def tensors(self) -> Iterator[tuple[str, Target]]:
        """Every tensor of the checkpoint by name, as the part of a parameter that it fills; together, all of them."""
        parent = self.shape.architecture_info.layers_path.removesuffix(".layers")
        yield f"{parent}.embed_tokens.weight", embedding_target(self.embed_tokens, self.ranks)
        for index, layer in enumerate(self.layers):
            yield from layer.tensors(f"{parent}.layers.{index}.")
        yield from self.rest(f"{parent}.")
        if not self.shape.tie_word_embeddings:
            yield from self.lm_head.tensors("")

    @abstractmethod
    def rest(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """The tensors of what stands under `prefix` beside embedding and layers."""

    def pack(self) -> None:
        """Lay the loaded weights of all linears out for speed; `tensors` is of no use afterwards."""
        arena = HugePageArena()
        for _, linear in self.linears():
            linear.pack(arena)
        self.lm_head.pack(arena)
        if self.shape.tie_word_embeddings and supports_embedding(self.lm_head.weight):
            self.embed_tokens = self.lm_head.weight
