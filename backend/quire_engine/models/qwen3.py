# SPDX-License-Identifier: Apache-2.0
"""Qwen3: Llama with queries and keys normalised head by head, and windows as in Qwen2."""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from quire_engine.batch import Batch
from quire_engine.layers import Placement, RMSNorm, RotaryAttention
from quire_engine.models.llama import DecoderLayer, LlamaForCausalLM
from quire_engine.part import Target
from quire_kernels import LayerWeights, qk_norm
from quire_spec.model.model_config import ModelConfig


class Qwen3Attention(RotaryAttention):
    """Attention whose queries and keys are normalised before they are rotated."""

    def __init__(self, shape: ModelConfig, index: int, place: Placement) -> None:
        super().__init__(shape, index, place)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps, place)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps, place)

    def project(self, x: Tensor, batch: Batch) -> Tensor:
        """See Attention.project."""
        qkv = super().project(x, batch)
        qk_norm(qkv, self.q_norm.weight, self.k_norm.weight, self.num_heads, self.q_norm.eps)
        return qkv

    def tensors(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """The checkpoint's tensors under `prefix`."""
        yield from super().tensors(prefix)
        yield from self.q_norm.tensors(f"{prefix}q_norm")
        yield from self.k_norm.tensors(f"{prefix}k_norm")


class Qwen3DecoderLayer(DecoderLayer):
    """Llama's layer around this attention."""

    ATTENTION = Qwen3Attention
    self_attn: Qwen3Attention

    def weights(self) -> LayerWeights | None:
        """See DecoderLayer.weights."""
        found, attention = super().weights(), self.self_attn
        if found is None:
            return None
        return replace(found, query_norm=attention.q_norm.weight, key_norm=attention.k_norm.weight)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Token ids to logits; see LlamaForCausalLM."""

    LAYER = Qwen3DecoderLayer
