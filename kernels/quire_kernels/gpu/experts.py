# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts in two grouped GEMMs: gate and up with the activation, then down with the router's weights.

The copies of tokens, one for each of a token's experts, are grouped by expert on the device (lora_routing.py), so a
captured step stays valid for any choice of experts. A program multiplies a tile of copies of one expert with a block of
the expert's columns. Tiles without copies exit at once. Nothing is padded or sorted in memory: programs gather rows.
No atomics are used, and the result is deterministic.

Source of the grouping by tiles: the fused MoE kernel of vLLM.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.experts import ExpertWeights, SwiGLU
from quire_kernels.gpu.activation import activate
from quire_kernels.gpu.launch_math import cdiv
from quire_kernels.lora_routing import TokenRouting, route_tokens

_FEW_ROWS = 16
"""Rows of a tile when experts have few copies, as in decoding: the minimum of a matrix instruction."""
_MANY_ROWS = 64
"""Rows of a tile otherwise: weights are read once for all of them."""
_COLUMNS = 64
_INPUTS = 64
"""Columns of a program, and inputs per iteration."""


def fused_experts(
    x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, residual: Tensor | None = None
) -> Tensor:
    """See experts.fused_experts. An expert's weights are read once for each tile of its tokens, the first time from
    memory. The gated features [num_tokens * top_k, intermediate_size] and the outputs of the experts [num_tokens *
    top_k, hidden_size] are written and read once."""
    (num_tokens, hidden), top_k = x.shape, ids.shape[1]
    num_experts, _, inner = experts.down.shape
    num_copies = num_tokens * top_k
    assert x.stride(1) == 1 and experts.gate_up.is_contiguous() and experts.down.is_contiguous()
    rows = _FEW_ROWS if num_copies <= _FEW_ROWS * num_experts else _MANY_ROWS
    routing = TokenRouting.empty(num_copies, num_experts, x.device, rows)
    route_tokens(ids.view(-1), routing)
    num_tiles = len(routing.tile_slots)
    swiglu = experts.activation if isinstance(experts.activation, SwiGLU) else SwiGLU(1.0, 1.0)
    constants = {"ROWS": rows, "COLUMNS": _COLUMNS, "INPUTS": _INPUTS, "num_warps": 4, "num_stages": 3}
    gated, outputs = x.new_empty(num_copies, inner), x.new_empty(num_copies, hidden)
    _gate_up[(num_tiles, cdiv(inner, _COLUMNS))](
        x,
        x.stride(0),
        experts.gate_up,
        experts.gate_up_bias,
        gated,
        routing.tile_slots,
        routing.tile_rows,
        top_k,
        hidden,
        inner,
        swiglu.alpha,
        swiglu.limit,
        ACTIVATION=experts.activation_name,
        **constants,
    )
    _down[(num_tiles, cdiv(hidden, _COLUMNS))](
        gated,
        experts.down,
        experts.down_bias,
        weights,
        outputs,
        routing.tile_slots,
        routing.tile_rows,
        inner,
        hidden,
        **constants,
    )
    # Sums in float32.
    out = outputs.view(num_tokens, top_k, hidden).sum(1)
    return out if residual is None else residual.add_(out)


@triton.jit
def _gate_up(
    x_ptr,
    ld_x,
    weight_ptr,
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
        weight = weight_ptr + expert * 2 * inner * hidden
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, hidden, INPUTS):
            inputs = first + tl.arange(0, INPUTS)
            is_input = inputs < hidden
            x = tl.load(x_ptrs + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
            mask = is_input[:, None] & is_column[None, :]
            gate_weight = tl.load(weight + gate_columns[None, :] * hidden + inputs[:, None], mask=mask, other=0.0)
            up_weight = tl.load(weight + up_columns[None, :] * hidden + inputs[:, None], mask=mask, other=0.0)
            gate = tl.dot(x, gate_weight, gate, input_precision="ieee")
            up = tl.dot(x, up_weight, up, input_precision="ieee")
        if bias_ptr is not None:
            bias = bias_ptr + expert * 2 * inner
            gate += tl.load(bias + gate_columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + up_columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION == "swiglu":
            gate = tl.minimum(gate, limit)
            up = tl.maximum(tl.minimum(up, limit), -limit) + 1.0
            gated = gate * tl.sigmoid(alpha * gate) * up
        else:
            gated = activate(gate, ACTIVATION) * up
        out_ptrs = out_ptr + rows[:, None] * inner + columns[None, :]
        tl.store(out_ptrs, gated.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _down(
    x_ptr,
    weight_ptr,
    bias_ptr,
    shares_ptr,
    out_ptr,
    tile_experts_ptr,
    tile_rows_ptr,
    inner,
    hidden,
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
        weight_ptrs = weight_ptr + expert * hidden * inner + columns[None, :] * inner
        out = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, inner, INPUTS):
            inputs = first + tl.arange(0, INPUTS)
            is_input = inputs < inner
            x = tl.load(x_ptrs + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
            weight = tl.load(weight_ptrs + inputs[:, None], mask=is_input[:, None] & is_column[None, :], other=0.0)
            out = tl.dot(x, weight, out, input_precision="ieee")
        if bias_ptr is not None:
            out += tl.load(bias_ptr + expert * hidden + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        out *= tl.load(shares_ptr + rows, mask=is_row, other=0.0)[:, None]
        out_ptrs = out_ptr + rows[:, None] * hidden + columns[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
