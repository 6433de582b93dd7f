# SPDX-License-Identifier: Apache-2.0
"""MiniMax M2: experts in every layer, and queries and keys that are normalized over all heads."""

from quire_engine.models.layers.qk_norm import AllHeadsNormAttention
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class MiniMaxM2DecoderLayer(LlamaDecoderLayer):
    """Llama's layer with AllHeadsNormAttention."""

    ATTENTION = AllHeadsNormAttention


class MiniMaxM2ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = MiniMaxM2DecoderLayer
