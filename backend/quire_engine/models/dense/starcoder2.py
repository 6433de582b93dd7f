# SPDX-License-Identifier: Apache-2.0
"""StarCoder 2: Llama with LayerNorm, an MLP without a gate, and biases everywhere."""

from quire_engine.models.layers.mlp import UngatedMLP
from quire_engine.models.layers.norm import LayerNorm
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class Starcoder2MLP(UngatedMLP):
    """MLP without a gate."""

    UP, DOWN = "c_fc", "c_proj"


class Starcoder2DecoderLayer(LlamaDecoderLayer):
    """Llama's layer with LayerNorm and Starcoder2MLP."""

    MLP = Starcoder2MLP
    NORM = LayerNorm


class Starcoder2ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Starcoder2DecoderLayer
