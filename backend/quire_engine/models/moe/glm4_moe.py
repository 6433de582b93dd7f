# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5, 4.6 and 4.7: experts after some dense layers, and partly rotated heads."""

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.attention import RotaryAttention
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.norm import RMSNorm
from quire_engine.models.layers.qk_norm import normalize_heads
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from quire_spec.model.model_config import ModelConfig


class Glm4MoeAttention(RotaryAttention):
    """Attention that normalizes the queries and keys of each head in some checkpoints."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        has_norms = shape.flags["use_qk_norm"]
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps, factory) if has_norms else None
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps, factory) if has_norms else None

    def project_qkv(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """See Attention.project_qkv."""
        qkv = super().project_qkv(x, batch)
        if self.q_norm is None or self.k_norm is None:
            return qkv
        return normalize_heads(qkv, self.q_norm, self.k_norm, self.num_heads, batch)


class Glm4MoeDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with Glm4MoeAttention."""

    ATTENTION = Glm4MoeAttention


class Glm4MoeForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Glm4MoeDecoderLayer
