# SPDX-License-Identifier: Apache-2.0
"""Hunyuan with experts: a shared MLP, and queries and keys that are normalized after they are rotated."""

from quire_engine.models.layers.qk_norm import RotatedHeadNormAttention
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class HunYuanMoEDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with RotatedHeadNormAttention."""

    ATTENTION = RotatedHeadNormAttention


class HunYuanMoEV1ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = HunYuanMoEDecoderLayer
