# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of sequences that decode: each state is read once and written once in a step.

A program holds some columns of the matrix of one head in registers, and computes the tokens of its span one after the
other. A column belongs to an element of the value, and needs no other column. `gated_delta_scan` computes prompts, in
chunks of tokens. The reference computes those of Kimi Delta Attention: with a decay for each element of a key, the same
kernels would need more registers than a GPU has.

Source: `fused_recurrent_gated_delta_rule` of flash-linear-attention, which divides the matrix in the same way.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels import gated_delta
from quire_kernels.gated_delta import NORM_EPS
from quire_kernels.gpu.launch_math import cdiv, next_power_of_2
from quire_kernels.gpu.states.gated_delta_scan import scan_prompts
from quire_kernels.gpu.states.numerics import softplus
from quire_kernels.state_batch import StateBatch

_ELEMENTS_PER_PROGRAM = 4096
"""Elements of a matrix that a program holds: 32 for each thread of 4 warps."""


def gated_delta_rule(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, states: Tensor, batch: StateBatch
) -> Tensor:
    """See gated_delta.gated_delta_rule. Moves 2 * num_value_heads * key_head_dim * value_head_dim elements of the
    states for each sequence. In comparison, the inputs are small."""
    _, num_heads, key_dim, value_dim = states.shape
    out = qkv.new_empty(len(qkv), num_heads, value_dim)
    assert states.is_contiguous() and qkv.stride(1) == a.stride(1) == b.stride(1) == 1
    if len(batch.decode_tokens):
        keys = next_power_of_2(key_dim)
        values = min(max(_ELEMENTS_PER_PROGRAM // keys, 16), next_power_of_2(value_dim))
        _gated_delta_update[(len(batch.decode_tokens), num_heads, cdiv(value_dim, values))](
            qkv,
            a,
            b,
            a_log,
            dt_bias,
            states,
            batch.decode_tokens,
            batch.decode_rows,
            batch.decode_lengths,
            batch.decode_kept,
            out,
            qkv.stride(0),
            a.stride(0),
            b.stride(0),
            NORM_EPS,
            KEY_HEADS=(qkv.shape[1] - num_heads * value_dim) // (2 * key_dim),
            HEADS=num_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEYS=keys,
            VALUES=values,
            HAS_ROW_DECAYS=a.shape[1] != num_heads,
            num_warps=4,
        )
    if a.shape[1] != num_heads:
        gated_delta.scan_prompts(qkv, a, b, a_log, dt_bias, states, batch, out)
    elif batch.chunks is not None:
        scan_prompts(qkv, a, b, a_log, dt_bias, states, batch.chunks, out)
    return out


@triton.jit
def _gated_delta_update(
    qkv, a, b, a_log, dt_bias, states, tokens, rows, lengths, kept, out, qkv_stride, a_stride, b_stride, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, HAS_ROW_DECAYS: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    head = tl.program_id(1)
    key_dims = tl.arange(0, KEYS)
    value_dims = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key_dims < KEY_DIM, value_dims < VALUE_DIM
    mask = is_key[:, None] & is_value[None, :]
    row = tl.load(rows + span)
    state_ptrs = states + (row * HEADS + head) * (KEY_DIM * VALUE_DIM)
    state_ptrs += key_dims[:, None] * VALUE_DIM + value_dims[None, :]
    state = tl.load(state_ptrs, mask=mask, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_log + head))
    first = tl.load(tokens + span)
    num_kept = tl.load(kept + span)
    key_head = head // (HEADS // KEY_HEADS)
    for i in range(tl.load(lengths + span)):
        token = first + i
        inputs = qkv + token * qkv_stride
        q = tl.load(inputs + key_head * KEY_DIM + key_dims, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(inputs + (KEY_HEADS + key_head) * KEY_DIM + key_dims, mask=is_key, other=0.0).to(tl.float32)
        v_ptrs = inputs + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value_dims
        v = tl.load(v_ptrs, mask=is_value, other=0.0).to(tl.float32)
        q = q * (tl.rsqrt(tl.sum(q * q, 0) + eps) * KEY_DIM**-0.5)
        k = k * tl.rsqrt(tl.sum(k * k, 0) + eps)
        learning_rate = tl.sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
        if HAS_ROW_DECAYS:
            columns = head * KEY_DIM + key_dims
            step = tl.load(a + token * a_stride + columns, mask=is_key, other=0.0).to(tl.float32)
            step = softplus(step + tl.load(dt_bias + columns, mask=is_key, other=0.0))
            state = state * tl.exp(rate * step)[:, None]
        else:
            step = softplus(tl.load(a + token * a_stride + head).to(tl.float32) + tl.load(dt_bias + head))
            state = state * tl.exp(rate * step)
        delta = (v - tl.sum(state * k[:, None], 0)) * learning_rate
        state = state + k[:, None] * delta[None, :]
        out_ptrs = out + (token * HEADS + head) * VALUE_DIM + value_dims
        tl.store(out_ptrs, tl.sum(state * q[:, None], 0).to(out.dtype.element_ty), mask=is_value)
        # The next token reads the state as it is stored.
        rounded = state.to(states.dtype.element_ty)
        if i + 1 == num_kept:
            tl.store(state_ptrs, rounded, mask=mask)
        state = rounded.to(tl.float32)
