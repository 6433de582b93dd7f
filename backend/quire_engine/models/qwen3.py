# SPDX-License-Identifier: Apache-2.0
"""Qwen3: Llama with queries and keys that are normalized per head, and with the sliding windows of Qwen2."""

from dataclasses import replace

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.attention import RotaryAttention
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.norm import RMSNorm
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from quire_kernels import LayerWeights, qk_norm
from quire_spec.model.model_config import ModelConfig


class Qwen3Attention(RotaryAttention):
    """Attention that normalizes queries and keys before it rotates them."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps, factory)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps, factory)

    def project_qkv(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """See Attention.project_qkv."""
        qkv = super().project_qkv(x, batch)
        replaced = [norm for norm in (self.q_norm, self.k_norm) if norm.is_replaced(batch)]
        inputs = qkv.clone() if replaced else qkv
        qk_norm(qkv, self.q_norm.weight, self.k_norm.weight, self.num_heads, self.q_norm.eps)
        for norm in replaced:
            heads = slice(self.num_heads) if norm is self.q_norm else slice(self.num_heads, self.num_rotated)
            norm.replace_rows(qkv[:, heads], inputs[:, heads], batch)
        return qkv


class Qwen3DecoderLayer(LlamaDecoderLayer):
    """Llama's layer with Qwen3Attention."""

    ATTENTION = Qwen3Attention
    self_attn: Qwen3Attention

    def weights(self) -> LayerWeights | None:
        """See LlamaDecoderLayer.weights."""
        layer_weights, attention = super().weights(), self.self_attn
        if layer_weights is None:
            return None
        return replace(layer_weights, query_norm=attention.q_norm.weight, key_norm=attention.k_norm.weight)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Qwen3DecoderLayer
