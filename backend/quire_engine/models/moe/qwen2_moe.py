# SPDX-License-Identifier: Apache-2.0
"""Qwen2-MoE: experts in all layers or in some, and shared experts with a gate."""

from quire_engine.models.llama import LlamaForCausalLM
from quire_engine.models.moe.sparse import SparseDecoderLayer


class Qwen2MoeForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = SparseDecoderLayer
