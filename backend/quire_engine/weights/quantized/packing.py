# SPDX-License-Identifier: Apache-2.0
"""Packs the quantized weights of a linear layer for the kernels, one layer at a time, straight from the files."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_engine.weights.device_copier import BUFFER_BYTES
from quire_engine.weights.param_shard import ParamShard, read_rows
from quire_engine.weights.quantized.quantized_tensor import QuantizedTensor
from quire_engine.weights.quantized.weight_codes import WeightCodes, concatenate
from quire_kernels import (
    HugePageArena,
    LinearWeight,
    has_kernel_for_shape,
    has_quantized_kernel,
    pack_weight,
    pack_weight_fp8,
    pack_weight_int4,
    pack_weight_int8,
)

_FP8_BLOCK = 128


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Rows and columns of a quantized tensor, which fill the first rows of a part of a linear layer."""

    tensor: QuantizedTensor
    rows: tuple[range, ...]
    columns: range
    num_rows: int
    """Number of rows of the part; rows after `rows` are padding."""


def pack_quantized(
    parts: Sequence[WeightPart], dtype: torch.dtype, device: torch.device, arena: HugePageArena
) -> tuple[LinearWeight, Tensor | None]:
    """Return the weight of a linear layer, and the input feature of each column; None: column i is feature i.

    The weight stays quantized if this machine has kernels for its scheme, its shape and `dtype`. Otherwise it is
    dequantized: without a kernel, every step would have to do that.
    """
    shape = sum(part.num_rows for part in parts), len(parts[0].columns)
    if has_quantized_kernel(dtype, device) and (device.type != "cpu" or has_kernel_for_shape(*shape)):
        codes = _read_codes(parts)
        if codes is not None:
            codes, order = codes.in_group_order()
            packed = _pack_codes(codes, dtype, device, arena, is_w8a8=parts[0].tensor.scheme.has_quantized_inputs)
            if packed is not None:
                return packed, None if order is None else order.to(device)
    return pack_weight(_dequantize(parts, shape, dtype, device), arena), None


def _read_codes(parts: Sequence[WeightPart]) -> WeightCodes | None:
    """Return the codes of all parts as one weight; None if a part begins within a group, or if their schemes differ."""
    all_codes = []
    for part in parts:
        for rows in part.rows:
            if rows.step != 1 or part.tensor.align(rows, part.columns) != (rows, part.columns):
                return None
            all_codes.append(part.tensor.read_codes(rows, part.columns))
        if num_padding := part.num_rows - sum(map(len, part.rows)):
            all_codes.append(_pad(all_codes[-1].by_row(), num_padding))
    return concatenate(all_codes)


def _pad(codes: WeightCodes, num_rows: int) -> WeightCodes:
    """Return codes of zeros with `num_rows` rows, otherwise like `codes`."""
    values = torch.zeros(num_rows, codes.values.shape[1], dtype=torch.uint8).view(codes.values.dtype)
    grid = torch.zeros(num_rows, codes.scales.shape[1])
    zeros = None if codes.zeros is None else grid.to(codes.zeros.dtype)
    return WeightCodes(values, grid, zeros, codes.block, codes.num_bits, codes.groups)


def _pack_codes(
    codes: WeightCodes, dtype: torch.dtype, device: torch.device, arena: HugePageArena, *, is_w8a8: bool
) -> LinearWeight | None:
    """Return codes for the kernels; None if there is no kernel for their scheme."""
    values, scales, num_groups = codes.values.to(device).contiguous(), codes.scales.to(device), codes.scales.shape[1]
    if codes.groups is not None:
        return None
    if values.dtype == torch.float8_e4m3fn:
        is_supported = num_groups == 1 or codes.block[1] == _FP8_BLOCK
        return pack_weight_fp8(values, scales, arena, dtype=dtype) if is_supported else None
    if values.dtype == torch.int8:
        # -128 cannot be represented by a sign and 7 bits of magnitude.
        if num_groups > 1 or not (is_w8a8 or int(values.min()) > -128):
            return None
        return pack_weight_int8(values, scales, arena, dtype=dtype, weight_only=not is_w8a8)
    if codes.num_bits != 4 or codes.block[1] % 4 or num_groups * codes.block[1] != values.shape[1]:
        return None
    zeros = None if codes.zeros is None else codes.zeros.to(device)
    return pack_weight_int4(values, scales, zeros, arena, dtype=dtype)


def _dequantize(
    parts: Sequence[WeightPart], shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    weight = torch.zeros(shape, dtype=dtype, device=device)
    start = 0
    for part in parts:
        destination = weight[start : start + sum(map(len, part.rows))]
        target = ParamShard(destination, part.tensor.shape, part.rows, part.columns)
        for expert, chunk, rows in target.chunks(BUFFER_BYTES):
            chunk.copy_(read_rows(part.tensor, target, expert, rows))
        start += part.num_rows
    return weight
