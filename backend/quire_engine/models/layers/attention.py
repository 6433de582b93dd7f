# SPDX-License-Identifier: Apache-2.0
"""Attention layers over the paged KV cache."""

from typing import ClassVar

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import ParamFactory, build_linear
from quire_engine.models.layers.module import Module
from quire_kernels import paged_attention, rope_and_cache
from quire_spec.model.model_config import ModelConfig


class Attention(Module):
    """Grouped-query attention over the paged KV cache. Subclasses define how positions are encoded, the names of the
    linear layers, and `project_qkv`."""

    QKV: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    """Names of the linear layers for queries, keys and values; a single name if the checkpoint has one fused layer."""
    OUTPUT: ClassVar[str] = "o_proj"

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        self.num_heads = shape.num_heads
        self.num_rotated = shape.num_heads + shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.scale = shape.attention_scale
        self.window = shape.sliding_windows[index]
        self.softcap = shape.attention_softcap
        self.sinks: Tensor | None = None
        self.qkv_proj = build_linear(shape, [f"self_attn.{name}" for name in self.QKV], factory, shape.attention_bias)
        self.o_proj = build_linear(shape, [f"self_attn.{self.OUTPUT}"], factory, shape.output_bias)

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
        return self.o_proj(attention_output.view(queries.shape[0], -1), batch, residual)


class RotaryAttention(Attention):
    """Attention with rotary position embedding."""

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
