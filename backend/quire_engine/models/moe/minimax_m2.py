# SPDX-License-Identifier: Apache-2.0
"""MiniMax M2: experts in every layer, and queries and keys that are normalized over all heads."""

from quire_engine.models.layers.qk_norm import AllHeadsNormAttention
from quire_engine.models.llama import LlamaForCausalLM
from quire_engine.models.moe.sparse import SparseDecoderLayer


class MiniMaxM2DecoderLayer(SparseDecoderLayer):
    """SparseDecoderLayer with AllHeadsNormAttention."""

    ATTENTION = AllHeadsNormAttention


class MiniMaxM2ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = MiniMaxM2DecoderLayer
