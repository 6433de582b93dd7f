# SPDX-License-Identifier: Apache-2.0
"""GLM-4, dense.

It differs from Llama in these ways: gate and up are fused into one layer, and only some of the adjacent pairs in each
head are rotated. In checkpoints from 2025 on (Glm4), attention and MLP also have a norm after them.
"""

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.attention import InterleavedAttention
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from quire_engine.models.phi3 import Phi3MLP
from quire_spec.model.model_config import ModelConfig


class GlmDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with interleaved rotary positions, and with gate and up in one linear layer."""

    ATTENTION = InterleavedAttention
    MLP = Phi3MLP


class Glm4DecoderLayer(GlmDecoderLayer):
    """GLM's layer, except that the outputs of attention and MLP are normalized before they are added to the residual
    stream."""

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


class GlmForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = GlmDecoderLayer


class Glm4ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Glm4DecoderLayer
