# SPDX-License-Identifier: Apache-2.0
"""Gemma 4.

It differs from Gemma 3 in these ways: layers without a window have other heads, whose values can be the output of the
projection to k; values are normalized; the last layers read the keys and values of an earlier layer, and can have a
wider MLP; each layer can read an embedding of its own for each token; the output of each layer is scaled; in one
model, layers have experts beside the MLP.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.gemma2 import Gemma2DecoderLayer, Gemma2ForCausalLM
from quire_engine.models.layers.attention import RotaryAttention
from quire_engine.models.layers.linear import AdapterSite, Linear, ParamFactory, build_linear
from quire_engine.models.layers.mlp import MLP
from quire_engine.models.layers.moe import StackedMoE
from quire_engine.models.layers.norm import WideRMSNorm
from quire_engine.models.layers.router import Router
from quire_engine.models.layers.vocab_parallel import embedding_shard, num_vocab_rows, parallel_embedding
from quire_engine.weights.param_shard import LoadTarget
from quire_kernels import apply_rope, get_gated_op, rope_and_cache
from quire_spec.model.model_config import ModelConfig


class Gemma4Attention(RotaryAttention):
    """Attention that normalizes queries, keys and values. The last layers read the keys and values of an earlier one,
    see ModelConfig.kv_source."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        self.q_norm = WideRMSNorm(self.head_dim, shape.norm_eps, factory)
        self.writes_cache = shape.kv_source(index) == index
        if self.writes_cache:
            self.k_norm = WideRMSNorm(self.head_dim, shape.norm_eps, factory)

    def __call__(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        kv_cache: Tensor,
        batch: ForwardBatch,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See RotaryAttention.__call__. `kv_cache` is the cache of the layer whose keys and values are read."""
        heads = self.project_qkv(x, batch)
        queries = self.q_norm(heads[:, : self.num_heads], batch)
        if not self.writes_cache:
            return self.attend(apply_rope(queries, *rope), kv_cache, batch, residual)
        keys, values = heads[:, self.num_heads : self.num_rotated], heads[:, self.num_rotated :]
        if not values.shape[1]:
            values = keys
        values = _normalize(values, self.k_norm.eps)
        qkv = torch.cat((queries, self.k_norm(keys, batch), values), dim=1)
        queries = rope_and_cache(qkv, *rope, kv_cache, batch.addresses, self.num_heads)
        return self.attend(queries, kv_cache, batch, residual)


class Gemma4Router(Router):
    """Router that reads the normalized residual stream, and scales the weights of each expert."""

    def __init__(self, shape: ModelConfig, factory: ParamFactory, has_bias: bool = False) -> None:
        super().__init__(shape, factory, has_bias)
        self.eps = shape.norm_eps
        self.scale = factory.empty(shape.hidden_size)
        self.per_expert_scale = factory.empty(self.num_experts)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """See Router.__call__."""
        ids, weights = super().__call__(_normalize(x, self.eps) * self.scale * x.shape[1] ** -0.5, batch)
        return ids, weights * self.per_expert_scale[ids]

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See Router.tensors."""
        yield from super().tensors(prefix)
        yield f"{prefix}router.scale", self.scale
        yield f"{prefix}router.per_expert_scale", self.per_expert_scale


class Gemma4MoE(StackedMoE):
    """Experts beside an MLP. The router has another input than the experts."""

    ROUTER = Gemma4Router

    def compute(self, hidden: Tensor, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute the output for `x`; the router reads `hidden`. All are [num_tokens, hidden_size]."""
        return self._compute_experts(x, *self.router(hidden, batch), batch, None)

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See Module.tensors. The names of the tensors begin with the path of the layer."""
        yield from super().tensors(prefix.removesuffix("moe."))


class Gemma4DecoderLayer(Gemma2DecoderLayer):
    """Gemma 2's layer with Gemma4Attention, and with the layer's embeddings of the tokens as a third input."""

    ATTENTION = Gemma4Attention
    NORM = WideRMSNorm

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        self.layer_scalar = factory.empty(1)
        self.has_experts = shape.has_experts(index)
        if self.has_experts:
            self.moe = Gemma4MoE(shape, factory)
            self.post_feedforward_layernorm_1 = self.NORM(shape.hidden_size, shape.norm_eps, factory)
            self.pre_feedforward_layernorm_2 = self.NORM(shape.hidden_size, shape.norm_eps, factory)
            self.post_feedforward_layernorm_2 = self.NORM(shape.hidden_size, shape.norm_eps, factory)
        self.has_input = bool(shape.per_layer_size)
        if self.has_input:
            self.per_layer_input_gate = build_linear(shape, ["per_layer_input_gate"], factory, False, index)
            self.per_layer_projection = build_linear(shape, ["per_layer_projection"], factory, False, index)
            self.post_per_layer_input_norm = self.NORM(shape.hidden_size, shape.norm_eps, factory)
            self.activate = get_gated_op(shape.activation)

    @classmethod
    def build_mlp(cls, shape: ModelConfig, index: int, factory: ParamFactory) -> MLP:
        """See LlamaDecoderLayer.build_mlp."""
        return MLP(shape, factory, index)

    def __call__(self, hidden: Tensor, rope: tuple[Tensor, Tensor], kv_cache: Tensor, batch: ForwardBatch) -> Tensor:
        """Update the residual stream [num_tokens, hidden_size] in place and return it."""
        if not self.has_experts:
            return super().__call__(hidden, rope, kv_cache, batch)
        attention_output = self.self_attn(self.input_layernorm(hidden, batch), rope, kv_cache, batch)
        hidden.add_(self.post_attention_layernorm(attention_output, batch))
        mlp_output = self.mlp(self.pre_feedforward_layernorm(hidden, batch), batch)
        expert_output = self.moe.compute(hidden, self.pre_feedforward_layernorm_2(hidden, batch), batch)
        out = self.post_feedforward_layernorm_1(mlp_output, batch)
        out += self.post_feedforward_layernorm_2(expert_output, batch)
        return hidden.add_(self.post_feedforward_layernorm(out, batch))

    def add_layer_input(self, hidden: Tensor, layer_input: Tensor | None, batch: ForwardBatch) -> Tensor:
        """Add the layer's embeddings of the tokens, [num_tokens, per_layer_size], to the residual stream, and scale it,
        both in place."""
        if layer_input is not None:
            gated = self.activate(torch.cat((self.per_layer_input_gate(hidden, batch), layer_input), dim=-1))
            hidden.add_(self.post_per_layer_input_norm(self.per_layer_projection(gated, batch), batch))
        return hidden.mul_(self.layer_scalar)


class Gemma4ForCausalLM(Gemma2ForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Gemma4DecoderLayer
    layers: list[Gemma4DecoderLayer]  # type: ignore[assignment]

    def build_layers(self, factory: ParamFactory) -> None:
        """See CausalLM.build_layers."""
        super().build_layers(factory)
        shape, size = self.shape, self.shape.per_layer_size
        self.has_inputs = bool(size)
        if self.has_inputs:
            width = shape.num_layers * size
            self.embed_tokens_per_layer = factory.empty(num_vocab_rows(shape, factory), width)
            self.per_layer_embedding_scale = torch.tensor(size**0.5, dtype=factory.dtype).item()
            self.per_layer_model_projection = Linear(shape.hidden_size, {"per_layer_model_projection": width}, factory)
            self.per_layer_projection_norm = WideRMSNorm(size, shape.norm_eps, factory)
            self.outer_linears.append(self.per_layer_model_projection)

    def adapter_sites(self) -> Iterator[tuple[int, Linear | AdapterSite]]:
        """See CausalLM.adapter_sites. The projection before the layers has the layer index -1."""
        if self.has_inputs:
            yield -1, self.per_layer_model_projection
        yield from super().adapter_sites()

    def forward_layers(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """See CausalLM.forward_layers."""
        hidden = self.embed_inputs(batch)
        inputs = self._layer_inputs(hidden, batch) if self.has_inputs else [None] * len(self.layers)
        for layer, rope, cache, layer_batch, layer_input in zip(
            self.layers, *self.layer_arguments(hidden, batch, kv_cache), inputs, strict=True
        ):
            hidden = layer.add_layer_input(layer(hidden, rope, cache, layer_batch), layer_input, batch)
        return hidden

    def _layer_inputs(self, hidden: Tensor, batch: ForwardBatch) -> list[Tensor | None]:
        """Return the input of each layer, [num_tokens, per_layer_size].

        It combines the layer's embeddings of the tokens with a projection of `hidden`, the model's embeddings
        [num_tokens, hidden_size].
        """
        shape = self.shape
        table, size = self.embed_tokens_per_layer, (len(hidden), shape.num_layers, shape.per_layer_size)
        token_batch = batch
        if batch.images is not None:
            assert batch.images.rows is not None and shape.images is not None
            token_ids = batch.token_ids.index_fill(0, batch.images.rows, shape.images.pad_token_id)
            token_batch = replace(batch, token_ids=token_ids)
        tokens = parallel_embedding(token_batch, table, None, self.communicator).mul_(self.per_layer_embedding_scale)
        context = self.per_layer_model_projection(hidden, batch) * shape.hidden_size**-0.5
        context = self.per_layer_projection_norm(context.view(size), batch)
        return list(((context + tokens.view(size)) * 2**-0.5).unbind(1))

    def top_level_tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See CausalLM.top_level_tensors."""
        yield from super().top_level_tensors(prefix)
        if self.has_inputs:
            table = embedding_shard(self.embed_tokens_per_layer, self.communicator)
            yield f"{prefix}embed_tokens_per_layer.weight", table
            yield from self.per_layer_model_projection.tensors(prefix)
            yield from self.per_layer_projection_norm.tensors(f"{prefix}per_layer_projection_norm.")


def _normalize(x: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalization of [..., size] without a learned scale, computed in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)
