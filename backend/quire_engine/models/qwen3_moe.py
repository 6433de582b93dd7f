# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: Qwen3 in which a mixture of experts replaces the MLP of all layers or of some layers."""

from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.mlp import MLP
from quire_engine.models.layers.moe import MoE
from quire_engine.models.llama import FeedForward, LlamaForCausalLM
from quire_engine.models.qwen3 import Qwen3DecoderLayer
from quire_spec.model.model_config import ModelConfig


class Qwen3MoeDecoderLayer(Qwen3DecoderLayer):
    """Qwen3's layer, with experts if the model config defines experts for this layer."""

    @classmethod
    def build_mlp(cls, shape: ModelConfig, index: int, factory: ParamFactory) -> FeedForward:
        """See LlamaDecoderLayer.build_mlp."""
        return MoE(shape, factory) if shape.has_experts(index) else MLP(shape, factory)


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Qwen3MoeDecoderLayer
