# SPDX-License-Identifier: Apache-2.0
"""Apertus: Llama with queries and keys that are normalized per head, and with an MLP without a gate whose activation is
learned."""

from types import MappingProxyType

from torch import Tensor

from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.mlp import UngatedMLP
from quire_engine.models.layers.qk_norm import HeadNormAttention
from quire_engine.models.layers.xielu import XIELU
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from quire_spec.model.model_config import ModelConfig


class ApertusMLP(UngatedMLP):
    """MLP without a gate, with a learned activation."""

    def __init__(self, shape: ModelConfig, factory: ParamFactory) -> None:
        super().__init__(shape, factory)
        self.act_fn = XIELU(factory) if shape.activation == "xielu" else None

    def activate(self, x: Tensor) -> Tensor:
        """See UngatedMLP.activate."""
        return super().activate(x) if self.act_fn is None else self.act_fn(x)


class ApertusDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with HeadNormAttention and ApertusMLP."""

    NAMES = MappingProxyType(
        {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}
    )
    ATTENTION = HeadNormAttention
    MLP = ApertusMLP


class ApertusForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = ApertusDecoderLayer
