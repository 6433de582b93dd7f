# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next, and the language models of Qwen3.5.

Most layers have Gated DeltaNet instead of attention. The other layers have attention with an output gate, with queries
and keys that are normalized per head, and with rotary positions in a part of each head. Norms have the factor 1 +
weight. A mixture of experts has a shared expert.
"""

from types import MappingProxyType

import torch
from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.hybrid.decoder import HybridDecoderLayer, HybridForCausalLM
from quire_engine.models.layers.attention import RotaryAttention
from quire_engine.models.layers.gated_delta_net import GatedDeltaNet, InterleavedGatedDeltaNet
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.norm import UnitOffsetRMSNorm
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


class Qwen3_5DecoderLayer(HybridDecoderLayer):
    """Gated DeltaNet or attention, and an MLP or experts."""

    NAMES = MappingProxyType({"state_layer": "linear_attn"})
    ATTENTION = GatedAttention
    NORM = UnitOffsetRMSNorm

    @classmethod
    def build_state_layer(cls, shape: ModelConfig, index: int, factory: ParamFactory) -> GatedDeltaNet:
        """See HybridDecoderLayer.build_state_layer."""
        return GatedDeltaNet(shape, factory)


class Qwen3NextDecoderLayer(Qwen3_5DecoderLayer):
    """The layer of Qwen3-Next."""

    @classmethod
    def build_state_layer(cls, shape: ModelConfig, index: int, factory: ParamFactory) -> GatedDeltaNet:
        """See HybridDecoderLayer.build_state_layer."""
        return InterleavedGatedDeltaNet(shape, factory)


class Qwen3_5ForCausalLM(HybridForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Qwen3_5DecoderLayer


class Qwen3NextForCausalLM(Qwen3_5ForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Qwen3NextDecoderLayer
