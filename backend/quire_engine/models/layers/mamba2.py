# SPDX-License-Identifier: Apache-2.0
"""Mamba-2: a recurrence with one state of fixed size per sequence."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_engine.kv_cache.state_cache import LayerStates, drop_replayed
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import ParamFactory, build_linear
from quire_engine.models.layers.module import Module
from quire_engine.models.layers.norm import RMSNorm
from quire_engine.weights.param_shard import LoadTarget, ParamShard
from quire_kernels import Mamba2Params, gated_group_norm, mamba2_recurrence, short_convolution
from quire_spec.model.attention.mamba2_config import Mamba2Config
from quire_spec.model.model_config import ModelConfig


class GatedGroupNorm(RMSNorm):
    """Applies a gate, and normalizes groups of features; see `gated_group_norm`."""

    def __init__(self, config: Mamba2Config, eps: float, factory: ParamFactory) -> None:
        super().__init__(config.inner_size, eps, factory)
        self.num_groups, self.gates_first = config.num_groups, config.gates_first
        self.communicator = factory.communicator
        if self.communicator is not None:
            assert isinstance(self.communicator.shard.model_config.states, Mamba2Config)
            if self.communicator.shard.model_config.states.num_groups % self.communicator.shard.size == 0:
                self.communicator = None  # no group is divided among ranks

    def apply_gate(self, x: Tensor, gate: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the gated output. `x` and `gate` are [num_tokens, inner_size]."""
        out = self._apply(x, gate, self.weight)
        if self.is_replaced(batch):
            assert batch.adapters is not None and self.adapters is not None
            for slot, rows in batch.adapters.iter_slot_tokens():
                if (transform := self.adapters.get_transform(slot, 0)) is not None:
                    out[rows] = self._apply(x[rows], gate[rows], transform[0])
        return out

    def _apply(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        if self.communicator is None:
            return gated_group_norm(x, gate, weight, self.eps, self.num_groups, self.gates_first)
        # The only group is divided equally among the ranks.
        wide, gates = x.float(), F.silu(gate.float())
        wide = wide * gates if self.gates_first else wide
        squares = self.communicator.all_reduce(wide.square().mean(-1, keepdim=True)) / self.communicator.shard.size
        out = wide * (squares + self.eps).rsqrt() * weight.float()
        return (out if self.gates_first else out * gates).to(x.dtype)


class Mamba2(Module):
    """A projection to a gate, x, B, C and step sizes; a short convolution of x, B and C; the recurrence; the gate.

    With tensor parallelism, the heads are divided among the ranks.
    """

    def __init__(
        self, shape: ModelConfig, factory: ParamFactory, path: str, multipliers: Sequence[float] | None = None
    ) -> None:
        """Allocate the parameters.

        Args:
            shape: the configuration of this rank's shard.
            factory: allocates the parameters.
            path: path in the decoder layer.
            multipliers: factors of the parts of the input projection; see Mamba2Config.projection_sizes. None: 1.
        """
        assert isinstance(shape.states, Mamba2Config)
        self.config = config = shape.states
        self.path = path
        self.in_proj = build_linear(shape, [f"{path}.in_proj"], factory, config.has_bias)
        self.conv_weight = factory.empty(config.conv_size, config.kernel_size)
        self.conv_bias = factory.empty(config.conv_size) if config.has_conv_bias else None
        # The exponent of A_log multiplies the logarithm of the decay, so rounding it would change all later tokens.
        a_log, dt_bias, d = (torch.empty(config.num_heads, dtype=torch.float32, device=factory.device) for _ in "adD")
        self.params = Mamba2Params(a_log, dt_bias, d, config.num_groups, config.dt_limits)
        self.norm = GatedGroupNorm(config, shape.norm_eps, factory) if config.has_norm else None
        self.out_proj = build_linear(shape, [f"{path}.out_proj"], factory, config.has_output_bias)
        self.communicator = factory.communicator
        self.multipliers: Tensor | None = None
        if multipliers is not None:
            parts = zip(multipliers, config.projection_sizes, strict=True)
            factors = [torch.full((size,), factor, dtype=factory.dtype) for factor, size in parts]
            self.multipliers = torch.cat(factors).to(factory.device)

    def __call__(self, x: Tensor, states: LayerStates, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """See StateLayer."""
        assert batch.states is not None
        config, projected = self.config, self.in_proj(x, batch)
        if self.multipliers is not None:
            projected = projected * self.multipliers
        gate, xbc, dt = torch.split(projected, [config.inner_size, config.conv_size, config.num_heads], dim=1)
        xbc, dt = states.replay_drafts(batch.states, xbc, dt)
        xbc = short_convolution(xbc, self.conv_weight, states.convolution, batch.states, self.conv_bias)
        out = mamba2_recurrence(xbc, dt, self.params, states.recurrence, batch.states).flatten(1)
        out = drop_replayed(batch.states, out)
        if self.norm is None:
            out = gated_group_norm(out, gate, None, 0.0, 1, True)
        else:
            out = self.norm.apply_gate(out, gate, batch)
        return self.out_proj(out, batch, residual)

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See Module.tensors."""
        full, rank, size = self.config, 0, 1
        if self.communicator is not None:
            shard = self.communicator.shard
            assert isinstance(shard.model_config.states, Mamba2Config)
            full, rank, size = shard.model_config.states, shard.rank, shard.size
        channels, heads, values = (
            full.feature_ranges(kind, rank, size) for kind in ("state_xbc", "state_heads", "state_values")
        )
        yield from self.in_proj.tensors(prefix)
        shape = full.conv_size, 1, full.kernel_size
        yield f"{prefix}conv1d.weight", ParamShard(self.conv_weight, shape, channels)
        if self.conv_bias is not None:
            yield f"{prefix}conv1d.bias", ParamShard(self.conv_bias, (full.conv_size,), channels)
        for name, tensor in (("A_log", self.params.a_log), ("dt_bias", self.params.dt_bias), ("D", self.params.d)):
            yield f"{prefix}{name}", ParamShard(tensor, (full.num_heads,), heads)
        if self.norm is not None:
            yield f"{prefix}norm.weight", ParamShard(self.norm.weight, (full.inner_size,), values)
        yield from self.out_proj.tensors(prefix)
