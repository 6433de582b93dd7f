# SPDX-License-Identifier: Apache-2.0
"""Qwen3: Llama with queries and keys that are normalized per head, and with the sliding windows of Qwen2."""

from quire_engine.models.layers.qk_norm import HeadNormAttention
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class Qwen3DecoderLayer(LlamaDecoderLayer):
    """Llama's layer with HeadNormAttention."""

    ATTENTION = HeadNormAttention


class Qwen3ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Qwen3DecoderLayer
