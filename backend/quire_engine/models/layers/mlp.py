# SPDX-License-Identifier: Apache-2.0
"""Feed-forward layers."""

from typing import ClassVar

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import ParamFactory, build_linear
from quire_engine.models.layers.module import Module
from quire_kernels import ACTIVATIONS, get_gated_op
from quire_spec.model.model_config import ModelConfig


class MLP(Module):
    """Gated feed-forward layer. Subclasses define the names of the linear layers in it."""

    PATH: ClassVar[str] = "mlp"
    """Path of the layer in a decoder layer, unless the constructor gets another one."""
    GATE_UP: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    """Names of the gate and up layers; a single name if the checkpoint has one fused layer."""
    DOWN: ClassVar[str] = "down_proj"

    def __init__(self, shape: ModelConfig, factory: ParamFactory, layer: int = 0, path: str = "") -> None:
        """`layer` is needed only if layers differ in size."""
        path = path or self.PATH
        gate_up = [f"{path}.{name}" for name in self.GATE_UP]
        self.gate_up_proj = build_linear(shape, gate_up, factory, shape.mlp_bias, layer)
        self.down_proj = build_linear(shape, [f"{path}.{self.DOWN}"], factory, shape.mlp_bias, layer)
        self.activate = get_gated_op(shape.activation)

    def __call__(self, x: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """Compute the output for the input [num_tokens, hidden_size]. If `residual` is given, add the output to it in
        place."""
        return self.down_proj(self.activate(self.gate_up_proj(x, batch)), batch, residual)


class UngatedMLP(Module):
    """Feed-forward layer without a gate. Subclasses define the names of the linear layers in it."""

    UP: ClassVar[str] = "up_proj"
    DOWN: ClassVar[str] = "down_proj"

    def __init__(self, shape: ModelConfig, factory: ParamFactory, path: str = "mlp") -> None:
        """`path` is the path of the layer in a decoder layer."""
        self.up = build_linear(shape, [f"{path}.{self.UP}"], factory, shape.mlp_bias)
        self.down = build_linear(shape, [f"{path}.{self.DOWN}"], factory, shape.mlp_bias)
        self.activation = shape.activation

    def __call__(self, x: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """See MLP."""
        return self.down(self.activate(self.up(x, batch)), batch, residual)

    def activate(self, x: Tensor) -> Tensor:
        """Apply the activation function to [num_tokens, intermediate_size]."""
        return ACTIVATIONS[self.activation](x)
