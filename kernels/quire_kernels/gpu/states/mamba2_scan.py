# SPDX-License-Identifier: Apache-2.0
"""The recurrence of Mamba-2 of prompts, in chunks of 64 tokens and one launch for all prompts of a step.

A program computes the chunks of a prompt one after the other, and holds some columns of the matrix S of one head in
registers. For a chunk, with the decays D since its beginning and the products P of C and B, decayed between their
tokens:

    out = P (step * x) + (D C) S + d * x
    S = D_last S + B^T (D_last / D * step * x)

Source of the algorithm: Dao, Gu: "Transformers are SSMs", https://arxiv.org/abs/2405.21060, section 6. Their kernels
compute the states of all chunks first, and write them. Here, a state stays in registers, and P is computed again for
each head of a group and each block of columns, which is a quarter of the products of bfloat16 for heads of 64 features
and states of 128.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.gpu.launch_math import cdiv, next_power_of_2
from quire_kernels.gpu.states.numerics import (
    dot_floats,
    dot_inputs,
    dot_precision,
    dot_two_inputs,
    load_inputs,
    softplus,
)
from quire_kernels.mamba2 import Mamba2Params
from quire_kernels.state_batch import PROMPT_CHUNK, PromptChunks

_FEATURES_PER_PROGRAM = 32
"""Columns of a matrix that a program holds: enough programs for a GPU with one prompt and 64 heads of 64 features."""


def scan_prompts(
    xbc: Tensor, dt: Tensor, params: Mamba2Params, states: Tensor, prompts: PromptChunks, out: Tensor
) -> None:
    """Compute the prompts of `mamba2_recurrence` into `out` [num_tokens, num_heads, head_dim], and update their rows of
    `states`. docs/gpu-design.md lists the bytes and operations."""
    _, num_heads, state_dim, head_dim = states.shape
    if not len(prompts.prompts):
        return
    columns = max(min(_FEATURES_PER_PROGRAM, next_power_of_2(head_dim)), 16)
    _mamba2_scan[(len(prompts.rows), num_heads, cdiv(head_dim, columns))](
        xbc,
        dt,
        params.a_log,
        params.dt_bias,
        params.d,
        states,
        prompts.rows,
        prompts.starts,
        prompts.ends,
        out,
        xbc.stride(0),
        dt.stride(0),
        *params.dt_limits,
        HEADS=num_heads,
        GROUPS=params.num_groups,
        STATE_DIM=state_dim,
        HEAD_DIM=head_dim,
        ROWS=max(next_power_of_2(state_dim), 16),
        COLUMNS=columns,
        CHUNK=PROMPT_CHUNK,
        PRECISION=dot_precision(xbc.dtype),
        num_warps=8,
        num_stages=2,
    )


@triton.jit
def _mamba2_scan(
    xbc, dt, a_log, dt_bias, d, states, rows, starts, ends, out, xbc_stride, dt_stride, min_step, max_step,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, STATE_DIM: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    prompt = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(starts + prompt)
    end = tl.load(ends + prompt)
    if start == end:
        return
    tokens, inner = tl.arange(0, CHUNK), tl.arange(0, ROWS)
    features = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_inner, is_feature = inner < STATE_DIM, features < HEAD_DIM
    state_mask = is_inner[:, None] & is_feature[None, :]
    state_ptrs = states + (tl.load(rows + prompt) * HEADS + head) * (STATE_DIM * HEAD_DIM)
    state_ptrs += inner[:, None] * HEAD_DIM + features[None, :]
    state = tl.load(state_ptrs, mask=state_mask, other=0.0).to(tl.float32)
    speed = -tl.exp(tl.load(a_log + head))
    bias = tl.load(dt_bias + head)
    skip = tl.load(d + head)
    shared = HEADS * HEAD_DIM + (head // (HEADS // GROUPS)) * STATE_DIM
    for first in range(start, end, CHUNK):
        # Offsets within a chunk have 32 bits, which take half the registers.
        is_token = tokens < (end - first).to(tl.int32)
        inputs = xbc + first * xbc_stride + tokens[:, None] * xbc_stride
        mask = is_token[:, None] & is_feature[None, :]
        x = tl.load(inputs + head * HEAD_DIM + features[None, :], mask=mask, other=0.0).to(tl.float32)
        b_ptrs, b_mask = inputs + shared + inner[None, :], is_token[:, None] & is_inner[None, :]
        b = load_inputs(b_ptrs, b_mask, PRECISION)
        c = load_inputs(b_ptrs + GROUPS * STATE_DIM, b_mask, PRECISION)
        dt_ptrs = dt + first * dt_stride + head + tokens * dt_stride
        step = softplus(tl.load(dt_ptrs, mask=is_token, other=0.0).to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, min_step), max_step)
        # The padding of the last chunk does not decay, and learns an x of 0.
        log_decay = tl.where(is_token, speed * step, 0.0)
        total, last = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)
        # Decays are at most 1, so no difference overflows. A product of exp(total_i) and exp(-total_j) would.
        decay = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
        products = dot_two_inputs(c, tl.trans(b), PRECISION)
        products = tl.where(tokens[:, None] >= tokens[None, :], products * decay, 0.0)
        values = x * step[:, None]
        result = dot_inputs(c, state, PRECISION) * tl.exp(total)[:, None] + skip * x
        result += dot_floats(products, values, PRECISION)
        out_ptrs = out + (first * HEADS + head) * HEAD_DIM + tokens[:, None] * (HEADS * HEAD_DIM) + features[None, :]
        tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=mask)
        remaining = values * tl.exp(tl.minimum(last - total, 0.0))[:, None]
        state = state * tl.exp(last) + dot_inputs(tl.trans(b), remaining, PRECISION)
    tl.store(state_ptrs, state.to(states.dtype.element_ty), mask=state_mask)
