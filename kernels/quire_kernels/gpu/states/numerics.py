# SPDX-License-Identifier: Apache-2.0
"""Functions of the kernels of this folder: softplus, and matrix products whose result is as exact as in float32."""

import torch
import triton
import triton.language as tl

_BF16 = tl.constexpr("bf16")
_TF32X3 = tl.constexpr("tf32x3")


def dot_precision(dtype: torch.dtype) -> str:
    """Return how the kernels multiply, for inputs of `dtype`.

    A factor is the sum of two numbers that matrix units can multiply. They are of bfloat16, with 16 significant bits
    (`bf16`, and `bf16x3` for float16, whose values are sums of two, too), or of TF32, with 22 bits, for float32.
    """
    return {torch.bfloat16: "bf16", torch.float16: "bf16x3"}.get(dtype, "tf32x3")


@triton.jit
def softplus(x):
    """Return log(1 + e^x), without overflow. Above 20, it is x, as in torch."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def load_inputs(ptrs, mask, PRECISION: tl.constexpr):
    """Return a tile of inputs for `dot_inputs`: as bfloat16 if they are, or else as float32."""
    x = tl.load(ptrs, mask=mask, other=0.0)
    if PRECISION != _BF16:
        x = x.to(tl.float32)
    return x


@triton.jit
def split_float(x):
    """Return two matrices of bfloat16 whose sum has the first 16 significant bits of x."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def dot_two_inputs(x, y, PRECISION: tl.constexpr):
    """Return the matrix product of two tiles of inputs."""
    if PRECISION == _BF16:
        result = tl.dot(x, y)
    else:
        result = dot_floats(x, y, PRECISION)
    return result


@triton.jit
def dot_inputs(inputs, x, PRECISION: tl.constexpr):
    """Return the matrix product of a tile of inputs and of float32 values.

    bfloat16 inputs are exact, so two products of bfloat16 are enough, and the inputs need no registers.
    """
    if PRECISION == _BF16:
        high, low = split_float(x)
        result = tl.dot(inputs, low, tl.dot(inputs, high))
    else:
        result = dot_floats(inputs, x, PRECISION)
    return result


@triton.jit
def dot_floats(x, y, PRECISION: tl.constexpr):
    """Return the matrix product of two matrices of float32 values."""
    if PRECISION != _TF32X3:
        x_high, x_low = split_float(x)
        y_high, y_low = split_float(y)
        result = tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))
    else:
        result = tl.dot(x, y, input_precision=PRECISION)
    return result
