# SPDX-License-Identifier: Apache-2.0
"""Mixtral: Llama with a mixture of experts in place of the MLP."""

from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.moe import MoE
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from quire_spec.model.model_config import ModelConfig


class MixtralDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with experts."""

    @classmethod
    def build_mlp(cls, shape: ModelConfig, index: int, factory: ParamFactory) -> MoE:
        """See LlamaDecoderLayer.build_mlp."""
        return MoE(shape, factory)


class MixtralForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = MixtralDecoderLayer
