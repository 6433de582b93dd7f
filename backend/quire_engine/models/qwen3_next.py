# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next, and the language models of Qwen3.5.

Most layers have Gated DeltaNet instead of attention. The other layers have attention with an output gate, with queries
and keys that are normalized per head, and with rotary positions in a part of each head. Norms have the factor 1 +
weight. A mixture of experts has a shared expert.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.kv_cache.state_cache import LayerStates
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.attention import RotaryAttention
from quire_engine.models.layers.gated_delta_net import GatedDeltaNet, InterleavedGatedDeltaNet
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.norm import UnitOffsetRMSNorm
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from quire_kernels import paged_attention, rope_and_cache
from quire_spec.model.model_config import ModelConfig


class GatedAttention(RotaryAttention):
    """Attention whose output is multiplied with the sigmoid of a gate. The projection of each query head is followed by
    that of its gate."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        self.q_norm = UnitOffsetRMSNorm(shape.head_dim, shape.norm_eps, factory)
        self.k_norm = UnitOffsetRMSNorm(shape.head_dim, shape.norm_eps, factory)

    def __call__(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        kv_cache: Tensor,
        batch: ForwardBatch,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See RotaryAttention."""
        heads, dim = self.num_heads, self.head_dim
        projected = self.qkv_proj(x, batch)
        queries, gate = projected[:, : 2 * heads * dim].view(-1, heads, 2 * dim).chunk(2, dim=-1)
        keys, values = projected[:, 2 * heads * dim :].view(len(x), -1, dim).chunk(2, dim=1)
        qkv = torch.cat((self.q_norm(queries, batch), self.k_norm(keys, batch), values), dim=1)
        queries = rope_and_cache(qkv, *rope, kv_cache, batch.addresses, heads)
        out = paged_attention(queries, kv_cache, batch.attention, self.scale, self.window, self.softcap, self.sinks)
        return self.o_proj((out * gate.sigmoid()).flatten(1), batch, residual)


class Qwen3_5DecoderLayer(LlamaDecoderLayer):
    """Attention or Gated DeltaNet, and an MLP or experts."""

    NORM = UnitOffsetRMSNorm
    LINEAR_ATTENTION: ClassVar[type[GatedDeltaNet]] = GatedDeltaNet

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        self.input_layernorm = self.NORM(shape.hidden_size, shape.norm_eps, factory)
        self.linear_attn = self.LINEAR_ATTENTION(shape, index, factory) if shape.has_state(index) else None
        if self.linear_attn is None:
            self.self_attn = GatedAttention(shape, index, factory)
        self.post_attention_layernorm = self.NORM(shape.hidden_size, shape.norm_eps, factory)
        self.mlp = self.build_mlp(shape, index, factory)

    def __call__(
        self, hidden: Tensor, rope: tuple[Tensor, Tensor], kv_cache: Tensor | LayerStates, batch: ForwardBatch
    ) -> Tensor:
        """See LlamaDecoderLayer. The cache of a layer with Gated DeltaNet contains its states."""
        x = self.input_layernorm(hidden, batch)
        if isinstance(kv_cache, LayerStates):
            assert self.linear_attn is not None
            self.linear_attn(x, kv_cache, batch, residual=hidden)
        else:
            self.self_attn(x, rope, kv_cache, batch, residual=hidden)
        return self.mlp(self.post_attention_layernorm(hidden, batch), batch, residual=hidden)

    def weights(self) -> None:
        """See LlamaDecoderLayer.weights."""


class Qwen3NextDecoderLayer(Qwen3_5DecoderLayer):
    """The layer of Qwen3-Next."""

    LINEAR_ATTENTION = InterleavedGatedDeltaNet


class Qwen3_5ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER: ClassVar[type[LlamaDecoderLayer]] = Qwen3_5DecoderLayer
    layers: list[Qwen3_5DecoderLayer]  # type: ignore[assignment]

    def layer_arguments(
        self, hidden: Tensor, batch: ForwardBatch, kv_cache: KVCache
    ) -> tuple[list[tuple[Tensor, Tensor]], Sequence[Any], Sequence[ForwardBatch]]:
        """See LlamaForCausalLM.layer_arguments. The cache of a layer with Gated DeltaNet contains its states."""
        assert kv_cache.states is not None
        ropes, caches, batches = super().layer_arguments(hidden, batch, kv_cache)
        return ropes, [kv_cache.states.layers.get(layer, cache) for layer, cache in enumerate(caches)], batches


class Qwen3NextForCausalLM(Qwen3_5ForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Qwen3NextDecoderLayer
