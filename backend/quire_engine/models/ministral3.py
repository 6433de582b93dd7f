# SPDX-License-Identifier: Apache-2.0
"""Ministral 3, text only: Llama in which each query is multiplied by a factor that grows with the position."""

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.attention import RotaryAttention
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.rotary import query_factors
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from quire_spec.model.model_config import ModelConfig


class Ministral3Attention(RotaryAttention):
    """Attention that multiplies each query by a factor that depends on its position, see RopeConfig."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        self.rope = shape.ropes[index]

    def project_qkv(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """See Attention.project_qkv."""
        qkv = super().project_qkv(x, batch)
        if self.rope.query_scaling_beta:
            factors = query_factors(self.rope, batch.positions)
            qkv[:, : self.num_heads].mul_(factors.to(qkv.dtype)[:, None, None])
        return qkv

    @property
    def is_fusable(self) -> bool:
        """See RotaryAttention.is_fusable."""
        return not self.rope.query_scaling_beta


class Ministral3DecoderLayer(LlamaDecoderLayer):
    """Llama's layer with Ministral3Attention."""

    ATTENTION = Ministral3Attention


class Ministral3ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Ministral3DecoderLayer
