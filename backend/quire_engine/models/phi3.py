# SPDX-License-Identifier: Apache-2.0
"""Phi-3 and Phi-4-mini: Llama, except that checkpoints and adapters have one fused layer for q, k, v and one for gate,
up.

Sliding windows, long-context rotary embeddings and partly rotated heads are part of the model config.
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
