# SPDX-License-Identifier: Apache-2.0
"""Gemma 2.

It differs from Llama in these ways: attention and MLP each have a norm before and a norm after them, the embeddings are
scaled, attention scores and logits have a soft cap, and every second layer has a sliding window.
"""

from typing import ClassVar

import torch
from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.norm import RMSNorm, UnitOffsetRMSNorm
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from quire_kernels import softcap
from quire_spec.model.model_config import ModelConfig


class Gemma2DecoderLayer(LlamaDecoderLayer):
    """Llama's layer, except that the outputs of attention and MLP are normalized before they are added to the residual
    stream."""

    NORM: ClassVar[type[RMSNorm]] = UnitOffsetRMSNorm

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        self.pre_feedforward_layernorm = self.NORM(shape.hidden_size, shape.norm_eps, factory)
        self.post_feedforward_layernorm = self.NORM(shape.hidden_size, shape.norm_eps, factory)

    def __call__(self, hidden: Tensor, rope: tuple[Tensor, Tensor], kv_cache: Tensor, batch: ForwardBatch) -> Tensor:
        """Update the residual stream [num_tokens, hidden_size] in place and return it."""
        attention_output = self.self_attn(self.input_layernorm(hidden, batch), rope, kv_cache, batch)
        hidden.add_(self.post_attention_layernorm(attention_output, batch))
        mlp_output = self.mlp(self.pre_feedforward_layernorm(hidden, batch), batch)
        return hidden.add_(self.post_feedforward_layernorm(mlp_output, batch))


class Gemma2ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER: ClassVar[type[LlamaDecoderLayer]] = Gemma2DecoderLayer

    def build_layers(self, factory: ParamFactory) -> None:
        """See CausalLM.build_layers."""
        super().build_layers(factory)
        # The scale is rounded to the dtype of the weights, as in training.
        self.embedding_scale = torch.tensor(self.shape.hidden_size**0.5, dtype=factory.dtype).item()

    def embed(self, batch: ForwardBatch) -> Tensor:
        """See CausalLM.embed."""
        return super().embed(batch).mul_(self.embedding_scale)

    def compute_logits(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """See CausalLM.compute_logits."""
        logits, cap = super().compute_logits(hidden, batch), self.shape.logits_softcap
        return logits if cap is None else softcap(logits, cap)
