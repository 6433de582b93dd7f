# SPDX-License-Identifier: Apache-2.0
"""Granite: Llama with factors that scale the embeddings, the attention scores, the residual stream and the logits."""

from typing import ClassVar

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from quire_spec.model.model_config import ModelConfig


class GraniteDecoderLayer(LlamaDecoderLayer):
    """Llama's layer, except that the outputs of attention and MLP are multiplied by a factor before they are added to
    the residual stream."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        self.residual_multiplier = shape.factors["residual_multiplier"]

    def __call__(self, hidden: Tensor, rope: tuple[Tensor, Tensor], kv_cache: Tensor, batch: ForwardBatch) -> Tensor:
        """Update the residual stream [num_tokens, hidden_size] in place and return it."""
        attention_output = self.self_attn(self.input_layernorm(hidden, batch), rope, kv_cache, batch)
        hidden.add_(attention_output, alpha=self.residual_multiplier)
        mlp_output = self.mlp(self.post_attention_layernorm(hidden, batch), batch)
        return hidden.add_(mlp_output, alpha=self.residual_multiplier)


class GraniteForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER: ClassVar[type[LlamaDecoderLayer]] = GraniteDecoderLayer

    def embed(self, batch: ForwardBatch) -> Tensor:
        """See CausalLM.embed."""
        return super().embed(batch).mul_(self.shape.factors["embedding_multiplier"])

    def compute_logits(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """See CausalLM.compute_logits."""
        return super().compute_logits(hidden, batch).div_(self.shape.factors["logits_scaling"])
