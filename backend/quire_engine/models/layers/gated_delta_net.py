# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet: linear attention with one state of fixed size per sequence."""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from quire_engine.kv_cache.state_cache import LayerStates, drop_replayed
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import ParamFactory, build_linear
from quire_engine.models.layers.module import Module
from quire_engine.models.layers.norm import RMSNorm
from quire_engine.weights.param_shard import LoadTarget, ParamShard
from quire_kernels import gated_delta_rule, gated_rms_norm, short_convolution
from quire_spec.model.attention.linear_attention_config import LinearAttentionConfig
from quire_spec.model.model_config import ModelConfig


class GatedRMSNorm(RMSNorm):
    """Normalizes each head of the output, and multiplies it with silu or the sigmoid of a gate."""

    ACTIVATION: ClassVar[str] = "silu"

    def apply_gate(self, x: Tensor, gate: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the gated output. `x` and `gate` are [num_tokens, num_heads, head_dim]."""
        out = gated_rms_norm(x, gate, self.weight, self.eps, self.ACTIVATION)
        if self.is_replaced(batch):
            assert batch.adapters is not None and self.adapters is not None
            for slot, rows in batch.adapters.iter_slot_tokens():
                if (transform := self.adapters.get_transform(slot, 0)) is not None:
                    out[rows] = gated_rms_norm(x[rows], gate[rows], transform[0], self.eps, self.ACTIVATION)
        return out


class GatedDeltaNet(Module):
    """A short convolution over queries, keys and values, the gated delta rule, and an output gate.

    With tensor parallelism, the key heads and the value heads are divided among the ranks. Subclasses define how the
    checkpoint merges the input projections.
    """

    QKVZ: ClassVar[tuple[str, ...]] = ("in_proj_qkv", "in_proj_z")
    """Names of the linear layers for queries, keys, values and the output gate."""
    BA: ClassVar[tuple[str, ...]] = ("in_proj_b", "in_proj_a")
    """Names of the linear layers for the learning rate and the decay."""

    def __init__(self, shape: ModelConfig, factory: ParamFactory) -> None:
        assert isinstance(shape.states, LinearAttentionConfig)
        self.config = config = shape.states
        self.in_proj_qkvz = build_linear(shape, [f"linear_attn.{name}" for name in self.QKVZ], factory, False)
        self.in_proj_ba = build_linear(shape, [f"linear_attn.{name}" for name in self.BA], factory, False)
        self.conv_weight = factory.empty(config.conv_size, config.kernel_size)
        # The exponent of A_log multiplies the logarithm of the decay, so rounding it would change all later tokens.
        self.a_log, self.dt_bias = (
            torch.empty(config.num_value_heads, dtype=torch.float32, device=factory.device) for _ in range(2)
        )
        self.norm = GatedRMSNorm(config.value_head_dim, shape.norm_eps, factory)
        self.out_proj = build_linear(shape, ["linear_attn.out_proj"], factory, False)
        self.communicator = factory.communicator

    def __call__(self, x: Tensor, states: LayerStates, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """Compute the output for the input [num_tokens, hidden_size], and update the states of the batch.

        If `residual` is given, add the output to it in place.
        """
        assert batch.states is not None
        config = self.config
        qkv, z, b, a = self.split(self.in_proj_qkvz(x, batch), self.in_proj_ba(x, batch))
        qkv, b, a = states.replay_drafts(batch.states, qkv, b, a)
        qkv = short_convolution(qkv, self.conv_weight, states.convolution, batch.states)
        out = gated_delta_rule(qkv, a, b, self.a_log, self.dt_bias, states.recurrence, batch.states)
        out = drop_replayed(batch.states, out)
        gate = z.view(len(x), config.num_value_heads, config.value_head_dim)
        return self.out_proj(self.norm.apply_gate(out, gate, batch).flatten(1), batch, residual)

    def split(self, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return qkv [num_tokens, conv_size], z [num_tokens, value_size], b and a [num_tokens, num_value_heads]."""
        size, num_heads = self.config.conv_size, self.config.num_value_heads
        return qkvz[:, :size], qkvz[:, size:], ba[:, :num_heads], ba[:, num_heads:]

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See Module.tensors."""
        full, (rank, size) = self.config, (0, 1)
        if self.communicator is not None:
            shard = self.communicator.shard
            assert isinstance(shard.model_config.states, LinearAttentionConfig)
            full, (rank, size) = shard.model_config.states, (shard.rank, shard.size)
        heads, channels = (full.feature_ranges(kind, rank, size) for kind in ("state_heads", "state_qkv"))
        for name, target in super().tensors(prefix):
            if target is self.conv_weight:
                yield f"{prefix}conv1d.weight", ParamShard(target, (full.conv_size, 1, full.kernel_size), channels)
            elif target is self.a_log or target is self.dt_bias:
                name = f"{prefix}{'A_log' if target is self.a_log else 'dt_bias'}"
                yield name, ParamShard(target, (full.num_value_heads,), heads)
            else:
                yield name, target


class InterleavedGatedDeltaNet(GatedDeltaNet):
    """The variant of Qwen3-Next: the features of each key head are adjacent in the input projections."""

    QKVZ = ("in_proj_qkvz",)
    BA = ("in_proj_ba",)

    def split(self, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See GatedDeltaNet.split."""
        num_tokens, config = len(qkvz), self.config
        values = config.value_size // config.num_key_heads
        by_head = qkvz.view(num_tokens, config.num_key_heads, -1)
        sizes = [config.key_head_dim, config.key_head_dim, values, values]
        q, k, v, z = torch.split(by_head, sizes, dim=2)
        b, a = (part.reshape(num_tokens, -1) for part in ba.view(num_tokens, config.num_key_heads, -1).chunk(2, dim=2))
        return torch.cat([part.flatten(1) for part in (q, k, v)], dim=1), z.flatten(1), b, a
