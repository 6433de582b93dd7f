# SPDX-License-Identifier: Apache-2.0
"""Gated short convolution: a state of fixed size per sequence, which is only the last inputs of the convolution."""

from collections.abc import Iterator

from torch import Tensor

from quire_engine.kv_cache.state_cache import LayerStates, drop_replayed
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import ParamFactory, build_linear
from quire_engine.models.layers.module import Module
from quire_engine.weights.param_shard import LoadTarget, ParamShard
from quire_kernels import short_convolution
from quire_spec.model.attention.short_conv_config import ShortConvConfig
from quire_spec.model.model_config import ModelConfig


class ShortConv(Module):
    """A projection to two gates and an input, a short convolution of the gated input, and the second gate.

    With tensor parallelism, the features are divided among the ranks.
    """

    def __init__(self, shape: ModelConfig, factory: ParamFactory) -> None:
        assert isinstance(shape.states, ShortConvConfig)
        config = shape.states
        self.in_proj = build_linear(shape, ["conv.in_proj"], factory, config.has_bias)
        self.weight = factory.empty(config.conv_size, config.kernel_size)
        self.bias = factory.empty(config.conv_size) if config.has_bias else None
        self.out_proj = build_linear(shape, ["conv.out_proj"], factory, config.has_bias)
        self.communicator = factory.communicator

    def __call__(self, x: Tensor, states: LayerStates, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """See StateLayer."""
        assert batch.states is not None
        input_gate, output_gate, inputs = self.in_proj(x, batch).chunk(3, dim=1)
        (inputs,) = states.replay_drafts(batch.states, input_gate * inputs)
        out = short_convolution(inputs, self.weight, states.convolution, batch.states, self.bias, has_silu=False)
        return self.out_proj(output_gate * drop_replayed(batch.states, out), batch, residual)

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See Module.tensors."""
        size = len(self.weight)
        rows: tuple[range, ...] = (range(size),)
        if self.communicator is not None:
            shard = self.communicator.shard
            assert isinstance(shard.model_config.states, ShortConvConfig)
            size, rows = shard.model_config.states.conv_size, shard.input_ranges("conv.out_proj")
        for name, target in super().tensors(prefix):
            if target is self.weight:
                yield f"{prefix}conv.weight", ParamShard(target, (size, 1, target.shape[1]), rows)
            elif target is self.bias:
                yield f"{prefix}conv.bias", ParamShard(target, (size,), rows)
            else:
                yield name, target
