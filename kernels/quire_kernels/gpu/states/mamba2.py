# SPDX-License-Identifier: Apache-2.0
"""The recurrence of Mamba-2 of sequences that decode; see `states.gated_delta`, which is divided in the same way."""

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.gpu.launch_math import cdiv, next_power_of_2
from quire_kernels.gpu.states.mamba2_scan import scan_prompts
from quire_kernels.gpu.states.numerics import softplus
from quire_kernels.mamba2 import Mamba2Params
from quire_kernels.state_batch import StateBatch

_ELEMENTS_PER_PROGRAM = 4096
"""Elements of a matrix that a program holds."""


def mamba2_recurrence(xbc: Tensor, dt: Tensor, params: Mamba2Params, states: Tensor, batch: StateBatch) -> Tensor:
    """See mamba2.mamba2_recurrence. Moves 2 * num_heads * state_dim * head_dim elements of the states for each
    sequence."""
    _, num_heads, state_dim, head_dim = states.shape
    out = xbc.new_empty(len(xbc), num_heads, head_dim)
    assert states.is_contiguous() and xbc.stride(1) == dt.stride(1) == 1
    if len(batch.decode_tokens):
        rows = next_power_of_2(state_dim)
        columns = min(max(_ELEMENTS_PER_PROGRAM // rows, 16), next_power_of_2(head_dim))
        _mamba2_update[(len(batch.decode_tokens), num_heads, cdiv(head_dim, columns))](
            xbc,
            dt,
            params.a_log,
            params.dt_bias,
            params.d,
            states,
            batch.decode_tokens,
            batch.decode_rows,
            batch.decode_lengths,
            batch.decode_kept,
            out,
            xbc.stride(0),
            dt.stride(0),
            *params.dt_limits,
            HEADS=num_heads,
            GROUPS=params.num_groups,
            STATE_DIM=state_dim,
            HEAD_DIM=head_dim,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=4,
        )
    if batch.chunks is not None:
        scan_prompts(xbc, dt, params, states, batch.chunks, out)
    return out


@triton.jit
def _mamba2_update(
    xbc, dt, a_log, dt_bias, d, states, tokens, rows, lengths, kept, out, xbc_stride, dt_stride, min_step, max_step,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, STATE_DIM: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    head = tl.program_id(1)
    inner = tl.arange(0, ROWS)
    features = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_inner, is_feature = inner < STATE_DIM, features < HEAD_DIM
    mask = is_inner[:, None] & is_feature[None, :]
    row = tl.load(rows + span)
    state_ptrs = states + (row * HEADS + head) * (STATE_DIM * HEAD_DIM) + inner[:, None] * HEAD_DIM + features[None, :]
    state = tl.load(state_ptrs, mask=mask, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_log + head))
    bias = tl.load(dt_bias + head)
    skip = tl.load(d + head)
    first = tl.load(tokens + span)
    num_kept = tl.load(kept + span)
    group = head // (HEADS // GROUPS)
    for i in range(tl.load(lengths + span)):
        token = first + i
        inputs = xbc + token * xbc_stride
        x = tl.load(inputs + head * HEAD_DIM + features, mask=is_feature, other=0.0).to(tl.float32)
        shared = inputs + HEADS * HEAD_DIM + group * STATE_DIM + inner
        b = tl.load(shared, mask=is_inner, other=0.0).to(tl.float32)
        c = tl.load(shared + GROUPS * STATE_DIM, mask=is_inner, other=0.0).to(tl.float32)
        step = softplus(tl.load(dt + token * dt_stride + head).to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, min_step), max_step)
        state = state * tl.exp(rate * step) + b[:, None] * (x * step)[None, :]
        y = tl.sum(state * c[:, None], 0) + skip * x
        tl.store(out + (token * HEADS + head) * HEAD_DIM + features, y.to(out.dtype.element_ty), mask=is_feature)
        # The next token reads the state as it is stored.
        rounded = state.to(states.dtype.element_ty)
        if i + 1 == num_kept:
            tl.store(state_ptrs, rounded, mask=mask)
        state = rounded.to(tl.float32)
