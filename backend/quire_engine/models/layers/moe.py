# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts in place of an MLP. Adapters cannot change it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.module import Module
from quire_engine.weights.param_shard import LoadTarget, ParamShard
from quire_kernels import ExpertWeights, HugePageArena, fused_experts, linear, pack_experts, pack_weight, topk_softmax
from quire_spec.errors import ConfigError
from quire_spec.model.model_config import ModelConfig


class MoE(Module):
    """A router chooses experts for each token, and the output is the weighted sum of the experts' outputs. Each expert
    is a gated MLP. With tensor parallelism each rank has a part of the intermediate features of every expert.
    Subclasses define the names in a checkpoint with one tensor per expert and projection.
    """

    PATH: ClassVar[str] = "mlp"
    """Path of this module in a layer of a checkpoint."""
    EXPERT: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, shape: ModelConfig, factory: ParamFactory) -> None:
        """Allocate the parameters.

        Args:
            shape: the configuration of this rank's shard.
            factory: allocates the parameters.

        Raises:
            ConfigError: `quantization` is set, which experts do not support.
        """
        assert shape.moe is not None
        if factory.quantization is not None:
            raise ConfigError(
                f"quantization: {factory.quantization!r} is not supported for the experts of {shape.architecture}; "
                "remove quantization"
            )
        self.config, hidden, inner = shape.moe, shape.hidden_size, shape.moe.intermediate_size
        self.router = factory.empty(self.config.num_experts, hidden)
        self.router_bias: Tensor | None = None
        self.experts = ExpertWeights(
            gate_up=factory.empty(self.config.num_experts, 2 * inner, hidden),
            down=factory.empty(self.config.num_experts, hidden, inner),
            gate_up_bias=None,
            down_bias=None,
            activation=shape.activation,
        )
        self.communicator = factory.communicator

    def __call__(self, x: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """Return the output for [num_tokens, hidden_size]. If `residual` is given, add the output to it in place."""
        ids, weights = topk_softmax(linear(x, self.router, self.router_bias), self.config.top_k, self.config.normalize)
        if self.communicator is None:
            return fused_experts(x, ids, weights, self.experts, residual)
        # Only rank 0 adds the output bias.
        experts = replace(self.experts, down_bias=None) if self.communicator.shard.rank else self.experts
        out = self.communicator.all_reduce(fused_experts(x, ids, weights, experts))
        return out if residual is None else residual.add_(out)

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See Module.tensors."""
        prefix = f"{prefix.removesuffix('mlp.')}{self.PATH}."
        yield f"{prefix}gate.weight", self.router
        gate_name, up_name, down_name = self.EXPERT
        for expert, (gate_up, down) in enumerate(zip(self.experts.gate_up, self.experts.down, strict=True)):
            gate, up = gate_up.chunk(2)
            for name, weight in ((gate_name, gate), (up_name, up)):
                yield f"{prefix}experts.{expert}.{name}.weight", self._shard(weight, is_down=False)
            yield f"{prefix}experts.{expert}.{down_name}.weight", self._shard(down, is_down=True)

    def pack(self, arena: HugePageArena) -> None:
        """See Module.pack."""
        self.router = pack_weight(self.router, arena)
        self.experts = pack_experts(self.experts, arena)

    def _shard(self, weight: Tensor, *, is_down: bool) -> LoadTarget:
        """Return the part of a projection in the checkpoint that fills this rank's weight."""
        if self.communicator is None:
            return weight
        shard = self.communicator.shard
        assert shard.model_config.moe is not None
        hidden, inner = shard.model_config.hidden_size, shard.model_config.moe.intermediate_size
        if is_down:
            return ParamShard(weight, (hidden, inner), (range(hidden),), shard.expert_range)
        return ParamShard(weight, (inner, hidden), (shard.expert_range,))
