# SPDX-License-Identifier: Apache-2.0
"""Llama: the decoder that other families vary. Weights come from weights.py, batches from the runner."""

from collections.abc import Iterator
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from quire_engine.batch import Batch
from quire_engine.kv import KVCache
from quire_engine.layers import MLP, Attention, Linear, Placement, RMSNorm
from quire_engine.rotary import Rotary
from quire_spec.shape import ModelShape


class DecoderLayer:
    """Attention and MLP, each on the normalised residual stream and added to it."""

    ATTENTION: ClassVar[type[Attention]] = Attention
    MLP: ClassVar[type[MLP]] = MLP
    NORM: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(self, shape: ModelShape, index: int, place: Placement) -> None:
        self.input_layernorm = self.NORM(shape.hidden_size, shape.norm_eps, place)
        self.self_attn = self.ATTENTION(shape, index, place)
        self.post_attention_layernorm = self.NORM(shape.hidden_size, shape.norm_eps, place)
        self.mlp = self.MLP(shape, place)

    def __call__(self, hidden: Tensor, rope: tuple[Tensor, Tensor], cache: Tensor, batch: Batch) -> Tensor:
        """[num_tokens, hidden_size] to the same, in place."""
        hidden.add_(self.self_attn(self.input_layernorm(hidden), rope, cache, batch))
        return hidden.add_(self.mlp(self.post_attention_layernorm(hidden), batch))

    def linears(self) -> tuple[Linear, ...]:
        """The linears that adapters can change."""
        return self.self_attn.linears() + self.mlp.linears()

    def tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors under `prefix`, each as the part of a parameter that it fills."""
        yield from self.input_layernorm.tensors(f"{prefix}input_layernorm")
        yield from self.post_attention_layernorm.tensors(f"{prefix}post_attention_layernorm")
        yield from self.self_attn.tensors(f"{prefix}self_attn.")
        yield from self.mlp.tensors(f"{prefix}mlp.")


class LlamaForCausalLM:
    """Token ids to logits.

    Parameters are allocated and not filled: weights.py does that, by `tensors`. Families vary the class by its layer,
    by `embed` and `project`.
    """

    LAYER: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(self, shape: ModelShape, place: Placement) -> None:
        self.shape = shape
        assert shape.rope is not None
        self.rotary = Rotary(shape.rope, place.device)
        self.embed_tokens = place.empty(shape.vocab_size, shape.hidden_size)
        self.layers = [self.LAYER(shape, index, place) for index in range(shape.num_layers)]
        self.norm = self.LAYER.NORM(shape.hidden_size, shape.norm_eps, place)
        self.lm_head = Linear(shape.hidden_size, {"lm_head": shape.vocab_size}, place)
        if shape.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens
        self.num_bytes = sum(tensor.nbytes for _, tensor in self.tensors())
        """Bytes of all parameters."""

    def __call__(self, batch: Batch, kv: KVCache) -> Tensor | None:
        """Compute the batch and store its keys and values in `kv`.

        Returns:
            [num_logits, hidden_size], for `project` to make logits of; None when the batch wants none.
        """
        hidden = self.embed(batch)
        rope = self.rotary(batch.positions, hidden.dtype)
        for layer, cache in zip(self.layers, kv.layers, strict=True):
            hidden = layer(hidden, rope, cache, batch)
        if batch.num_logits == 0:
            return None
        return hidden if batch.logit_rows is None else hidden[batch.logit_rows]

    def embed(self, batch: Batch) -> Tensor:
        """[num_tokens, hidden_size] that the first layer takes."""
        return F.embedding(batch.token_ids, self.embed_tokens)

    def project(self, hidden: Tensor, batch: Batch) -> Tensor:
        """What the last layer gives, [num_rows, hidden_size], to logits [num_rows, vocab_size]."""
        return self.lm_head(self.norm(hidden), batch)

    def linears(self) -> Iterator[tuple[int, Linear]]:
        """The linears that adapters can change, each with its layer."""
        for index, layer in enumerate(self.layers):
            yield from ((index, linear) for linear in layer.linears())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the checkpoint by name, as the part of a parameter that it fills; together, all of them."""
        yield "model.embed_tokens.weight", self.embed_tokens
        for index, layer in enumerate(self.layers):
            yield from layer.tensors(f"{self.shape.family.layers}.{index}.")
        yield from self.norm.tensors("model.norm")
        if not self.shape.tie_word_embeddings:
            yield "lm_head.weight", self.lm_head.weight

    def pack(self) -> None:
        """Lay the loaded weights of all linears out for speed; `tensors` is of no use afterwards.

        A tied output projection is then held twice: tokens are looked up in the plain layout.
        """
        for _, linear in self.linears():
            linear.pack()
        self.lm_head.pack()
