# SPDX-License-Identifier: Apache-2.0
"""Packs quantized weights into the layout that the kernels read.

It packs one linear layer at a time, or all experts of one layer. It reads only the weights of this layer from the
files.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire_engine.weights.device_copier import BUFFER_BYTES
from quire_engine.weights.param_shard import ParamShard, read_rows
from quire_engine.weights.quantized.mxfp4 import MXFP4Expert
from quire_engine.weights.quantized.quantized_tensor import QuantizedTensor
from quire_engine.weights.quantized.weight_codes import WeightCodes, concatenate
from quire_kernels import (
    ExpertWeights,
    HugePageArena,
    LinearWeight,
    QuantizedWeight,
    converts_fp8,
    e2m1_codebook,
    has_experts_kernel,
    has_kernel_for_shape,
    has_quantized_kernel,
    pack_weight,
    pack_weight_codebook,
    pack_weight_fp4,
    pack_weight_fp8,
    pack_weight_int4,
    pack_weight_int8,
)
from quire_spec.model.quantization import FP8_BLOCK


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Describes a part of a linear layer. The part contains some rows and columns of a quantized tensor."""

    tensor: QuantizedTensor | MXFP4Expert
    rows: tuple[range, ...]
    columns: range
    num_rows: int
    """Number of rows that the part has in the layer. If `rows` contains fewer, the remaining rows are padding."""


def pack_quantized(
    parts: Sequence[WeightPart], dtype: torch.dtype, device: torch.device, arena: HugePageArena
) -> tuple[LinearWeight, Tensor | None]:
    """Return the weight of a linear layer, and the order of its columns.

    The order contains the input feature of each column. The order is None if column i is feature i. If this machine has
    kernels for the scheme, the shape and `dtype`, the weight stays quantized. Otherwise, it is dequantized here, so
    that it is not dequantized again in every step.
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


def pack_quantized_experts(
    parts: Sequence[WeightPart], experts: ExpertWeights, dtype: torch.dtype, device: torch.device, arena: HugePageArena
) -> QuantizedWeight | None:
    """Return the weights of all experts as one weight, or None if no kernel supports them.

    The weights are concatenated along their rows.

    Args:
        parts: parts of all experts, one after the other.
        experts: sizes and activation of the experts.
        dtype: dtype of the activations.
        device: device of the weights.
        arena: allocates panels.
    """
    scheme = parts[0].tensor.scheme
    if scheme.layout == "fp8" and not converts_fp8(device):
        return None
    sizes = experts.hidden_size, experts.intermediate_size
    if not has_experts_kernel(*sizes, experts.activation, dtype, device, experts.is_gated):
        return None
    # A kernel reads the input features of all experts in the same order. With act_order, each expert would need its own
    # order.
    codes = None if scheme.has_act_order else _read_codes(parts)
    return None if codes is None else _pack_codes(codes, dtype, device, arena, is_w8a8=scheme.has_quantized_inputs)


def dequantize_experts(
    parts: Sequence[WeightPart], num_experts: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the dequantized weights of all experts. Their shape is [num_experts, out_features, in_features]."""
    shape = sum(part.num_rows for part in parts), len(parts[0].columns)
    return _dequantize(parts, shape, dtype, device).view(num_experts, -1, shape[1])


def _read_codes(parts: Sequence[WeightPart]) -> WeightCodes | None:
    """Return the codes of all parts as one weight, or None if the parts have different formats."""
    all_codes: list[WeightCodes] = []
    for part in parts:
        for rows in part.rows:
            codes = _read_part(part.tensor, rows, part.columns)
            if codes is None:
                return None
            all_codes.append(codes)
        if num_padding := part.num_rows - sum(map(len, part.rows)):
            all_codes.append(_pad(all_codes[-1].by_row(), num_padding))
    return concatenate(all_codes)


def _read_part(tensor: QuantizedTensor | MXFP4Expert, rows: range, columns: range) -> WeightCodes | None:
    """Return the codes of these rows and columns, or None if the kernels do not support the groups in this part."""
    if rows.step != 1:
        return None
    all_rows, all_columns = tensor.align(rows, columns)
    codes = tensor.read_codes(all_rows, all_columns)
    if (all_rows, all_columns) == (rows, columns):
        return codes
    return codes.cut(rows.start - all_rows.start, len(rows), columns.start - all_columns.start, len(columns))


def _pad(codes: WeightCodes, num_rows: int) -> WeightCodes:
    """Return `num_rows` rows of zeros as padding. They have the same format as `codes`."""
    values = torch.zeros(num_rows, codes.values.shape[1], dtype=torch.uint8).view(codes.values.dtype)
    grid = torch.zeros(num_rows, codes.scales.shape[1])
    zeros = None if codes.zeros is None else grid.to(codes.zeros.dtype)
    mins = None if codes.mins is None else grid
    return replace(codes, values=values, scales=grid.to(codes.scales.dtype), zeros=zeros, mins=mins)


def _pack_codes(
    codes: WeightCodes, dtype: torch.dtype, device: torch.device, arena: HugePageArena, *, is_w8a8: bool
) -> QuantizedWeight | None:
    """Convert codes to the layout that the kernels read, or return None if no kernel supports their scheme."""
    values, scales, num_groups = codes.values.to(device).contiguous(), codes.scales.to(device), codes.scales.shape[1]
    if codes.groups is not None:
        return None
    mins = None if codes.mins is None else codes.mins.to(device)
    if values.dtype == torch.float8_e4m3fn:
        is_supported = num_groups == 1 or FP8_BLOCK[1] % codes.block[1] == 0
        return pack_weight_fp8(values, scales, arena, dtype=dtype, group_size=codes.block[1]) if is_supported else None
    if values.dtype == torch.int8:
        # -128 cannot be represented by a sign and 7 bits of magnitude.
        has_groups = num_groups > 1 and num_groups * codes.block[1] == values.shape[1]
        if (num_groups > 1 and (is_w8a8 or not has_groups)) or not (is_w8a8 or int(values.min()) > -128):
            return None
        return pack_weight_int8(values, scales, arena, dtype=dtype, weight_only=not is_w8a8, mins=mins)
    if codes.num_bits != 4 or codes.block[1] % 4 or num_groups * codes.block[1] != values.shape[1]:
        return None
    if codes.codebook is not None:
        if torch.equal(codes.codebook, e2m1_codebook().float()):
            return pack_weight_fp4(values, scales, arena, dtype=dtype)
        return pack_weight_codebook(values, scales, codes.codebook, arena, dtype=dtype, mins=mins)
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
