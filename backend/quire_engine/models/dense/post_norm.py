# SPDX-License-Identifier: Apache-2.0
"""Decoder layer that normalizes the outputs of attention and MLP instead of their inputs."""

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.llama import LlamaDecoderLayer
from quire_spec.model.model_config import ModelConfig


class PostNormDecoderLayer(LlamaDecoderLayer):
    """Llama's layer, except that the outputs of attention and MLP are normalized before they are added to the residual
    stream, and their inputs are not."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        del self.input_layernorm
        self.post_feedforward_layernorm = self.NORM(shape.hidden_size, shape.norm_eps, factory)

    def __call__(self, hidden: Tensor, rope: tuple[Tensor, Tensor], kv_cache: Tensor, batch: ForwardBatch) -> Tensor:
        """Update the residual stream [num_tokens, hidden_size] in place and return it."""
        attention_output = self.self_attn(hidden, rope, kv_cache, batch)
        hidden.add_(self.post_attention_layernorm(attention_output, batch))
        return hidden.add_(self.post_feedforward_layernorm(self.mlp(hidden, batch), batch))
