# SPDX-License-Identifier: Apache-2.0
"""EXAONE 4: Llama with norms after attention and MLP, and with queries and keys that are normalized per head."""

from quire_engine.models.dense.post_norm import PostNormDecoderLayer
from quire_engine.models.layers.qk_norm import HeadNormAttention
from quire_engine.models.llama import LlamaForCausalLM


class Exaone4DecoderLayer(PostNormDecoderLayer):
    """PostNormDecoderLayer with HeadNormAttention."""

    ATTENTION = HeadNormAttention


class Exaone4ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Exaone4DecoderLayer
