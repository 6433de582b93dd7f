# SPDX-License-Identifier: Apache-2.0
"""GLM-4, dense.

It differs from Llama in these ways: attention and MLP each have a norm before and a norm after them, gate and up are
fused into one layer, and only some of the adjacent pairs in each head are rotated.
"""

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.attention import RotaryAttention
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from quire_engine.models.phi3 import Phi3MLP
from quire_spec.model.model_config import ModelConfig


class Glm4Attention(RotaryAttention):
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


class Glm4DecoderLayer(LlamaDecoderLayer):
    """Llama's layer, except that the outputs of attention and MLP are normalized before they are added to the residual
    stream."""

    ATTENTION = Glm4Attention
    MLP = Phi3MLP

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        self.post_self_attn_layernorm = self.NORM(shape.hidden_size, shape.norm_eps, factory)
        self.post_mlp_layernorm = self.NORM(shape.hidden_size, shape.norm_eps, factory)

    def __call__(self, hidden: Tensor, rope: tuple[Tensor, Tensor], kv_cache: Tensor, batch: ForwardBatch) -> Tensor:
        """Update the residual stream [num_tokens, hidden_size] in place and return it."""
        attention_output = self.self_attn(self.input_layernorm(hidden, batch), rope, kv_cache, batch)
        hidden.add_(self.post_self_attn_layernorm(attention_output, batch))
        mlp_output = self.mlp(self.post_attention_layernorm(hidden, batch), batch)
        return hidden.add_(self.post_mlp_layernorm(mlp_output, batch))

    def weights(self) -> None:
        """See LlamaDecoderLayer.weights."""


class Glm4ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Glm4DecoderLayer
