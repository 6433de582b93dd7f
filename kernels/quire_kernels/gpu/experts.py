# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts in two grouped GEMMs.

The first GEMM computes gate and up, and applies the activation. The second GEMM computes down, and multiplies the
result by the router's weights.

The (token, expert) pairs are grouped by expert on the device (lora_routing.py). Therefore, a captured step is valid for
every choice of experts. A program multiplies a tile of tokens, which all use the same expert, by a block of that
expert's columns. A program whose tile has no tokens exits at once. Nothing is padded or sorted in memory, because
programs gather the rows that they need. The kernels do not use atomics, so the result is deterministic.

If adapters change the experts, the two products are not fused with what follows them: gpu/lora.py adds the deltas to
each product first. Its tiles then belong to a pair of an adapter slot and an expert.

Weights of 4 or 8 bits are dequantized in registers. gpu/quantized_linear.py defines the layout of the weights and
contains the code for this. If a byte contains several codes, they belong to adjacent inputs. The kernel multiplies
these inputs one after the other. Inputs are not quantized.

Source: the fused MoE kernel of vLLM also groups the pairs into tiles.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.experts import ExpertAdapters, ExpertWeights, SwiGLU
from quire_kernels.experts import fused_experts as experts_op
from quire_kernels.gpu.activation import activate
from quire_kernels.gpu.launch_math import cdiv
from quire_kernels.gpu.quantized_linear import BYTES, arguments_of, dequantize, load_groups
from quire_kernels.linear import LinearWeight
from quire_kernels.lora import LoRABatch, add_lora, build_routed_lora_batch
from quire_kernels.lora_routing import TokenRouting, route_tokens
from quire_kernels.quantized_linear import QuantizedWeight

_FEW_ROWS = 16
"""Number of rows in a tile if each expert has few tokens, for example in decoding. It is the smallest number that a
matrix instruction supports."""
_MANY_ROWS = 64
"""Number of rows in a tile if each expert has many tokens. The weights are read once for all rows of a tile."""
_COLUMNS = 64
_INPUTS = 64
"""Number of columns that a program computes. If the weights are not quantized, it is also the number of inputs in an
iteration."""


def fused_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    residual: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """See experts.fused_experts.

    An expert's weights are read once for each tile of its tokens. Only the first of these reads is from memory. Two
    intermediate tensors are written once and read once. The gated features have the shape [num_tokens * top_k,
    intermediate_size]. The outputs of the experts have the shape [num_tokens * top_k, hidden_size]. Experts without a
    gate are computed by torch.
    """
    if not experts.is_gated:
        return experts_op.reference(x, ids, weights, experts, residual, adapters)
    (num_tokens, hidden), top_k = x.shape, ids.shape[1]
    num_experts, inner = experts.num_experts, experts.intermediate_size
    num_copies = num_tokens * top_k
    assert x.stride(1) == 1
    rows = _FEW_ROWS if num_copies <= _FEW_ROWS * num_experts else _MANY_ROWS
    routing = TokenRouting.empty(num_copies, num_experts, x.device, rows)
    route_tokens(ids.view(-1), routing)
    if adapters is not None:
        return _adapted_experts(x, ids, weights, experts, residual, adapters, routing)
    gated = x.new_empty(num_copies, inner)
    _launch_gate_up(gated, x, top_k, experts, routing, is_gated=True)
    outputs = x.new_empty(num_copies, hidden)
    _launch_down(outputs, gated, weights, experts, routing)
    # Sums are computed in float32.
    out = outputs.view(num_tokens, top_k, hidden).sum(1)
    return out if residual is None else residual.add_(out)


def _adapted_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    residual: Tensor | None,
    adapters: ExpertAdapters,
    routing: TokenRouting,
) -> Tensor:
    """Compute `fused_experts` with adapters. The products have the shapes [num_tokens * top_k, 2 * intermediate_size]
    and [num_tokens * top_k, hidden_size]."""
    (num_tokens, hidden), top_k = x.shape, ids.shape[1]
    gate_up, down = adapters.gate_up.by_expert, adapters.down.by_expert
    assert gate_up is not None and down is not None
    batch = _route_pairs(adapters, ids, experts.num_experts)
    product = x.new_empty(num_tokens * top_k, 2 * experts.intermediate_size)
    _launch_gate_up(product, x, top_k, experts, routing, is_gated=False)
    add_lora(product, x.repeat_interleave(top_k, 0), gate_up, batch)
    gated = experts.activate(product)
    outputs = x.new_empty(num_tokens * top_k, hidden)
    _launch_down(outputs, gated, None, experts, routing)
    add_lora(outputs, gated, down, batch)
    # A product of matrices, because the weighted outputs would take twice the memory of the outputs in float32.
    out = torch.bmm(weights.to(x.dtype)[:, None], outputs.view(num_tokens, top_k, hidden))[:, 0]
    return out if residual is None else residual.add_(out)


