# SPDX-License-Identifier: Apache-2.0
"""Granite 4 without Mamba-2 layers: Granite 3 with other names of its MLP, and in some models without rotary
positions."""

from types import MappingProxyType

from quire_engine.models.granite import GraniteDecoderLayer, GraniteForCausalLM
from quire_engine.models.layers.mlp import MLP


class SharedMLP(MLP):
    """A gated MLP with one linear layer for gate and up."""

    PATH = "shared_mlp"
    GATE_UP = ("input_linear",)
    DOWN = "output_linear"


class GraniteMoeHybridDecoderLayer(GraniteDecoderLayer):
    """Granite's layer with SharedMLP."""

    NAMES = MappingProxyType({"mlp": "shared_mlp"})
    MLP = SharedMLP


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = GraniteMoeHybridDecoderLayer
