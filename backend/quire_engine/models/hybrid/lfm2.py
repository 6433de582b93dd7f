# SPDX-License-Identifier: Apache-2.0
"""LFM2 and LFM2-MoE: most layers have a gated short convolution instead of attention."""

from types import MappingProxyType

from quire_engine.models.hybrid.decoder import HybridDecoderLayer, HybridForCausalLM
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.mlp import MLP
from quire_engine.models.layers.qk_norm import HeadNormAttention
from quire_engine.models.layers.short_conv import ShortConv
from quire_spec.model.model_config import ModelConfig


class Lfm2Attention(HeadNormAttention):
    """Attention with other names than in Qwen3."""

    NAMES = MappingProxyType({"q_norm": "q_layernorm", "k_norm": "k_layernorm"})
    OUTPUT = "out_proj"


class Lfm2MLP(MLP):
    """MLP with other names than in Llama."""

    PATH = "feed_forward"
    GATE_UP = ("w1", "w3")
    DOWN = "w2"


class Lfm2DecoderLayer(HybridDecoderLayer):
    """A short convolution or attention, and an MLP or experts."""

    NAMES = MappingProxyType(
        {
            "state_layer": "conv",
            "input_layernorm": "operator_norm",
            "post_attention_layernorm": "ffn_norm",
            "mlp": "feed_forward",
        }
    )
    ATTENTION = Lfm2Attention
    MLP = Lfm2MLP

    @classmethod
    def build_state_layer(cls, shape: ModelConfig, index: int, factory: ParamFactory) -> ShortConv:
        """See HybridDecoderLayer.build_state_layer."""
        return ShortConv(shape, factory)


class Lfm2ForCausalLM(HybridForCausalLM):
    """See LlamaForCausalLM."""

    NAMES = MappingProxyType({"norm": "embedding_norm"})
    LAYER = Lfm2DecoderLayer
