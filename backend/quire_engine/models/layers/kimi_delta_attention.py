# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention: Gated DeltaNet in which each element of a key has its own decay.

Source: Kimi Team, "Kimi Linear", 2025, https://arxiv.org/abs/2510.26692
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from quire_engine.kv_cache.state_cache import LayerStates, drop_replayed
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.gated_delta_net import GatedRMSNorm
from quire_engine.models.layers.linear import ParamFactory, build_linear
from quire_engine.models.layers.module import Module
from quire_engine.weights.param_shard import LoadTarget, ParamShard
from quire_kernels import gated_delta_rule, short_convolution
from quire_spec.model.attention.kimi_delta_config import KimiDeltaConfig
from quire_spec.model.model_config import ModelConfig

_CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")


class SigmoidGatedRMSNorm(GatedRMSNorm):
    """Normalizes each head of the output, and multiplies it with the sigmoid of a gate."""

    ACTIVATION = "sigmoid"


class KimiDeltaAttention(Module):
    """A short convolution over queries, keys and values, the delta rule, and an output gate.

    The decays and the output gate are projected from latent vectors. With tensor parallelism, the heads are divided
    among the ranks, and each rank has the whole latent vectors.
    """

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        assert isinstance(shape.states, KimiDeltaConfig)
        self.config = config = shape.states
        self.qkv_proj, self.b_proj, self.latents_proj, self.f_b_proj, self.g_b_proj, self.o_proj = (
            build_linear(shape, [f"self_attn.{name}" for name in names], factory, False, index)
            for names in (
                ("q_proj", "k_proj", "v_proj"),
                ("b_proj",),
                ("forget_gate.f_a_proj", "g_a_proj"),
                ("forget_gate.f_b_proj",),
                ("g_b_proj",),
                ("o_proj",),
            )
        )
        self.conv_weight = factory.empty(config.conv_size, config.kernel_size)
        # See GatedDeltaNet.
        self.a_log, self.dt_bias = (
            torch.empty(size, dtype=torch.float32, device=factory.device)
            for size in (config.num_value_heads, config.key_size)
        )
        self.o_norm = SigmoidGatedRMSNorm(config.value_head_dim, shape.norm_eps, factory)
        self.communicator = factory.communicator

    def __call__(self, x: Tensor, states: LayerStates, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """See StateLayer."""
        assert batch.states is not None
        config = self.config
        decay_latent, gate_latent = self.latents_proj(x, batch).chunk(2, dim=1)
        decays, gate = self.f_b_proj(decay_latent, batch), self.g_b_proj(gate_latent, batch)
        qkv, b, a = states.replay_drafts(batch.states, self.qkv_proj(x, batch), self.b_proj(x, batch), decays)
        qkv = short_convolution(qkv, self.conv_weight, states.convolution, batch.states)
        out = gated_delta_rule(qkv, a, b, self.a_log, self.dt_bias, states.recurrence, batch.states)
        out = drop_replayed(batch.states, out)
        gate = gate.view(len(x), config.num_value_heads, config.value_head_dim)
        return self.o_proj(self.o_norm.apply_gate(out, gate, batch).flatten(1), batch, residual)

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See Module.tensors."""
        full, (rank, size) = self.config, (0, 1)
        if self.communicator is not None:
            shard = self.communicator.shard
            assert isinstance(shard.model_config.states, KimiDeltaConfig)
            full, (rank, size) = shard.model_config.states, (shard.rank, shard.size)
        (heads,), features = (
            full.feature_ranges("state_heads", rank, size),
            full.feature_ranges("state_values", rank, size),
        )
        for name, target in super().tensors(prefix):
            if target is self.conv_weight:
                for part, weight in zip(_CONVOLUTIONS, self.conv_weight.chunk(3), strict=True):
                    whole = full.value_size, 1, full.kernel_size
                    yield f"{prefix}{part}.weight", ParamShard(weight, whole, features)
            elif target is self.a_log:
                num_heads = full.num_value_heads
                yield f"{prefix}A_log", ParamShard(self.a_log, (1, 1, num_heads, 1), (heads,))
            elif target is self.dt_bias:
                yield f"{prefix}dt_bias", ParamShard(self.dt_bias, (full.key_size,), features)
            else:
                yield name, target
