# SPDX-License-Identifier: Apache-2.0
"""Hunyuan, dense: Llama with queries and keys that are normalized per head after they are rotated."""

from quire_engine.models.layers.qk_norm import RotatedHeadNormAttention
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class HunYuanDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with RotatedHeadNormAttention."""

    ATTENTION = RotatedHeadNormAttention


class HunYuanDenseV1ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = HunYuanDecoderLayer
