# SPDX-License-Identifier: Apache-2.0
"""Decoder layer with a mixture of experts in some layers."""

from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.mlp import MLP
from quire_engine.models.layers.moe import MoE
from quire_engine.models.llama import FeedForward, LlamaDecoderLayer
from quire_spec.model.model_config import ModelConfig


class SparseDecoderLayer(LlamaDecoderLayer):
    """Llama's layer, with experts if the model config defines experts for this layer."""

    @classmethod
    def build_mlp(cls, shape: ModelConfig, index: int, factory: ParamFactory) -> FeedForward:
        """See LlamaDecoderLayer.build_mlp."""
        return MoE(shape, factory) if shape.has_experts(index) else MLP(shape, factory)
