# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose weight has 4 or 8 bits.

`_linear_codes` dequantizes a tile of the weight in registers. The tensor cores then multiply it in the dtype of the
activations. The kernel reads in_features * out_features * bits / 8 bytes of codes, and the scales. It dequantizes the
weight again for every 64 tokens. Therefore, with many tokens, `_dequantize_weight` writes the weight in the dtype of
the activations first, and cuBLAS multiplies it. Both are used for 4-bit codes and for 8-bit integers. For fp8,
torch._scaled_mm is used instead if the device has instructions for fp8 and torch accepts the shape. This operation
multiplies in 8 bits.

In the scheme w8a8, the reference also quantizes the inputs. The kernel here does not do that, so its result is closer
to the result of the unquantized model.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.gpu.launch_math import cdiv
from quire_kernels.linear import linear
from quire_kernels.quantization import FP8, FP8_MAX
from quire_kernels.quantized_linear import FOUR_BIT_SCHEMES, QuantizedWeight, converts_fp8
from quire_kernels.quantized_linear import quantized_linear as reference_op

_SMALL_TOKENS = 16
"""Up to this number of tokens, a program computes 16 rows and only a few columns, so that every multiprocessor has a
program to run.
"""
_DEQUANTIZE_TOKENS = {4: 16, 8: 256}
"""Number of tokens from which a weight with this number of bits per code is dequantized in memory.

On an H200, `_linear_codes` takes 240 us for 16 tokens and 6,648 us for 2,048 tokens to multiply a weight [28672, 4096]
of 4 bits, and 238 us for 256 tokens with 8 bits. cuBLAS takes 65 us for 16 tokens in bfloat16, and 701 us for 2,048
tokens. To write the weight of 235 MB and read it again takes 0.11 ms at 4.2 TB/s.
"""
_DEQUANTIZE_COLUMNS = 64
BYTES = 64
"""Number of bytes that an iteration of the kernel's loop reads from each row of the weight."""
_SCALED_MM_MULTIPLE = 16
_CODES = {"w4a16": "int4", "mxfp4": "e2m1", "nvfp4": "e2m1", "fp8": "e4m3", "codebook": "codebook"}
"""Maps a scheme to the name of its codes in the kernels. All other schemes have int8."""


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """See quantized_linear.quantized_linear."""
    is_fp8 = weight.scheme == "fp8"
    if is_fp8 and not converts_fp8(x.device):
        return reference_op.reference(x, weight, bias, residual)  # Triton cannot convert fp8 on this device
    if is_fp8 and _supports_scaled_mm(x, weight):
        return _scaled_mm(x, weight, bias, residual)
    (num_tokens, in_features), out_features = x.shape, weight.shape[0]
    if num_tokens >= _DEQUANTIZE_TOKENS[4 if weight.scheme in FOUR_BIT_SCHEMES else 8]:
        return linear(x, dequantize_weight(weight, x.dtype), bias, residual)
    assert x.stride(1) == 1
    out = x.new_empty(num_tokens, out_features) if residual is None else residual
    assert out.is_contiguous()
    is_small = num_tokens <= _SMALL_TOKENS
    tensors, constants = arguments_of(weight)
    rows, columns = (16, 32) if is_small else (64, 64)
    grid = (cdiv(out_features, columns), cdiv(num_tokens, rows))
    _linear_codes[grid](
        x, *tensors, bias, out, num_tokens, out_features, in_features, x.stride(0),
        ADD=residual is not None, ROWS=rows, COLUMNS=columns, BYTES=BYTES, **constants, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def dequantize_weight(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight [out_features, in_features] in `dtype`. Reads the codes once, and writes the result once."""
    out_features, in_features = weight.shape
    tensors, constants = arguments_of(weight)
    out = torch.empty(weight.shape, dtype=dtype, device=weight.values.device)
    grid = (cdiv(out_features, _DEQUANTIZE_COLUMNS), cdiv(in_features // constants["PER_BYTE"], BYTES))
    _dequantize_weight[grid](
        *tensors, out, out_features, in_features, COLUMNS=_DEQUANTIZE_COLUMNS, BYTES=BYTES, **constants, num_warps=4
    )
    return out


def arguments_of(weight: QuantizedWeight) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """Return the tensors that the kernels read, and the kernels' constants.

    The tensors are the codes, the scales, and the zero points, `mins` or None. The constant GROUPS is the number of
    groups of inputs in an iteration; each group has its own scale.
    """
    assert weight.scales is not None
    # The interpreter cannot load 8-bit floating point where a mask is false.
    values = weight.values.view(torch.uint8) if weight.scheme == "fp8" else weight.values
    scales = weight.scales.view(torch.uint8) if weight.scales.dtype == torch.float8_e8m0fnu else weight.scales
    codes: tuple[str | float, ...] = (_CODES.get(weight.scheme, "int8"),)
    if weight.codebook is not None:
        codes += tuple(weight.codebook.tolist())
    bits = 4 if weight.scheme in FOUR_BIT_SCHEMES else 8
    group, num_inputs = weight.group_size, BYTES * 8 // bits
    if group >= weight.shape[1] or group % num_inputs == 0:
        num_groups = 1
    else:
        num_groups = num_inputs // group if num_inputs % group == 0 else BYTES
        assert group * bits % 8 == 0
    constants = {"GROUP": group, "GROUPS": num_groups, "PER_BYTE": 8 // bits, "CODES": codes}
    return (values, scales, weight.zeros if weight.mins is None else weight.mins), constants


def _supports_scaled_mm(x: Tensor, weight: QuantizedWeight) -> bool:
    """Return whether torch can multiply this weight in 8 bits.

    torch's operation for one scale per row returns only bfloat16.
    """
    out_features, in_features = weight.shape
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and weight.group_size == in_features
        and out_features % _SCALED_MM_MULTIPLE == in_features % _SCALED_MM_MULTIPLE == 0
    )


def _scaled_mm(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Quantize the inputs of each token to 8 bits, and multiply them by the weight."""
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
    bias,
    out,
    num_tokens,
    out_features,
    in_features,
    x_stride,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PER_BYTE: tl.constexpr,
    CODES: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BYTES: tl.constexpr,
):
    # If a code has 4 bits, a byte contains the codes of two adjacent inputs. The inputs at even positions are
    # multiplied first, and then those at odd positions, so that the codes need not be interleaved.
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_column, is_row = column < out_features, row < num_tokens
    row_bytes = in_features // PER_BYTE
    num_groups = tl.cdiv(in_features, GROUP)
    # A weight can have more than 2^31 elements.
    weight_row = column.to(tl.int64)
    values += (weight_row * row_bytes)[None, :]
    x += row.to(tl.int64)[:, None] * x_stride
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, row_bytes, BYTES):
        byte = start + tl.arange(0, BYTES)
        is_byte = byte < row_bytes
        codes = tl.load(values + byte[:, None], mask=is_byte[:, None] & is_column[None, :], other=0)
        scale = load_groups(
            scales, weight_row * num_groups, is_column, start, row_bytes, GROUP, GROUPS, BYTES, PER_BYTE
        )
        if zeros is not None:
            zero = load_groups(
                zeros, weight_row * num_groups, is_column, start, row_bytes, GROUP, GROUPS, BYTES, PER_BYTE
            )
        else:
            zero = None
        for part in tl.static_range(PER_BYTE):
            position = byte * PER_BYTE + part
            inputs = tl.load(x + position[None, :], mask=is_row[:, None] & is_byte[None, :], other=0.0)
            weight = dequantize(codes, part, scale, zero, GROUPS, CODES)
            total = tl.dot(inputs, weight.to(inputs.dtype), total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * out_features + column[None, :]
    mask = is_row[:, None] & is_column[None, :]
    if ADD:
        total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _dequantize_weight(
    values,
    scales,
    zeros,
    out,
    out_features,
    in_features,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PER_BYTE: tl.constexpr,
    CODES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Dequantize BYTES bytes of COLUMNS rows of the weight. A row of the weight is a column of its transpose."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.program_id(1) * BYTES
    byte = start + tl.arange(0, BYTES)
    row_bytes = in_features // PER_BYTE
    num_groups = tl.cdiv(in_features, GROUP)
    weight_row = column.to(tl.int64)
    is_column = column < out_features
    mask = (byte < row_bytes)[:, None] & is_column[None, :]
    codes = tl.load(values + (weight_row * row_bytes)[None, :] + byte[:, None], mask=mask, other=0)
    starts = weight_row * num_groups
    scale = load_groups(scales, starts, is_column, start, row_bytes, GROUP, GROUPS, BYTES, PER_BYTE)
    if zeros is not None:
        zero = load_groups(zeros, starts, is_column, start, row_bytes, GROUP, GROUPS, BYTES, PER_BYTE)
    else:
        zero = None
    weight = dequantize(codes, 0, scale, zero, GROUPS, CODES).to(out.dtype.element_ty)
    if PER_BYTE == 2:
        # The inputs at odd positions are interleaved with those at even positions, so that stores are contiguous.
        odd = dequantize(codes, 1, scale, zero, GROUPS, CODES).to(out.dtype.element_ty)
        weight = tl.reshape(tl.permute(tl.join(weight, odd), (0, 2, 1)), (2 * BYTES, COLUMNS))
    position = start * PER_BYTE + tl.arange(0, BYTES * PER_BYTE)
    place = out + (weight_row * in_features)[None, :] + position[:, None]
    tl.store(place, weight, mask=(position < in_features)[:, None] & is_column[None, :])


@triton.jit
def load_groups(
    table,
    row_starts,
    is_column,
    start,
    row_bytes,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BYTES: tl.constexpr,
    PER_BYTE: tl.constexpr,
):
    """Return the scales or the zero points that an iteration needs: [GROUPS, columns].

    Args:
        table: values of all groups of the weight: float32 scales or `mins`, uint8 zero points, or uint8 exponents of 2
            (E8M0).
        row_starts: index of the first group of each column.
        is_column: whether the column exists.
        start: offset of the iteration's first byte in a row. A row has `row_bytes` bytes.
    """
    byte = start + tl.arange(0, GROUPS) * (BYTES // GROUPS)
    index = row_starts[None, :] + (byte * PER_BYTE // GROUP)[:, None]
    return tl.load(table + index, mask=is_column[None, :] & (byte < row_bytes)[:, None], other=0)


@triton.jit
def dequantize(codes, part: tl.constexpr, scale, zero, GROUPS: tl.constexpr, CODES: tl.constexpr):
    """Return the weights of a tile in float32.

    Args:
        codes: bytes [inputs, columns]. The first item of CODES is int4, e2m1, int8, e4m3 or codebook. After codebook,
            it contains the values of 16 codes.
        part: for 4 bits, which half of each byte: 0 for the lower half, 1 for the upper half.
        scale: [GROUPS, columns], float32 or uint8. The uint8 values are exponents of 2 with a bias of 127 (E8M0). The
            rows of a group are adjacent.
        zero: [GROUPS, columns]: uint8 zero points of int4, or float32 numbers that are subtracted after the
            multiplication; None: all zero points of int4 are 8.
    """
    if scale.dtype == tl.uint8:
        # 2^-127 is subnormal.
        scale = tl.where(scale == 0, 1 << 22, scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    if CODES[0] == "int4":
        weight = ((codes >> (4 * part)) & 15).to(tl.float32)
        if zero is None:
            weight -= 8.0
    elif CODES[0] == "e2m1":
        # Build the sign, exponent and mantissa of a float16. It is the number divided by 2^14.
        code = (codes >> (4 * part)).to(tl.int16)
        weight = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    elif CODES[0] == "e4m3":
        weight = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif CODES[0] == "codebook":
        code = (codes >> (4 * part)) & 15
        weight = tl.zeros(codes.shape, dtype=tl.float32)
        for i in tl.static_range(16):
            weight = tl.where(code == i, CODES[1 + i], weight)
    else:
        weight = codes.to(tl.float32)
    INPUTS: tl.constexpr = codes.shape[0]
    COLUMNS: tl.constexpr = codes.shape[1]
    if GROUPS > 1 and GROUPS < INPUTS:
        weight = tl.reshape(weight, (GROUPS, INPUTS // GROUPS, COLUMNS))
        scale = scale[:, None, :]
        if zero is not None:
            zero = zero[:, None, :]
    if zero is None:
        weight *= scale
    elif zero.dtype == tl.float32:
        weight = weight * scale - zero
    else:
        weight = (weight - zero.to(tl.float32)) * scale
    return tl.reshape(weight, (INPUTS, COLUMNS))
