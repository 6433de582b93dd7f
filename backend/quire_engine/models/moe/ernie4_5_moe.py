# SPDX-License-Identifier: Apache-2.0
"""Ernie 4.5 with experts: interleaved rotary positions, and shared experts."""

from quire_engine.models.layers.attention import InterleavedAttention
from quire_engine.models.llama import LlamaForCausalLM
from quire_engine.models.moe.sparse import SparseDecoderLayer


class Ernie4_5_MoeDecoderLayer(SparseDecoderLayer):
    """SparseDecoderLayer with InterleavedAttention."""

    ATTENTION = InterleavedAttention


class Ernie4_5_MoeForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Ernie4_5_MoeDecoderLayer
