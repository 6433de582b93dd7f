# SPDX-License-Identifier: Apache-2.0
"""Gated feed-forward layers."""

from typing import ClassVar

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import ParamFactory, build_linear
from quire_engine.models.layers.module import Module
from quire_kernels import get_gated_op
from quire_spec.model.model_config import ModelConfig


class MLP(Module):
    """Gated feed-forward layer. Subclasses define the names of the linear layers in it."""

    GATE_UP: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    """Names of the gate and up layers; a single name if the checkpoint has one fused layer."""

    def __init__(self, shape: ModelConfig, factory: ParamFactory) -> None:
        self.gate_up_proj = build_linear(shape, [f"mlp.{name}" for name in self.GATE_UP], factory, shape.mlp_bias)
        self.down_proj = build_linear(shape, ["mlp.down_proj"], factory, shape.mlp_bias)
        self.activate = get_gated_op(shape.activation)

    def __call__(self, x: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """Compute the output for the input [num_tokens, hidden_size]. If `residual` is given, add the output to it in
        place."""
        return self.down_proj(self.activate(self.gate_up_proj(x, batch)), batch, residual)
