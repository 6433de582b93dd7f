# SPDX-License-Identifier: Apache-2.0
"""Phi 1, 1.5 and 2: attention and MLP in parallel, LayerNorm, an MLP without a gate, and biases everywhere."""

from types import MappingProxyType

from torch import Tensor

from quire_engine.models.dense.parallel import ParallelDecoderLayer
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.attention import RotaryAttention
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.mlp import UngatedMLP
from quire_engine.models.layers.norm import LayerNorm
from quire_engine.models.llama import LlamaForCausalLM
from quire_spec.model.model_config import ModelConfig


class PhiAttention(RotaryAttention):
    """Attention that normalizes queries and keys in some checkpoints."""

    OUTPUT = "dense"

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        has_norms = shape.flags["qk_layernorm"]
        self.q_layernorm = LayerNorm(shape.head_dim, shape.norm_eps, factory) if has_norms else None
        self.k_layernorm = LayerNorm(shape.head_dim, shape.norm_eps, factory) if has_norms else None

    def project_qkv(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """See Attention.project_qkv."""
        qkv = super().project_qkv(x, batch)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            queries, keys = qkv[:, : self.num_heads], qkv[:, self.num_heads : self.num_rotated]
            queries.copy_(self.q_layernorm(queries, batch))
            keys.copy_(self.k_layernorm(keys, batch))
        return qkv


class PhiMLP(UngatedMLP):
    """MLP without a gate."""

    UP, DOWN = "fc1", "fc2"


class PhiDecoderLayer(ParallelDecoderLayer):
    """ParallelDecoderLayer with LayerNorm."""

    ATTENTION = PhiAttention
    MLP = PhiMLP
    NORM = LayerNorm


class PhiForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    NAMES = MappingProxyType({"norm": "final_layernorm"})
    LAYER = PhiDecoderLayer
