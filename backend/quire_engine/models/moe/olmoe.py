# SPDX-License-Identifier: Apache-2.0
"""OLMoE: experts in every layer, and queries and keys that are normalized over all heads."""

from quire_engine.models.layers.qk_norm import AllHeadsNormAttention
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class OlmoeDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with AllHeadsNormAttention."""

    ATTENTION = AllHeadsNormAttention


class OlmoeForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = OlmoeDecoderLayer
