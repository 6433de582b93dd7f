# SPDX-License-Identifier: Apache-2.0
"""Ernie 4.5 with experts: interleaved rotary positions, and shared experts."""

from quire_engine.models.layers.attention import InterleavedAttention
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class Ernie4_5_MoeDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with InterleavedAttention."""

    ATTENTION = InterleavedAttention


class Ernie4_5_MoeForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Ernie4_5_MoeDecoderLayer
