# SPDX-License-Identifier: Apache-2.0
"""GPT-NeoX and Pythia: LayerNorm, an MLP without a gate, biases everywhere, and in most checkpoints attention and MLP
in parallel."""

from types import MappingProxyType

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.attention import RotaryAttention
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.mlp import UngatedMLP
from quire_engine.models.layers.norm import LayerNorm
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from quire_spec.model.model_config import ModelConfig


class GPTNeoXAttention(RotaryAttention):
    """Attention with one linear layer for queries, keys and values, in which those of a head are neighbors."""

    PATH = "attention"
    QKV = ("query_key_value",)
    OUTPUT = "dense"

    def project_qkv(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """See Attention.project_qkv."""
        qkv = self.qkv_proj(x, batch).view(x.shape[0], self.num_heads, 3, self.head_dim)
        return qkv.transpose(1, 2).reshape(x.shape[0], -1, self.head_dim)


class GPTNeoXMLP(UngatedMLP):
    """MLP without a gate."""

    UP, DOWN = "dense_h_to_4h", "dense_4h_to_h"


class GPTNeoXDecoderLayer(LlamaDecoderLayer):
    """A decoder layer with LayerNorm. If attention and MLP are parallel, both have a norm for the same input."""

    NAMES = MappingProxyType({"self_attn": "attention"})
    ATTENTION = GPTNeoXAttention
    MLP = GPTNeoXMLP
    NORM = LayerNorm

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        self.is_parallel = shape.flags["use_parallel_residual"]

    def __call__(self, hidden: Tensor, rope: tuple[Tensor, Tensor], kv_cache: Tensor, batch: ForwardBatch) -> Tensor:
        """Update the residual stream [num_tokens, hidden_size] in place and return it."""
        if not self.is_parallel:
            return super().__call__(hidden, rope, kv_cache, batch)
        x = self.post_attention_layernorm(hidden, batch)
        self.self_attn(self.input_layernorm(hidden, batch), rope, kv_cache, batch, residual=hidden)
        return self.mlp(x, batch, residual=hidden)


class GPTNeoXForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    NAMES = MappingProxyType({"norm": "final_layer_norm"})
    LAYER = GPTNeoXDecoderLayer
