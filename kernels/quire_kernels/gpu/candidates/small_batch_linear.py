# SPDX-License-Identifier: Apache-2.0
"""Matrix products for a small number of tokens.

The same kernel also computes the norm before the product and the epilogue after it.

With 1 to 8 tokens, the time depends on how fast the weights are read. A program computes 16 outputs, and reads all
inputs for them. Each program requests its first weights before it waits for the previous kernel. While that kernel
ends, the memory is therefore already busy (see pdl.py). Every program waits for the previous kernel before it reads
inputs or writes outputs.

The norm needs no separate pass. The kernel multiplies the weights by x * g instead of x / rms * g, and divides the
result by rms at the end. The sums are computed in a fixed order, so the same batch always gives the same bits.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.gpu.candidates.norm_linear import rms_norm_linear as rms_norm_linear_op
from quire_kernels.gpu.launch_math import cdiv
from quire_kernels.gpu.pdl import supports_pdl
from quire_kernels.linear import LinearWeight
from quire_kernels.linear import linear as linear_op

MAX_TOKENS = 16
"""Number of rows in a tile. The matrix instructions of a GPU need at least this many rows."""
_COLUMNS = 16
_DEPTH = 256
_STAGES = 4
_WARPS = 4
_PREFETCHED = 1024
"""Before a program waits for the previous kernel, it requests the first weights of each of its outputs: the weights of
this many inputs.

These weights are 32 KB for each program. A launch with 6,144 outputs requests 12 MB in this way, which is a quarter of
the L2 cache.
"""


def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """See linear.linear. Each weight is read once. If there are more than 16 tokens, PyTorch computes the product.
    Quantized weights have their own kernels.
    """
    if len(x) > MAX_TOKENS or not isinstance(weight, Tensor):
        return linear_op.get("cuda", "torch")(x, weight, bias, residual)
    out = x.new_empty(len(x), len(weight)) if residual is None else residual
    assert out.is_contiguous()
    _launch(x, None, 0.0, weight, bias, out, gated=False, add=residual is not None)
    return out


def rms_norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, gated: bool = False
) -> Tensor:
    """See norm_linear.rms_norm_linear. Each weight is read once. If there are more than 16 tokens, PyTorch computes the
    product.
    """
    if len(x) > MAX_TOKENS:
        return rms_norm_linear_op.get("cuda", "torch")(x, norm_weight, eps, weight, bias, gated)
    out = x.new_empty(len(x), len(weight) // (2 if gated else 1))
    _launch(x, norm_weight, eps, weight, bias, out, gated=gated, add=False)
    return out


def _launch(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    gated: bool,
    add: bool,
) -> None:
    assert x.stride(1) == 1 and weight.is_contiguous()
    use_pdl = supports_pdl(x.device)
    _small_batch_linear[(cdiv(out.shape[1], _COLUMNS),)](
        x,
        weight if norm_weight is None else norm_weight,
        weight,
        weight if bias is None else bias,
        out,
        len(x),
        x.stride(0),
        eps,
        NUM_INPUTS=x.shape[1],
        NUM_OUTPUTS=out.shape[1],
        ROWS=MAX_TOKENS,
        COLUMNS=_COLUMNS,
        DEPTH=_DEPTH,
        PREFETCHED=_PREFETCHED,
        NORM=norm_weight is not None,
        BIAS=bias is not None,
        GATED=gated,
        ADD=add,
        EARLY=use_pdl,
        num_warps=_WARPS,
        num_stages=_STAGES,
        launch_pdl=use_pdl,
    )


@triton.jit
def _prefetch(weight_rows, NUM_INPUTS: tl.constexpr, PREFETCHED: tl.constexpr):
    """Request the first cache lines of each row of the weight."""
    LINE: tl.constexpr = 128 // (weight_rows.dtype.element_ty.primitive_bitwidth // 8)
    inputs = tl.arange(0, PREFETCHED // LINE) * LINE
    # If a row is shorter than PREFETCHED elements, its last cache line is requested several times.
    pointers = weight_rows + tl.minimum(inputs, NUM_INPUTS - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _small_batch_linear(
    x, norm_weight, weight, bias, out, num_tokens, x_stride, eps,
    NUM_INPUTS: tl.constexpr, NUM_OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, PREFETCHED: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # A column after the last output reads the weights of the last output, so that it does not read past the end of the
    # weights. Its result is not stored.
    weight_rows = weight + tl.minimum(columns, NUM_OUTPUTS - 1).to(tl.int64)[:, None] * NUM_INPUTS
    if EARLY:
        _prefetch(weight_rows, NUM_INPUTS, PREFETCHED)
        if GATED:
            _prefetch(weight_rows + NUM_OUTPUTS * NUM_INPUTS, NUM_INPUTS, PREFETCHED)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    EXACT: tl.constexpr = "tf32x3" if x.dtype.element_ty == tl.float32 else "tf32"
    products = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    up_products = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    squares = tl.zeros([ROWS], dtype=tl.float32)
    for first in range(0, NUM_INPUTS, DEPTH):
        inputs = first + tl.arange(0, DEPTH)
        in_row = inputs < NUM_INPUTS
        values = tl.load(
            x + rows.to(tl.int64) * x_stride + inputs[None, :], mask=(rows < num_tokens) & in_row[None, :], other=0.0
        )
        if NORM:
            wide = values.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            scale = tl.load(norm_weight + inputs, mask=in_row, other=0.0).to(tl.float32)
            values = (wide * scale[None, :]).to(values.dtype)
        tile = tl.load(weight_rows + inputs[None, :], mask=in_row[None, :], other=0.0)
        products = tl.dot(values, tl.trans(tile), products, input_precision=EXACT)
        if GATED:
            up_tile = tl.load(weight_rows + NUM_OUTPUTS * NUM_INPUTS + inputs[None, :], mask=in_row[None, :], other=0.0)
            up_products = tl.dot(values, tl.trans(up_tile), up_products, input_precision=EXACT)
    is_output = columns < NUM_OUTPUTS
    if NORM:
        factor = tl.rsqrt(squares / NUM_INPUTS + eps)[:, None]
        products *= factor
        up_products *= factor
    if BIAS:
        products += tl.load(bias + columns, mask=is_output, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_products += tl.load(bias + NUM_OUTPUTS + columns, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if GATED:
        products = products * tl.sigmoid(products) * up_products
    mask = (rows < num_tokens) & is_output[None, :]
    pointers = out + rows.to(tl.int64) * NUM_OUTPUTS + columns[None, :]
    if ADD:
        products += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, products.to(out.dtype.element_ty), mask=mask)
