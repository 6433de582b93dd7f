# SPDX-License-Identifier: Apache-2.0
"""Gemma 3, text only.

It differs from Gemma 2 in two ways. First, the queries and keys of each head are normalized, and there is no soft cap
on attention scores. Second, layers with a sliding window use another rope base.
"""

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.gemma2 import Gemma2DecoderLayer, Gemma2ForCausalLM
from quire_engine.models.layers.attention import RotaryAttention
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.norm import UnitOffsetRMSNorm
from quire_spec.model.model_config import ModelConfig


class Gemma3Attention(RotaryAttention):
    """Attention that normalizes queries and keys before it rotates them."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        self.q_norm = UnitOffsetRMSNorm(shape.head_dim, shape.norm_eps, factory)
        self.k_norm = UnitOffsetRMSNorm(shape.head_dim, shape.norm_eps, factory)

    def project_qkv(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """See Attention.project_qkv."""
        qkv = super().project_qkv(x, batch)
        queries, keys = qkv[:, : self.num_heads], qkv[:, self.num_heads : self.num_rotated]
        queries.copy_(self.q_norm(queries, batch))
        keys.copy_(self.k_norm(keys, batch))
        return qkv


class Gemma3DecoderLayer(Gemma2DecoderLayer):
    """Gemma 2's layer with Gemma3Attention."""

    ATTENTION = Gemma3Attention


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Gemma3DecoderLayer
