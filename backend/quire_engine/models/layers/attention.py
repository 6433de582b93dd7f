# SPDX-License-Identifier: Apache-2.0
"""Attention layers over the paged KV cache."""

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import Linear, ParamFactory, build_linear
from quire_engine.weights.param_shard import LoadTarget
from quire_kernels import paged_attention, rope_and_cache
from quire_spec.model.model_config import ModelConfig


class Attention:
    """Grouped-query attention over the paged cache. Families vary it by subclasses: how positions come in, the names of
    its linears, and `project`."""

    QKV: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    """The linears that make queries, keys and values; one where a checkpoint has them fused."""
    OUTPUT: ClassVar[str] = "o_proj"

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        self.num_heads = shape.num_heads
        self.num_rotated = shape.num_heads + shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.scale = shape.attention_scale
        self.window = shape.sliding_windows[index]
        self.softcap = shape.attention_softcap
        self.qkv_proj = build_linear(shape, [f"self_attn.{name}" for name in self.QKV], factory, shape.attention_bias)
        self.o_proj = build_linear(shape, [f"self_attn.{self.OUTPUT}"], factory, shape.output_bias)

    def project_qkv(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[num_tokens, hidden_size] to queries, keys and values, [num_tokens, all heads of them, head_dim]."""
        return self.qkv_proj(x, batch).view(x.shape[0], -1, self.head_dim)

    def attend(self, queries: Tensor, kv_cache: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """[num_tokens, num_heads, head_dim] to [num_tokens, hidden_size], or that added to a residual stream."""
        attention_output = paged_attention(queries, kv_cache, batch.attention, self.scale, self.window, self.softcap)
        return self.o_proj(attention_output.view(queries.shape[0], -1), batch, residual)

    def linears(self) -> tuple[Linear, ...]:
        """The linears that adapters can change."""
        return (self.qkv_proj, self.o_proj)

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """The checkpoint's tensors under `prefix`."""
        for module in self.linears():
            yield from module.tensors(prefix)


class RotaryAttention(Attention):
    """Attention with rotary positions."""

    def __call__(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        kv_cache: Tensor,
        batch: ForwardBatch,
        residual: Tensor | None = None,
    ) -> Tensor:
        """[num_tokens, hidden_size] to the same, or that added to a residual stream; writes the tokens' keys and values
        to `cache`, one layer's."""
        qkv = self.project_qkv(x, batch)
        queries = rope_and_cache(qkv, *rope, kv_cache, batch.addresses, self.num_heads)
        return self.attend(queries, kv_cache, batch, residual)
