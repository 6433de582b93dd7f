# SPDX-License-Identifier: Apache-2.0
"""Attention layers over the paged KV cache."""

from typing import ClassVar

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import ParamFactory, build_linear
from quire_engine.models.layers.module import Module
from quire_kernels import attend_in_both_directions, paged_attention, rope_and_cache
from quire_spec.model.model_config import ModelConfig


class Attention(Module):
    """Grouped-query attention over the paged KV cache. Subclasses define how positions are encoded, the names of the
    linear layers, and `project_qkv`."""

    PATH: ClassVar[str] = "self_attn"
    """Path of the attention in a decoder layer."""
    QKV: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    """Names of the linear layers for queries, keys and values; a single name if the checkpoint has one fused layer."""
    OUTPUT: ClassVar[str] = "o_proj"

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        layer_shape, linears = shape.for_layer(index), shape.layer_linears(index)
        self.num_heads = shape.num_heads
        self.num_rotated = shape.num_heads + layer_shape.num_kv_heads
        self.head_dim = layer_shape.head_dim
        self.scale = shape.attention_scale
        self.window = shape.sliding_windows[index]
        self.softcap = shape.attention_softcap
        images = shape.images
        self.has_bidirectional_images = images is not None and (
            images.bidirectional == "all" or (images.bidirectional == "windows" and self.window is not None)
        )
        self.sinks: Tensor | None = None
        qkv = [path for name in self.QKV if (path := f"{self.PATH}.{name}") in linears]
        self.qkv_proj = build_linear(shape, qkv, factory, shape.attention_bias, index)
        self.o_proj = build_linear(shape, [f"{self.PATH}.{self.OUTPUT}"], factory, shape.output_bias, index)

    def project_qkv(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute queries, keys and values of the input [num_tokens, hidden_size]; return them in one tensor
        [num_tokens, all heads, head_dim].
        """
        return self.qkv_proj(x, batch).view(x.shape[0], -1, self.head_dim)

    def attend(self, queries: Tensor, kv_cache: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """Compute attention for queries [num_tokens, num_heads, head_dim]; return the output [num_tokens, hidden_size].

        If `residual` is given, add the output to it in place.
        """
        attention_output = paged_attention(
            queries, kv_cache, batch.attention, self.scale, self.window, self.softcap, self.sinks
        )
        for tokens in batch.bidirectional if self.has_bidirectional_images else ():
            attend_in_both_directions(
                attention_output, queries, kv_cache, batch.attention, tokens, self.scale, self.window
            )
        return self.o_proj(attention_output.view(queries.shape[0], -1), batch, residual)


class RotaryAttention(Attention):
    """Attention with rotary position embedding."""

    @property
    def is_fusable(self) -> bool:
        """Whether the fused decoder computes this attention."""
        is_same = type(self).project_qkv is Attention.project_qkv and type(self).__call__ is RotaryAttention.__call__
        return is_same and self.sinks is None

    def __call__(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        kv_cache: Tensor,
        batch: ForwardBatch,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Compute attention for the input [num_tokens, hidden_size], and write keys and values to the cache of one
        layer.

        If `residual` is given, add the output to it in place.
        """
        qkv = self.project_qkv(x, batch)
        queries = rope_and_cache(qkv, *rope, kv_cache, batch.addresses, self.num_heads)
        return self.attend(queries, kv_cache, batch, residual)


class InterleavedAttention(RotaryAttention):
    """Attention that rotates the adjacent elements 2 i and 2 i + 1 of each head."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        self.rotary_dim = shape.ropes[index].dim

    def project_qkv(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """See Attention.project_qkv. Moves pair (2 i, 2 i + 1) to (i, i + dim / 2), the order that other architectures
        use. Attention scores do not change, because queries and keys are reordered in the same way.
        """
        qkv = super().project_qkv(x, batch)
        rotated = qkv[:, : self.num_rotated, : self.rotary_dim]
        rotated.copy_(rotated.reshape(*rotated.shape[:-1], -1, 2).mT.flatten(-2))
        return qkv
