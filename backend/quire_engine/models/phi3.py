# SPDX-License-Identifier: Apache-2.0
"""Phi-3 and Phi-4-mini: Llama with fused linear layers.

Checkpoints and adapters have one fused layer for q, k and v, and one for gate and up. This module has no code for
sliding windows, for long contexts or for heads that are only partly rotated, because the model config describes these
features.
"""

from quire_engine.models.layers.attention import RotaryAttention
from quire_engine.models.layers.mlp import MLP
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class Phi3Attention(RotaryAttention):
    """Attention with one linear layer for queries, keys and values."""

    QKV = ("qkv_proj",)


class Phi3MLP(MLP):
    """A gated MLP with one linear layer for gate and up."""

    GATE_UP = ("gate_up_proj",)


class Phi3DecoderLayer(LlamaDecoderLayer):
    """Llama's layer with fused linear layers."""

    ATTENTION = Phi3Attention
    MLP = Phi3MLP


class Phi3ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Phi3DecoderLayer
