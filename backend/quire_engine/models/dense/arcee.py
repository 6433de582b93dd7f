# SPDX-License-Identifier: Apache-2.0
"""Arcee (AFM): Llama with an MLP without a gate."""

from quire_engine.models.layers.mlp import UngatedMLP
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class ArceeDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with UngatedMLP."""

    MLP = UngatedMLP


class ArceeForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = ArceeDecoderLayer
