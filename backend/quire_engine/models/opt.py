# SPDX-License-Identifier: Apache-2.0
"""OPT and Galactica: learned positions, LayerNorm, an MLP without a gate, and biases everywhere.

OPT-350M is an exception: it normalizes after attention and MLP, and its embeddings are narrower than the residual
stream.
"""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.models.base import CausalLM
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.attention import Attention
from quire_engine.models.layers.linear import Linear, ParamFactory, build_linear
from quire_engine.models.layers.module import Module
from quire_engine.models.layers.norm import LayerNorm
from quire_engine.weights.param_shard import LoadTarget
from quire_kernels import ACTIVATIONS, write_kv
from quire_spec.model.model_config import ModelConfig


class OPTLayerNorm(LayerNorm):
    """LayerNorm without weights in some checkpoints."""

    def __init__(self, shape: ModelConfig, factory: ParamFactory) -> None:
        super().__init__(shape.hidden_size, shape.norm_eps, factory)
        if not shape.flags["layer_norm_elementwise_affine"]:
            self.weight = self.bias = None


class OPTAttention(Attention):
    """Attention without rotary positions; the embedding contains the positions."""

    OUTPUT = "out_proj"

    def __call__(self, x: Tensor, kv_cache: Tensor, batch: ForwardBatch, residual: Tensor) -> Tensor:
        """Compute attention for the input [num_tokens, hidden_size], add it to the residual stream, and write keys and
        values to the cache of one layer."""
        qkv = self.project_qkv(x, batch)
        write_kv(qkv[:, self.num_heads : self.num_rotated], qkv[:, self.num_rotated :], kv_cache, batch.addresses)
        return self.attend(qkv[:, : self.num_heads], kv_cache, batch, residual)


class OPTDecoderLayer(Module):
    """Attention and MLP, each added to the residual stream. The norms come either before attention and before the MLP,
    or after each of the two additions, depending on the checkpoint.
    """

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        self.norm_first = shape.flags["do_layer_norm_before"]
        self.self_attn = OPTAttention(shape, index, factory)
        self.self_attn_layer_norm = OPTLayerNorm(shape, factory)
        self.fc1 = build_linear(shape, ["fc1"], factory, shape.mlp_bias)
        self.fc2 = build_linear(shape, ["fc2"], factory, shape.mlp_bias)
        self.final_layer_norm = OPTLayerNorm(shape, factory)
        self.activate = ACTIVATIONS[shape.activation]

    def __call__(self, hidden: Tensor, kv_cache: Tensor, batch: ForwardBatch) -> Tensor:
        """Apply the layer to `hidden`, [num_tokens, hidden_size].

        If the norms come before attention and MLP, the result is `hidden` itself, which is changed in place.
        """
        if self.norm_first:
            hidden = self.self_attn(self.self_attn_layer_norm(hidden, batch), kv_cache, batch, residual=hidden)
            return self.mlp(self.final_layer_norm(hidden, batch), batch, residual=hidden)
        hidden = self.self_attn_layer_norm(self.self_attn(hidden, kv_cache, batch, residual=hidden), batch)
        return self.final_layer_norm(self.mlp(hidden, batch, residual=hidden), batch)

    def mlp(self, x: Tensor, batch: ForwardBatch, residual: Tensor) -> Tensor:
        """Compute the MLP for the input [num_tokens, hidden_size] and add it to the residual stream."""
        return self.fc2(self.activate(self.fc1(x, batch)), batch, residual)


class OPTForCausalLM(CausalLM):
    """Computes logits from token ids."""

    layers: list[OPTDecoderLayer]

    def build_layers(self, factory: ParamFactory) -> None:
        """See CausalLM.build_layers."""
        shape = self.shape
        self.embed_positions = factory.empty(shape.num_learned_positions, shape.hidden_size)
        self.first_position = shape.num_learned_positions - shape.max_position_embeddings
        self.project_in = self.project_out = None
        if shape.embedding_size != shape.hidden_size:
            self.project_in = Linear(shape.embedding_size, {"project_in": shape.hidden_size}, factory)
            self.project_out = Linear(shape.hidden_size, {"project_out": shape.embedding_size}, factory)
        self.layers = [OPTDecoderLayer(shape, index, factory) for index in range(shape.num_layers)]
        has_final_norm = shape.flags["do_layer_norm_before"] and not shape.flags["_remove_final_layer_norm"]
        self.final_layer_norm = OPTLayerNorm(shape, factory) if has_final_norm else None

    def forward_layers(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """See CausalLM.forward_layers."""
        hidden = self.embed(batch)
        if self.project_in is not None:
            hidden = self.project_in(hidden, batch)
        hidden.add_(F.embedding(batch.positions + self.first_position, self.embed_positions))
        for layer, layer_cache in zip(self.layers, kv_cache.layers, strict=True):
            hidden = layer(hidden, layer_cache, batch)
        return hidden

    def final_norm(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """See CausalLM.final_norm."""
        if self.final_layer_norm is not None:
            hidden = self.final_layer_norm(hidden, batch)
        return hidden if self.project_out is None else self.project_out(hidden, batch)

    def compute_logits(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """See CausalLM.compute_logits."""
        return self.lm_head(self.final_norm(hidden, batch), batch)

    def top_level_tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See CausalLM.top_level_tensors."""
        yield f"{prefix}embed_positions.weight", self.embed_positions
        for linear in (self.project_in, self.project_out):
            if linear is not None:
                yield from linear.tensors(prefix)
        if self.final_layer_norm is not None:
            yield from self.final_layer_norm.tensors(f"{prefix}final_layer_norm.")
