# SPDX-License-Identifier: Apache-2.0
"""Activation functions of MLPs. They have the names that Hugging Face checkpoints use."""

import functools
from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from quire_kernels import cpu_native
from quire_kernels.dispatch import Op

_gelu_tanh = functools.partial(F.gelu, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square_()


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu2": _relu2,
}
"""Elementwise activations by name."""


@Op
def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up. One merged projection has computed both gate and up.

    Args:
        gate_up: [num_tokens, 2 * intermediate_size], gate first, any float dtype.

    Returns:
        [num_tokens, intermediate_size], dtype of gate_up.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


silu_mul.register_lazy("cuda", "own", "quire_kernels.gpu.activation")


@silu_mul.register("cpu")
def _silu_mul_cpu(gate_up: Tensor) -> Tensor:
    return _gated_cpu(gate_up, silu_mul, "quire_silu_mul")


def _gated_cpu(gate_up: Tensor, op: Op[[], Tensor], function: str) -> Tensor:
    """Compute each row with a compiled kernel. torch's results can depend on where its threads divide the rows."""
    if not cpu_native.supports(gate_up) or not gate_up.is_contiguous():
        return op.reference(gate_up)
    rows, width = gate_up.shape
    out = gate_up.new_empty(rows, width // 2)
    getattr(cpu_native.get_library(), function)(gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
    return out


def _make_gated_op(name: str, activation: Callable[[Tensor], Tensor]) -> Op[[], Tensor]:
    def gated_activation(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate).mul_(up)

    op = Op(gated_activation, name)
    op.register_lazy("cuda", "own", "quire_kernels.gpu.activation")
    return op


relu_mul = _make_gated_op("relu_mul", F.relu)
gelu_mul = _make_gated_op("gelu_mul", F.gelu)
gelu_tanh_mul = _make_gated_op("gelu_tanh_mul", _gelu_tanh)


@gelu_tanh_mul.register("cpu")
def _gelu_tanh_mul_cpu(gate_up: Tensor) -> Tensor:
    return _gated_cpu(gate_up, gelu_tanh_mul, "quire_gelu_tanh_mul")


@Op
def softcap(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap), in place.

    Args:
        logits: [num_rows, vocab_size], any float dtype.
        cap: greater than 0.
    """
    return logits.div_(cap).tanh_().mul_(cap)


@softcap.register("cpu")
def _softcap_cpu(logits: Tensor, cap: float) -> Tensor:
    if not cpu_native.supports(logits):
        return softcap.reference(logits, cap)
    cpu_native.get_library().quire_softcap(logits.data_ptr(), logits.stride(0), *logits.shape, cap)
    return logits


_GATED_OPS = {
    "silu": silu_mul,
    "relu": relu_mul,
    "gelu": gelu_mul,
    "gelu_new": gelu_tanh_mul,
    "gelu_pytorch_tanh": gelu_tanh_mul,
}


def get_gated_op(name: str) -> Op[[], Tensor]:
    """Return the operation that computes activation(gate) * up for an activation. `silu_mul` describes its tensors."""
    return _GATED_OPS[name]
