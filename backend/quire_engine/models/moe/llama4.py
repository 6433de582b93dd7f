# SPDX-License-Identifier: Apache-2.0
"""Llama 4, text only. Layers with rotary positions attend within chunks, and normalize queries and keys. The other
layers have no positions, and scale queries by the position. The router multiplies the inputs of experts."""

from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.attention import InterleavedAttention
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.mlp import MLP
from quire_engine.models.layers.moe import MoE
from quire_engine.models.llama import FeedForward, LlamaDecoderLayer, LlamaForCausalLM
from quire_engine.weights.param_shard import LoadTarget, unsharded
from quire_kernels import within_chunks
from quire_spec.model.model_config import ModelConfig


class Llama4Attention(InterleavedAttention):
    """Attention within chunks, or without positions."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        has_positions = shape.ropes[index].rope_type != "none"
        self.chunk_size = shape.attention_chunk_sizes[index]
        self.norm_eps = shape.norm_eps if has_positions and shape.flags["use_qk_norm"] else None
        self.is_scaled = not has_positions and shape.flags["attn_temperature_tuning"]
        self.attn_scale, self.floor_scale = shape.factors["attn_scale"], shape.factors["floor_scale"]

    def project_qkv(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """See Attention.project_qkv."""
        qkv = super().project_qkv(x, batch)
        if self.norm_eps is not None:
            # The norm has no weight. transformers applies it after the rotation, which does not change lengths.
            heads = qkv[:, : self.num_rotated].float()
            heads *= torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + self.norm_eps)
            qkv[:, : self.num_rotated] = heads
        if self.is_scaled:
            periods = torch.floor((batch.positions.float() + 1.0) / self.floor_scale)
            factors = torch.log1p(periods) * self.attn_scale + 1.0
            queries = qkv[:, : self.num_heads]
            queries.copy_(queries * factors[:, None, None])
        return qkv

    def attend(self, queries: Tensor, kv_cache: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """See Attention.attend."""
        if self.chunk_size is not None:
            batch = replace(batch, attention=within_chunks(batch.attention, self.chunk_size, kv_cache))
        return super().attend(queries, kv_cache, batch, residual)


class Llama4MLP(MLP):
    """MLP with another path than in Llama."""

    PATH = "feed_forward"


class Llama4MoE(MoE):
    """Experts whose inputs, and not their outputs, are multiplied by the router's weights."""

    def _compute_experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, batch: ForwardBatch, residual: Tensor | None
    ) -> Tensor:
        out = residual
        for i in range(self.config.top_k):
            part = weights[:, i : i + 1]
            out = super()._compute_experts(x * part.to(x.dtype), ids[:, i : i + 1], torch.ones_like(part), batch, out)
        assert out is not None
        return out

    def _shard(self, weight: Tensor, *, is_down: bool) -> LoadTarget:
        return replace(unsharded(super()._shard(weight, is_down=is_down)), is_stacked_transposed=True)


class Llama4DecoderLayer(LlamaDecoderLayer):
    """Llama's layer with Llama4Attention, and with experts in some layers."""

    NAMES = MappingProxyType({"mlp": "feed_forward"})
    ATTENTION = Llama4Attention
    MLP = Llama4MLP

    @classmethod
    def build_mlp(cls, shape: ModelConfig, index: int, factory: ParamFactory) -> FeedForward:
        """See LlamaDecoderLayer.build_mlp."""
        return Llama4MoE(shape, factory) if shape.has_experts(index) else Llama4MLP(shape, factory)


class Llama4ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Llama4DecoderLayer
