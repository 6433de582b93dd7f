# SPDX-License-Identifier: Apache-2.0
"""Decoder layer in which attention and MLP read the same input."""

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.llama import LlamaDecoderLayer
from quire_spec.model.model_config import ModelConfig


class ParallelDecoderLayer(LlamaDecoderLayer):
    """Llama's layer, except that one norm computes the input of both attention and MLP."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        del self.post_attention_layernorm

    def __call__(self, hidden: Tensor, rope: tuple[Tensor, Tensor], kv_cache: Tensor, batch: ForwardBatch) -> Tensor:
        """Update the residual stream [num_tokens, hidden_size] in place and return it."""
        x = self.input_layernorm(hidden, batch)
        self.self_attn(x, rope, kv_cache, batch, residual=hidden)
        return self.mlp(x, batch, residual=hidden)
