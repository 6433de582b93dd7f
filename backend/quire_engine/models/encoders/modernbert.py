# SPDX-License-Identifier: Apache-2.0
"""ModernBERT: rotary positions, a gated MLP, norms before attention and MLP, and windows in most layers."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.models.encoders.encoder import Encoder
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import ParamFactory, build_linear
from quire_engine.models.layers.module import Module
from quire_engine.models.layers.norm import BiaslessLayerNorm, LayerNorm
from quire_engine.models.layers.rotary import RotaryEmbedding
from quire_engine.weights.param_shard import LoadTarget
from quire_kernels import apply_rope, encoder_attention, get_gated_op
from quire_spec.model.model_config import ModelConfig


def _build_norm(shape: ModelConfig, factory: ParamFactory) -> LayerNorm:
    kind = LayerNorm if shape.flags["norm_bias"] else BiaslessLayerNorm
    return kind(shape.hidden_size, shape.norm_eps, factory)


class ModernBertLayer(Module):
    """Attention and MLP, which read the normalized residual stream. The first layer reads it without a norm before
    attention, because the embedding is normalized."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        self.num_heads, self.head_dim, self.scale = shape.num_heads, shape.head_dim, shape.attention_scale
        self.window = shape.sliding_windows[index]
        self.attn_norm = _build_norm(shape, factory) if index else None
        self.qkv = build_linear(shape, ["attn.Wqkv"], factory, shape.attention_bias)
        self.attention_output = build_linear(shape, ["attn.Wo"], factory, shape.output_bias)
        self.mlp_norm = _build_norm(shape, factory)
        self.gate_up = build_linear(shape, ["mlp.Wi"], factory, shape.mlp_bias)
        self.down = build_linear(shape, ["mlp.Wo"], factory, shape.mlp_bias)
        self.activate = get_gated_op(shape.activation)

    def __call__(self, hidden: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """Update the residual stream [num_tokens, hidden_size] in place and return it."""
        x = hidden if self.attn_norm is None else self.attn_norm(hidden, batch)
        qkv = self.qkv(x, batch).view(hidden.shape[0], -1, self.head_dim)
        rotated = qkv[:, : 2 * self.num_heads]
        rotated.copy_(apply_rope(rotated, *rope))
        attended = encoder_attention(qkv, self.num_heads, batch.attention, self.scale, self.window)
        self.attention_output(attended.flatten(1), batch, hidden)
        return self.down(self.activate(self.gate_up(self.mlp_norm(hidden, batch), batch)), batch, hidden)


class ModernBertModel(Encoder):
    """Computes the last hidden states from token ids."""

    NAMES: ClassVar[Mapping[str, str]] = MappingProxyType({"embedding_norm": "embeddings.norm", "norm": "final_norm"})
    layers: list[ModernBertLayer]

    def build_layers(self, factory: ParamFactory) -> None:
        """See CausalLM.build_layers."""
        shape = self.shape
        self.rotary = {rope: RotaryEmbedding(rope, factory.device) for rope in dict.fromkeys(shape.ropes)}
        self.embedding_norm = _build_norm(shape, factory)
        self.layers = [ModernBertLayer(shape, index, factory) for index in range(shape.num_layers)]
        self.norm = _build_norm(shape, factory)

    def forward_layers(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """See CausalLM.forward_layers."""
        hidden = self.embedding_norm(self.embed(batch), batch)
        angles = {rope: rotary(batch.positions, None, hidden.dtype) for rope, rotary in self.rotary.items()}
        for layer, rope in zip(self.layers, self.shape.ropes, strict=True):
            hidden = layer(hidden, angles[rope], batch)
        return hidden

    def final_norm(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """See CausalLM.final_norm."""
        return self.norm(hidden, batch)

    def top_level_tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See CausalLM.top_level_tensors."""
        yield from self.embedding_norm.tensors(f"{prefix}embeddings.norm.")
        yield from self.norm.tensors(f"{prefix}final_norm.")
