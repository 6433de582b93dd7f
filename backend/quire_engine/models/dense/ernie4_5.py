# SPDX-License-Identifier: Apache-2.0
"""Ernie 4.5, dense: Llama with interleaved rotary positions."""

from quire_engine.models.layers.attention import InterleavedAttention
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class Ernie4_5DecoderLayer(LlamaDecoderLayer):
    """Llama's layer with InterleavedAttention."""

    ATTENTION = InterleavedAttention


class Ernie4_5ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Ernie4_5DecoderLayer