def _route_pairs(adapters: ExpertAdapters, ids: Tensor, num_experts: int) -> LoRABatch:
    """Return a batch of the (token, expert) pairs, whose slots are those of `ModuleSlots.by_expert`."""
    slots = adapters.batch.adapter_slots[:, None]
    pairs = (slots * num_experts + ids).masked_fill(slots < 0, -1).view(-1)
    num_slots = len(adapters.down.host_entries) * num_experts
    return build_routed_lora_batch(pairs, TokenRouting.empty(len(pairs), num_slots, ids.device))


def _launch_gate_up(
    out: Tensor, x: Tensor, top_k: int, experts: ExpertWeights, routing: TokenRouting, *, is_gated: bool
) -> None:
    """Compute the gated features, or the gate and up features, of all (token, expert) pairs."""
    hidden, inner = experts.hidden_size, experts.intermediate_size
    swiglu = experts.activation if isinstance(experts.activation, SwiGLU) else SwiGLU(1.0, 1.0)
    tensors, constants = _arguments(experts.gate_up)
    _gate_up[(len(routing.tile_slots), cdiv(inner, _COLUMNS))](
        x,
        x.stride(0),
        *tensors,
        experts.gate_up_bias,
        out,
        routing.tile_slots,
        routing.tile_rows,
        top_k,
        hidden,
        inner,
        swiglu.alpha,
        swiglu.limit,
        ACTIVATION=experts.activation_name,
        GATED=is_gated,
        **constants,
        # Both products of a tile of mxfp4 would not fit into the registers of 4 warps until they are stored.
        **_launch_constants(routing) | {"num_warps": 4 if is_gated else 8},
    )


def _launch_down(
    out: Tensor, gated: Tensor, weights: Tensor | None, experts: ExpertWeights, routing: TokenRouting
) -> None:
    """Compute the outputs of all (token, expert) pairs. If `weights` is given, multiply them by the weights."""
    hidden, inner = experts.hidden_size, experts.intermediate_size
    tensors, constants = _arguments(experts.down)
    _down[(len(routing.tile_slots), cdiv(hidden, _COLUMNS))](
        gated,
        *tensors,
        experts.down_bias,
        weights,
        out,
        routing.tile_slots,
        routing.tile_rows,
        inner,
        hidden,
        **constants,
        **_launch_constants(routing),
    )


def _launch_constants(routing: TokenRouting) -> dict[str, int]:
    return {"ROWS": routing.tile_rows.shape[1], "COLUMNS": _COLUMNS, "num_warps": 4, "num_stages": 3}


def _arguments(weight: LinearWeight) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """Return two things: the tensors of a weight that the kernels read, and the constants with which the kernels are
    compiled for this weight. If the weight is not quantized, the constant CODES contains an empty text."""
    if isinstance(weight, QuantizedWeight):
        tensors, constants = arguments_of(weight)
        return tensors, constants | {"INPUTS": BYTES}
    assert weight.is_contiguous()
    constants = {"GROUP": 0, "GROUPS": 0, "PER_BYTE": 1, "CODES": ("",), "INPUTS": _INPUTS}
    return (weight, None, None), constants


