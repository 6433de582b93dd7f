# SPDX-License-Identifier: Apache-2.0
"""Phi-3 and Phi-4-mini: Llama whose checkpoints have q, k, v and gate, up fused, so that adapters change them as one.
Windows, ropes of long contexts and partly rotated heads come with the shape."""

from quire_engine.models.layers.attention import RotaryAttention
from quire_engine.models.layers.mlp import MLP
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class Phi3Attention(RotaryAttention):
    """Attention with one linear for queries, keys and values."""

    QKV = ("qkv_proj",)


class Phi3MLP(MLP):
    """A gated MLP with one linear for gate and up."""

    GATE_UP = ("gate_up_proj",)


class Phi3DecoderLayer(LlamaDecoderLayer):
    """Llama's layer around these."""

    ATTENTION = Phi3Attention
    MLP = Phi3MLP


class Phi3ForCausalLM(LlamaForCausalLM):
    """Token ids to logits; see LlamaForCausalLM."""

    LAYER = Phi3DecoderLayer
