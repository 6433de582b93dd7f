# SPDX-License-Identifier: Apache-2.0
"""Llama, the base of most other architectures."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.models.base import CausalLM
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.attention import RotaryAttention
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.mlp import MLP, UngatedMLP
from quire_engine.models.layers.module import Module
from quire_engine.models.layers.moe import MoE
from quire_engine.models.layers.norm import LayerNorm, RMSNorm
from quire_engine.models.layers.qk_norm import HeadNormAttention
from quire_engine.models.layers.rotary import RotaryEmbedding
from quire_engine.weights.param_shard import LoadTarget
from quire_kernels import (
    AttentionShape,
    FusedDecoder,
    LayerWeights,
    build_fused_decoder,
    silu_mul,
)
from quire_spec.model.model_config import ModelConfig

FeedForward: TypeAlias = MLP | UngatedMLP | MoE


class LlamaDecoderLayer(Module):
    """A decoder layer, which consists of attention and an MLP.

    Both read the normalized residual stream, and add their output to the residual stream.
    """

    ATTENTION: ClassVar[type[RotaryAttention]] = RotaryAttention
    MLP: ClassVar[type[MLP] | type[UngatedMLP]] = MLP
    NORM: ClassVar[type[RMSNorm] | type[LayerNorm]] = RMSNorm

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        self.input_layernorm = self.NORM(shape.hidden_size, shape.norm_eps, factory)
        self.self_attn = self.ATTENTION(shape, index, factory)
        self.post_attention_layernorm = self.NORM(shape.hidden_size, shape.norm_eps, factory)
        self.mlp = self.build_mlp(shape, index, factory)

    @classmethod
    def build_mlp(cls, shape: ModelConfig, index: int, factory: ParamFactory) -> FeedForward:
        """Return the MLP of layer `index`, or the experts if the layer has experts instead."""
        return MoE(shape, factory) if shape.has_experts(index) else cls.MLP(shape, factory)

    def __call__(self, hidden: Tensor, rope: tuple[Tensor, Tensor], kv_cache: Tensor, batch: ForwardBatch) -> Tensor:
        """Update the residual stream [num_tokens, hidden_size] in place and return it."""
        self.self_attn(self.input_layernorm(hidden, batch), rope, kv_cache, batch, residual=hidden)
        return self.mlp(self.post_attention_layernorm(hidden, batch), batch, residual=hidden)

    def weights(self) -> LayerWeights | None:
        """Return the packed weights for the fused decoder; None if it cannot compute this layer."""
        attention, mlp, is_same = self.self_attn, self.mlp, type(self).__call__ is LlamaDecoderLayer.__call__
        if not isinstance(mlp, MLP) or mlp.activate is not silu_mul or not is_same or not attention.is_fusable:
            return None
        attention_norm, mlp_norm = self.input_layernorm, self.post_attention_layernorm
        if type(attention_norm) is not RMSNorm or type(mlp_norm) is not RMSNorm:
            return None
        return LayerWeights(
            attention_norm=attention_norm.weight,
            qkv=attention.qkv_proj.weights(),
            query_norm=attention.q_norm.weight if isinstance(attention, HeadNormAttention) else None,
            key_norm=attention.k_norm.weight if isinstance(attention, HeadNormAttention) else None,
            output=attention.o_proj.weights(),
            mlp_norm=mlp_norm.weight,
            gate_up=mlp.gate_up_proj.weights(),
            down=mlp.down_proj.weights(),
            window=attention.window,
        )


class LlamaForCausalLM(CausalLM):
    """Computes logits from token ids. Subclasses replace the layer, `embed` or `compute_logits`."""

    LAYER: ClassVar[type[LlamaDecoderLayer]] = LlamaDecoderLayer
    layers: list[LlamaDecoderLayer]

    def build_layers(self, factory: ParamFactory) -> None:
        """See CausalLM.build_layers."""
        shape = self.shape
        self.rotary = {rope: RotaryEmbedding(rope, factory.device) for rope in dict.fromkeys(shape.ropes)}
        self.layers = [self.LAYER(shape, index, factory) for index in range(shape.num_layers)]
        self.norm = self.LAYER.NORM(shape.hidden_size, shape.norm_eps, factory)
        self.fused_decoder: FusedDecoder | None = None

    def pack(self) -> None:
        """See CausalLM.pack."""
        super().pack()
        weights, shape = [layer.weights() for layer in self.layers], self.shape
        if self.communicator is None and None not in weights and len(self.rotary) == 1:
            scale, softcap = shape.attention_scale, shape.attention_softcap
            heads = AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, scale, softcap)
            layers = [layer_weights for layer_weights in weights if layer_weights is not None]
            self.fused_decoder = build_fused_decoder(layers, heads, shape.norm_eps)

    def forward_layers(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """See CausalLM.forward_layers."""
        hidden = self.embed_inputs(batch)
        ropes, caches, batches = self.layer_arguments(hidden, batch, kv_cache)
        aux_layers = self.aux_hidden_state_layers
        # The decoder computes all layers in one call, with one block table.
        deepstack = batch.images.deepstack if batch.images is not None else ()
        decoder = None if aux_layers or batch.groups or deepstack else self.fused_decoder
        if (
            decoder is not None
            and decoder.supports(hidden, kv_cache.layers)
            and not any(norm.is_replaced(batch) for norm in self.adapted_norms)
        ):
            return decoder(hidden, ropes[0], caches, batch.addresses, batch.attention, batch.adapters)
        inputs: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in aux_layers:
                # The layer updates the residual stream in place, so its input is copied.
                inputs[index] = hidden.clone()
            hidden = layer(hidden, ropes[index], caches[index], batches[index])
            if index < len(deepstack):
                assert batch.images is not None and batch.images.rows is not None
                hidden.index_add_(0, batch.images.rows, deepstack[index])
        if aux_layers:
            inputs[len(self.layers)] = hidden
            self.aux_hidden_states = torch.cat([inputs[index] for index in aux_layers], dim=-1)
        return hidden

    def final_norm(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """See CausalLM.final_norm."""
        return self.norm(hidden, batch)

    def layer_arguments(
        self, hidden: Tensor, batch: ForwardBatch, kv_cache: KVCache
    ) -> tuple[list[tuple[Tensor, Tensor]], Sequence[Any], Sequence[ForwardBatch]]:
        """Return the cosines and sines, the KV cache, and the batch of each layer."""
        angles = {
            rope: embedding(
                batch.rope_positions if rope.mrope_axes and batch.rope_positions is not None else batch.positions,
                batch.long_rope,
                hidden.dtype,
            )
            for rope, embedding in self.rotary.items()
        }
        batches = [batch.groups[g] for g in kv_cache.layer_groups] if batch.groups else [batch] * len(self.layers)
        return [angles[rope] for rope in self.shape.ropes], kv_cache.layers, batches

    def compute_logits(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """See CausalLM.compute_logits."""
        return self.lm_head(self.final_norm(hidden, batch), batch)

    def top_level_tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See CausalLM.top_level_tensors."""
        yield from self.norm.tensors(f"{prefix}{self.NAMES.get('norm', 'norm')}.")