@triton.jit
def _gate_up(
    x_ptr,
    ld_x,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    tile_experts_ptr,
    tile_rows_ptr,
    top_k,
    hidden,
    inner,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PER_BYTE: tl.constexpr,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert >= 0:
        rows = tl.load(tile_rows_ptr + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        if ACTIVATION == "swiglu":
            gate_columns, up_columns = 2 * columns, 2 * columns + 1
        else:
            gate_columns, up_columns = columns, inner + columns
        is_row, is_column = rows >= 0, columns < inner
        x_ptrs = x_ptr + (rows // top_k)[:, None] * ld_x
        gate_rows, up_rows = expert * 2 * inner + gate_columns, expert * 2 * inner + up_columns
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        width, groups = hidden // PER_BYTE, 0
        if CODES[0] != "":
            groups = tl.cdiv(hidden, GROUP)
        for first in range(0, width, INPUTS):
            item = first + tl.arange(0, INPUTS)
            is_item = item < width
            mask = is_item[:, None] & is_column[None, :]
            gate_codes = tl.load(weight_ptr + (gate_rows * width)[None, :] + item[:, None], mask=mask, other=0)
            up_codes = tl.load(weight_ptr + (up_rows * width)[None, :] + item[:, None], mask=mask, other=0)
            gate_scale, gate_zero, up_scale, up_zero = None, None, None, None
            if CODES[0] != "":
                gate_scale = load_groups(
                    scales_ptr, gate_rows * groups, is_column, first, width, GROUP, GROUPS, INPUTS, PER_BYTE
                )
                up_scale = load_groups(
                    scales_ptr, up_rows * groups, is_column, first, width, GROUP, GROUPS, INPUTS, PER_BYTE
                )
            if zeros_ptr is not None:
                gate_zero = load_groups(
                    zeros_ptr, gate_rows * groups, is_column, first, width, GROUP, GROUPS, INPUTS, PER_BYTE
                )
                up_zero = load_groups(
                    zeros_ptr, up_rows * groups, is_column, first, width, GROUP, GROUPS, INPUTS, PER_BYTE
                )
            for part in tl.static_range(PER_BYTE):
                inputs = item * PER_BYTE + part
                x = tl.load(x_ptrs + inputs[None, :], mask=is_row[:, None] & is_item[None, :], other=0.0)
                if CODES[0] == "":
                    gate_weight, up_weight = gate_codes, up_codes
                else:
                    gate_weight = dequantize(gate_codes, part, gate_scale, gate_zero, GROUPS, CODES).to(x.dtype)
                    up_weight = dequantize(up_codes, part, up_scale, up_zero, GROUPS, CODES).to(x.dtype)
                gate = tl.dot(x, gate_weight, gate, input_precision="ieee")
                up = tl.dot(x, up_weight, up, input_precision="ieee")
        if bias_ptr is not None:
            bias = bias_ptr + expert * 2 * inner
            gate += tl.load(bias + gate_columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + up_columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        mask = is_row[:, None] & is_column[None, :]
        if GATED:
            if ACTIVATION == "swiglu":
                gate = tl.minimum(gate, limit)
                up = tl.maximum(tl.minimum(up, limit), -limit) + 1.0
                gated = gate * tl.sigmoid(alpha * gate) * up
            else:
                gated = activate(gate, ACTIVATION) * up
            out_ptrs = out_ptr + rows[:, None] * inner + columns[None, :]
            tl.store(out_ptrs, gated.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            out_ptrs = out_ptr + rows[:, None] * 2 * inner
            tl.store(out_ptrs + gate_columns[None, :], gate.to(out_ptr.dtype.element_ty), mask=mask)
            tl.store(out_ptrs + up_columns[None, :], up.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _down(
    x_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    shares_ptr,
    out_ptr,
    tile_experts_ptr,
    tile_rows_ptr,
    inner,
    hidden,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PER_BYTE: tl.constexpr,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert >= 0:
        rows = tl.load(tile_rows_ptr + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_row, is_column = rows >= 0, columns < hidden
        x_ptrs = x_ptr + rows[:, None] * inner
        weight_rows = expert * hidden + columns
        out = tl.zeros((ROWS, COLUMNS), tl.float32)
        width, groups = inner // PER_BYTE, 0
        if CODES[0] != "":
            groups = tl.cdiv(inner, GROUP)
        for first in range(0, width, INPUTS):
            item = first + tl.arange(0, INPUTS)
            is_item = item < width
            mask = is_item[:, None] & is_column[None, :]
            codes = tl.load(weight_ptr + (weight_rows * width)[None, :] + item[:, None], mask=mask, other=0)
            scale, zero = None, None
            if CODES[0] != "":
                scale = load_groups(
                    scales_ptr, weight_rows * groups, is_column, first, width, GROUP, GROUPS, INPUTS, PER_BYTE
                )
            if zeros_ptr is not None:
                zero = load_groups(
                    zeros_ptr, weight_rows * groups, is_column, first, width, GROUP, GROUPS, INPUTS, PER_BYTE
                )
            for part in tl.static_range(PER_BYTE):
                inputs = item * PER_BYTE + part
                x = tl.load(x_ptrs + inputs[None, :], mask=is_row[:, None] & is_item[None, :], other=0.0)
                if CODES[0] == "":
                    weight = codes
                else:
                    weight = dequantize(codes, part, scale, zero, GROUPS, CODES).to(x.dtype)
                out = tl.dot(x, weight, out, input_precision="ieee")
        if bias_ptr is not None:
            out += tl.load(bias_ptr + expert * hidden + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if shares_ptr is not None:
            out *= tl.load(shares_ptr + rows, mask=is_row, other=0.0)[:, None]
        out_ptrs = out_ptr + rows[:, None] * hidden + columns[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
