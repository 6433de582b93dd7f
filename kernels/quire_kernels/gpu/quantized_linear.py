# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose weight has 4 or 8 bits.

`_linear_codes` dequantizes a tile of the weight in registers and multiplies it with the tensor cores in the dtype of
the activations. It reads in_features * out_features * bits / 8 bytes and the scales; up to about 64 tokens that is the
time. It is used for 4 bits and for integers of 8 bits. fp8 uses torch._scaled_mm, which multiplies 8 bits, where the
device has instructions for it and torch accepts the shape.

The inputs of w8a8 are not quantized here: the result is nearer to the unquantized model than the reference's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.gpu.launch_math import cdiv
from quire_kernels.quantization import FP8, FP8_MAX
from quire_kernels.quantized_linear import QuantizedWeight
from quire_kernels.quantized_linear import quantized_linear as reference_op

_SMALL_TOKENS = 16
"""Up to this many tokens, a program has 16 rows and few columns, so that there is one for each multiprocessor."""
_MIN_CAPABILITY_FOR_FP8 = (8, 9)
_SCALED_MM_MULTIPLE = 16


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """See quantized_linear.quantized_linear."""
    is_fp8 = weight.scheme == "fp8"
    if is_fp8 and x.is_cuda and torch.cuda.get_device_capability(x.device) < _MIN_CAPABILITY_FOR_FP8:
        return reference_op.reference(x, weight, bias, residual)  # Triton converts no fp8 there
    if is_fp8 and _supports_scaled_mm(x, weight):
        return _scaled_mm(x, weight, bias, residual)
    (num_tokens, in_features), out_features = x.shape, weight.shape[0]
    assert x.stride(1) == 1 and weight.scales is not None
    out = x.new_empty(num_tokens, out_features) if residual is None else residual
    assert out.is_contiguous()
    is_small = num_tokens <= _SMALL_TOKENS
    # The interpreter cannot load fp8 where a mask is false.
    values = weight.values.view(torch.uint8) if is_fp8 else weight.values
    rows, columns = (16, 32) if is_small else (64, 64)
    grid = (cdiv(out_features, columns), cdiv(num_tokens, rows))
    _linear_codes[grid](
        x, values, weight.scales, weight.zeros, weight.codebook, bias, out,
        num_tokens, out_features, in_features, x.stride(0), weight.scales.shape[1],
        GROUP=weight.group_size, BITS=4 if weight.scheme == "w4a16" else 8, IS_FP8=is_fp8,
        HAS_ZEROS=weight.zeros is not None,
        HAS_TABLE=weight.scheme == "w4a16" and weight.zeros is None, HAS_BIAS=bias is not None,
        ADD=residual is not None, ROWS=rows, COLUMNS=columns, INPUTS=64, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def _supports_scaled_mm(x: Tensor, weight: QuantizedWeight) -> bool:
    """Return whether torch multiplies in 8 bits here. Its operation for scales of rows returns bfloat16 only."""
    out_features, in_features = weight.shape
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and weight.group_size == in_features
        and out_features % _SCALED_MM_MULTIPLE == in_features % _SCALED_MM_MULTIPLE == 0
    )


def _scaled_mm(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Quantize each token to 8 bits, and multiply."""
    assert weight.scales is not None
    scales = x.abs().amax(1, keepdim=True).float().clamp_min(torch.finfo(torch.float32).tiny) / FP8_MAX
    rows = (x.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    out = torch._scaled_mm(rows, weight.values.t(), scales, weight.scales.t(), bias, out_dtype=x.dtype)
    return out if residual is None else residual.add_(out)


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_codes(
    x,
    values,
    scales,
    zeros,
    table,
    bias,
    out,
    num_tokens,
    out_features,
    in_features,
    x_stride,
    num_groups,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    # Codes of a byte (two with 4 bits) belong to neighbouring inputs. The inputs of even and odd positions are
    # multiplied one after the other, so that the codes need not be interleaved.
    PER_BYTE: tl.constexpr = 8 // BITS
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_column, is_row = column < out_features, row < num_tokens
    row_bytes = in_features // PER_BYTE
    # A weight can have more than 2^31 elements.
    values += column.to(tl.int64)[:, None] * row_bytes
    scales += column.to(tl.int64)[:, None] * num_groups
    if HAS_ZEROS:
        zeros += column.to(tl.int64)[:, None] * num_groups
    x += row.to(tl.int64)[:, None] * x_stride
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, row_bytes, INPUTS):
        byte = start + tl.arange(0, INPUTS)
        is_byte = byte < row_bytes
        mask = is_column[:, None] & is_byte[None, :]
        codes = tl.load(values + byte[None, :], mask=mask, other=0)
        for part in tl.static_range(PER_BYTE):
            position = byte * PER_BYTE + part
            group = (position // GROUP)[None, :]
            scale = tl.load(scales + group, mask=mask, other=0.0)
            if BITS == 4:
                code = (codes >> (4 * part)) & 15
                if HAS_TABLE:
                    weight = tl.load(table + code).to(tl.float32)
                else:
                    weight = code.to(tl.float32)
                if HAS_ZEROS:
                    weight -= tl.load(zeros + group, mask=mask, other=0).to(tl.float32)
            else:
                weight = (codes.to(tl.float8e4nv, bitcast=True) if IS_FP8 else codes).to(tl.float32)
            inputs = tl.load(x + position[None, :], mask=is_row[:, None] & is_byte[None, :], other=0.0)
            weight = (weight * scale).to(inputs.dtype)
            total = tl.dot(inputs, tl.trans(weight), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * out_features + column[None, :]
    mask = is_row[:, None] & is_column[None, :]
    if ADD:
        total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=mask)
