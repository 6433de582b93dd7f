# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation in one pass. A variant of the operation adds the residual first, in the same pass."""

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.gpu.launch_math import cdiv, next_power_of_2

_MIN_ELEMENTS_PER_PROGRAM = 2048
"""Minimum number of elements that a program processes. Short rows, such as heads, are combined until a program has this
many elements.
"""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See norm.rms_norm. Moves 2 * num_rows * size elements, because it reads and writes each row once."""
    out = x.new_empty(x.shape)
    _launch(x, x, out, weight, eps, add_residual=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See norm.add_rms_norm. Moves 4 * num_rows * size elements, because it reads x and the residual, and writes the
    residual and the normalised sum.
    """
    out = x.new_empty(x.shape)
    _launch(x, residual, out, weight, eps, add_residual=True)
    return out


def _launch(x: Tensor, residual: Tensor, out: Tensor, weight: Tensor, eps: float, add_residual: bool) -> None:
    size, num_inner = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    assert x.dim() in (2, 3) and x.stride(-1) == 1 and (not add_residual or residual.is_contiguous())
    num_rows = x.shape[0] * num_inner
    block = next_power_of_2(size)
    rows = max(1, _MIN_ELEMENTS_PER_PROGRAM // block)
    _rms_norm[(cdiv(num_rows, rows),)](
        x,
        residual,
        weight,
        out,
        num_rows,
        num_inner,
        x.stride(0),
        x.stride(1) if num_inner > 1 else 0,
        eps,
        SIZE=size,
        ROWS=rows,
        BLOCK=block,
        ADDS=add_residual,
        num_warps=min(max(rows * block // 512, 1), 16),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x,
    residual,
    weight,
    out,
    num_rows,
    inner,
    x_stride,
    inner_stride,
    eps,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (columns < SIZE)
    offsets = (rows // inner) * x_stride + (rows % inner) * inner_stride + columns
    values = tl.load(x + offsets, mask=mask, other=0.0)
    if ADDS:
        stream = residual + rows * SIZE + columns
        values = (tl.load(stream, mask=mask, other=0.0).to(tl.float32) + values.to(tl.float32)).to(values.dtype)
        tl.store(stream, values, mask=mask)
    wide = values.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1)[:, None] / SIZE
    # Intermediate results are rounded at the same points as in the reference.
    normed = (wide * tl.rsqrt(mean + eps)).to(values.dtype)
    scale = tl.load(weight + columns, mask=columns < SIZE, other=0.0)
    tl.store(out + rows * SIZE + columns, normed * scale, mask=mask)
