# SPDX-License-Identifier: Apache-2.0
"""Nemotron, dense: Llama with LayerNorm whose factor is 1 + weight, and with an MLP without a gate."""

from quire_engine.models.layers.mlp import UngatedMLP
from quire_engine.models.layers.norm import UnitOffsetLayerNorm
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class NemotronDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with another norm and MLP."""

    MLP = UngatedMLP
    NORM = UnitOffsetLayerNorm


class NemotronForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = NemotronDecoderLayer
