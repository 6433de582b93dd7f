# SPDX-License-Identifier: Apache-2.0
"""Gated activations in one pass: compute activation(gate) * up, where a merged projection has computed gate and up."""

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.gpu.launch_math import cdiv

_BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """See activation.silu_mul. It moves 3 * num_tokens * intermediate_size elements, because it reads gate and up and
    writes their product."""
    return _launch_gated(gate_up, "silu")


def relu_mul(gate_up: Tensor) -> Tensor:
    """See activation.get_gated_op. Moves the same number of bytes as `silu_mul`."""
    return _launch_gated(gate_up, "relu")


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See activation.get_gated_op. Moves the same number of bytes as `silu_mul`."""
    return _launch_gated(gate_up, "gelu")


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """See activation.get_gated_op. Moves the same number of bytes as `silu_mul`."""
    return _launch_gated(gate_up, "gelu_tanh")


def _launch_gated(gate_up: Tensor, name: str) -> Tensor:
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = gate_up.new_empty(num_tokens, width)
    grid = (num_tokens, cdiv(width, _BLOCK))
    _gated[grid](gate_up, out, gate_up.stride(0), width, NAME=name, BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit
def _gated(gate_up, out, stride, width, NAME: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(gate_up + row * stride + columns, mask=mask, other=0.0)
    up = tl.load(gate_up + row * stride + width + columns, mask=mask, other=0.0)
    # Intermediate results are rounded at the same points as in the reference.
    tl.store(out + row * width + columns, activate(gate.to(tl.float32), NAME).to(up.dtype) * up, mask=mask)


@triton.jit
def activate(x, NAME: tl.constexpr):
    """Apply the activation NAME to float32 numbers. NAME is "silu", "relu", "gelu" or "gelu_tanh"."""
    if NAME == "silu":
        y = x * tl.sigmoid(x)
    elif NAME == "relu":
        y = tl.maximum(x, 0.0)
    elif NAME == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # 0.5 (1 + tanh(z)) is sigmoid(2 z).
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y
