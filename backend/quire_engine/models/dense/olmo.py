# SPDX-License-Identifier: Apache-2.0
"""OLMo 2 and 3: Llama with norms after attention and MLP, and with queries and keys that are normalized over all
heads."""

from quire_engine.models.dense.post_norm import PostNormDecoderLayer
from quire_engine.models.layers.qk_norm import AllHeadsNormAttention
from quire_engine.models.llama import LlamaForCausalLM


class Olmo2DecoderLayer(PostNormDecoderLayer):
    """PostNormDecoderLayer with AllHeadsNormAttention."""

    ATTENTION = AllHeadsNormAttention


class Olmo2ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Olmo2DecoderLayer
