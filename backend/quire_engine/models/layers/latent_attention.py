# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA), with the projection of keys and values absorbed into queries and outputs.

A head's key is W_k c and its value is W_v c, where c is the latent vector of a token. So a query q attends to the
latent vectors themselves with W_k^T q, and the output is W_v times the weighted sum of latent vectors. All heads share
one row of the KV cache for each token, and a row is the key and the value.

Source: DeepSeek-AI, DeepSeek-V2, 2024.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import Linear, ParamFactory, build_linear
from quire_engine.models.layers.module import Module
from quire_engine.models.layers.norm import RMSNorm
from quire_engine.models.layers.rotary import query_factors
from quire_kernels import HugePageArena, apply_rope, paged_attention, write_kv
from quire_spec.model.model_config import ModelConfig

_NORM_EPS = 1e-6
"""The norms of latent vectors always have this epsilon. rms_norm_eps of config.json applies to the other norms."""


class KeyValueProjection(Linear):
    """The projection of latent vectors to the keys and values of all heads. It is never applied to latent vectors: the
    attention reads its parts, and those of adapters."""

    is_absorbed = True

    @classmethod
    def build(cls, shape: ModelConfig, factory: ParamFactory, layer: int) -> Self:
        """Allocate the weight of this rank."""
        linear = build_linear(shape, ["self_attn.kv_b_proj"], factory, False, layer)
        weight = linear.weight
        assert isinstance(weight, Tensor)
        return cls(linear.in_features, linear.slices, factory, weight=weight, shards=linear.shards)

    def pack(self, arena: HugePageArena) -> None:
        """See Linear. The weight stays as it is."""

    def by_head(self, num_heads: int) -> Tensor:
        """Return the weight [num_heads, plain_dim + value_dim, kv_rank]."""
        assert isinstance(self.weight, Tensor)
        return self.weight.view(num_heads, -1, self.in_features)

    def adapters_of(
        self, batch: ForwardBatch, num_heads: int
    ) -> Iterator[tuple[slice | Tensor, tuple[Tensor, Tensor] | None, Tensor | None]]:
        """Yield the tokens of each adapter, its A [rank, kv_rank] and B [num_heads, plain_dim + value_dim, rank], and
        its scales and addends of the base product [2, num_heads, plain_dim + value_dim]."""
        if batch.adapters is None or self.adapters is None or not self.adapters.applies_to(batch.adapters):
            return
        if batch.adapters.active_slots is None:
            # A CUDA graph is captured; steps with such adapters do not use it.
            return
        for slot, rows in batch.adapters.iter_slot_tokens():
            pair, transform = self.adapters.get_matrices(slot, 0), self.adapters.get_transform(slot, 0)
            if pair is None and transform is None:
                continue
            matrices = None if pair is None else (pair[0], pair[1].t().reshape(num_heads, -1, len(pair[1])))
            yield rows, matrices, None if transform is None else transform.view(2, num_heads, -1)


class LatentAttention(Module):
    """Attention to the latent vectors in the paged KV cache."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        mla = shape.mla
        assert mla is not None
        self.mla, self.rope = mla, shape.ropes[index]
        self.num_heads, self.scale = shape.num_heads, shape.attention_scale
        if mla.query_rank:
            self.q_a_proj = build_linear(shape, ["self_attn.q_a_proj"], factory, shape.attention_bias, index)
            self.q_a_layernorm = RMSNorm(mla.query_rank, _NORM_EPS, factory)
            self.q_b_proj = build_linear(shape, ["self_attn.q_b_proj"], factory, False, index)
        else:
            self.q_proj = build_linear(shape, ["self_attn.q_proj"], factory, False, index)
        self.kv_a_proj_with_mqa = build_linear(
            shape, ["self_attn.kv_a_proj_with_mqa"], factory, shape.attention_bias, index
        )
        self.kv_a_layernorm = RMSNorm(mla.kv_rank, _NORM_EPS, factory)
        # The engine reads parts of the weight, so it is neither quantized nor packed.
        plain_factory = replace(factory, quantization=None, checkpoint=None)
        self.kv_b_proj = KeyValueProjection.build(shape, plain_factory, index)
        self.o_proj = build_linear(shape, ["self_attn.o_proj"], factory, shape.output_bias, index)

    def __call__(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        kv_cache: Tensor,
        batch: ForwardBatch,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See RotaryAttention.__call__."""
        mla, num_tokens = self.mla, len(x)
        if mla.query_rank:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x, batch), batch), batch)
        else:
            queries = self.q_proj(x, batch)
        queries = queries.view(num_tokens, self.num_heads, -1)
        plain, rotary = queries[..., : mla.plain_dim], queries[..., mla.plain_dim :]
        row = self.kv_a_proj_with_mqa(x, batch)
        latent, key = row[:, : mla.kv_rank], row[:, mla.kv_rank :]
        rotated = self._rotate(torch.cat((rotary, key[:, None]), dim=1), rope)
        row = torch.cat((self.kv_a_layernorm(latent, batch)[:, None], rotated[:, -1:]), dim=-1)
        write_kv(row, row, kv_cache, batch.addresses)
        queries = torch.cat((self._absorb(plain, batch), rotated[:, :-1]), dim=-1)
        if self.rope.query_scaling_beta:
            queries = queries * query_factors(self.rope, batch.positions).to(x.dtype)[:, None, None]
        output = paged_attention(queries, kv_cache, batch.attention, self.scale, value_dim=mla.kv_rank)
        values = self._expand(output, batch)
        return self.o_proj(values.reshape(num_tokens, -1), batch, residual)

    def _rotate(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate [num_tokens, num_heads + 1, rotary_dim]. The order of the result's elements does not matter, because
        it is the same in queries and keys."""
        if self.mla.is_interleaved:
            x = x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
        return apply_rope(x, *rope)

    def _absorb(self, plain: Tensor, batch: ForwardBatch) -> Tensor:
        """Return what the unrotated parts of the queries [num_tokens, num_heads, plain_dim] attend with, as
        [num_tokens, num_heads, kv_rank]."""
        weight, dim = self.kv_b_proj.by_head(self.num_heads), self.mla.plain_dim
        base, changes = plain, []
        for rows, matrices, transform in self.kv_b_proj.adapters_of(batch, self.num_heads):
            if transform is not None:
                # Addends of the keys are the same for all tokens of the context, so they do not change the weights.
                base = base.clone() if base is plain else base
                base[rows] *= 1 + transform[0, :, :dim]
            if matrices is not None:
                a, b = matrices
                changes.append((rows, torch.einsum("thd,hdk->thk", plain[rows], b[:, :dim]) @ a))
        out = torch.bmm(base.transpose(0, 1), weight[:, :dim]).transpose(0, 1)
        for rows, change in changes:
            out[rows] += change
        return out

    def _expand(self, output: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the values [num_tokens, num_heads, value_dim] from weighted sums of latent vectors, [num_tokens,
        num_heads, kv_rank]."""
        weight, dim = self.kv_b_proj.by_head(self.num_heads), self.mla.plain_dim
        values = torch.bmm(output.transpose(0, 1), weight[:, dim:].transpose(1, 2)).transpose(0, 1)
        for rows, matrices, transform in self.kv_b_proj.adapters_of(batch, self.num_heads):
            if transform is not None:
                scale, addend = transform[:, :, dim:]
                values[rows] = values[rows] * (1 + scale) + addend
            if matrices is not None:
                a, b = matrices
                values[rows] += torch.einsum("thk,hdk->thd", output[rows] @ a.t(), b[:, dim:])
        return values
