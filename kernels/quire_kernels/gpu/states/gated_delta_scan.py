# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of prompts, in chunks of 64 tokens and two launches for all prompts of a step.

The first launch computes what needs no state, with one program for each chunk and head: the inverse T of the unit lower
triangular matrix that describes how the tokens of the chunk correct each other, and the products P of queries and keys.
The second launch computes the chunks of a prompt one after the other. A program holds some columns of the matrix S of
one head in registers, and computes for a chunk, with the decays D since its beginning:

    delta = T (beta * (v - (D k) S))
    out = (D q) S + P delta
    S = D_last S + (D_last / D * k)^T delta

Source of the algorithm: Yang et al.: "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
https://arxiv.org/abs/2406.06484 (WY representation), "Gated Delta Networks", https://arxiv.org/abs/2412.06464, and
`chunk_gated_delta_rule` of flash-linear-attention. There, T is multiplied by the keys and values, both products are
written, and so is the state before each chunk, from which a last launch computes the output. Here, T multiplies the
correction, and the second launch computes the output while it has the state. This moves fewer bytes, but the products
of a chunk depend on each other in a longer chain.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.gated_delta import NORM_EPS
from quire_kernels.gpu.launch_math import cdiv, next_power_of_2
from quire_kernels.gpu.states.numerics import (
    dot_floats,
    dot_inputs,
    dot_precision,
    dot_two_inputs,
    load_inputs,
    softplus,
    split_float,
)
from quire_kernels.state_batch import PROMPT_CHUNK, PromptChunks

_BLOCK = 16
"""Size of the triangular matrices that are inverted row by row. A chunk has four."""
_VALUES_PER_PROGRAM = 32
"""Columns of a matrix that a program of the second launch holds."""


def scan_prompts(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    prompts: PromptChunks,
    out: Tensor,
) -> None:
    """Compute the prompts of `gated_delta_rule` into `out` [num_tokens, num_value_heads, value_head_dim], and update
    their rows of `states`.

    Allocates 2 * 64 * 64 float32 numbers for each chunk and value head, and three for each token and value head.
    docs/gpu-design.md lists the bytes and operations.
    """
    _, num_heads, key_dim, value_dim = states.shape
    num_chunks = len(prompts.prompts)
    if not num_chunks:
        return
    decays, *factors = torch.empty(3, len(qkv), num_heads, dtype=torch.float32, device=qkv.device)
    shape = 2, num_chunks, num_heads, PROMPT_CHUNK, PROMPT_CHUNK
    tiles = torch.empty(shape, dtype=torch.float32, device=qkv.device)
    precision = dot_precision(qkv.dtype)
    # The same memory for the results: two numbers of bfloat16 in place of each float32.
    inverses, products = tiles if precision == "tf32x3" else tiles.view(torch.bfloat16)
    key_heads, keys = (qkv.shape[1] - num_heads * value_dim) // (2 * key_dim), max(next_power_of_2(key_dim), 16)
    _gated_delta_chunks[(num_chunks, num_heads)](
        qkv,
        a,
        b,
        a_log,
        dt_bias,
        prompts.prompts,
        prompts.first_chunks,
        prompts.starts,
        prompts.ends,
        decays,
        *factors,
        tiles[0],
        inverses,
        products,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        NORM_EPS,
        KEY_HEADS=key_heads,
        HEADS=num_heads,
        KEY_DIM=key_dim,
        KEYS=keys,
        CHUNK=PROMPT_CHUNK,
        BLOCK=_BLOCK,
        PRECISION=precision,
        num_warps=4,
    )
    values = max(min(_VALUES_PER_PROGRAM, next_power_of_2(value_dim)), 16)
    _gated_delta_scan[(len(prompts.rows), num_heads, cdiv(value_dim, values))](
        qkv,
        b,
        states,
        prompts.rows,
        prompts.first_chunks,
        prompts.starts,
        prompts.ends,
        decays,
        *factors,
        inverses,
        products,
        out,
        qkv.stride(0),
        b.stride(0),
        KEY_HEADS=key_heads,
        HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEYS=keys,
        VALUES=values,
        CHUNK=PROMPT_CHUNK,
        PRECISION=precision,
        num_warps=4,
        num_stages=2,
    )


@triton.jit
def _gated_delta_chunks(
    qkv, a, b, a_log, dt_bias, prompts, first_chunks, starts, ends, decays, q_factors, k_factors, tiles, inverses,
    products, qkv_stride, a_stride, b_stride, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEYS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    prompt = tl.load(prompts + chunk)
    first = tl.load(starts + prompt) + (chunk - tl.load(first_chunks + prompt)) * CHUNK
    # Offsets within a chunk have 32 bits, which take half the registers.
    count = tl.minimum(tl.load(ends + prompt) - first, CHUNK).to(tl.int32)
    tokens, key_dims = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    is_token, is_key = tokens < count, key_dims < KEY_DIM
    mask = is_token[:, None] & is_key[None, :]
    key_head = head // (HEADS // KEY_HEADS)
    q_ptrs = qkv + first * qkv_stride + key_head * KEY_DIM + tokens[:, None] * qkv_stride + key_dims[None, :]
    k_ptrs = q_ptrs + KEY_HEADS * KEY_DIM
    tile = (chunk.to(tl.int64) * HEADS + head) * (CHUNK * CHUNK)
    in_tile = tokens[:, None] * CHUNK + tokens[None, :]
    q, k = load_inputs(q_ptrs, mask, PRECISION), load_inputs(k_ptrs, mask, PRECISION)
    q_factor, k_factor = _inverse_norm(q, eps) * KEY_DIM**-0.5, _inverse_norm(k, eps)
    of_head = first * HEADS + head
    tl.store(q_factors + of_head + tokens * HEADS, q_factor, mask=is_token)
    tl.store(k_factors + of_head + tokens * HEADS, k_factor, mask=is_token)
    b_ptrs = b + first * b_stride + head + tokens * b_stride
    rate = tl.sigmoid(tl.load(b_ptrs, mask=is_token, other=0.0).to(tl.float32))
    speed = -tl.exp(tl.load(a_log + head))
    # The padding of a chunk has keys of 0 and does not decay, so it changes nothing.
    a_ptrs = a + first * a_stride + head + tokens * a_stride
    step = tl.load(a_ptrs, mask=is_token, other=0.0).to(tl.float32)
    step = softplus(step + tl.load(dt_bias + head))
    total = tl.cumsum(tl.where(is_token, speed * step, 0.0), 0)
    tl.store(decays + of_head + tokens * HEADS, total, mask=is_token)
    # Decays are at most 1, so no difference overflows. A product of exp(total_i) and exp(-total_j) would.
    decay = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
    q_k = dot_two_inputs(q, tl.trans(k), PRECISION) * decay
    k_k = dot_two_inputs(k, tl.trans(k), PRECISION) * decay
    q_k = tl.where(tokens[:, None] >= tokens[None, :], q_k * q_factor[:, None] * k_factor[None, :], 0.0)
    _store_factors(products, tile, q_k, CHUNK, PRECISION)
    k_k = tl.where(tokens[:, None] > tokens[None, :], k_k * (k_factor * rate)[:, None] * k_factor[None, :], 0.0)
    tl.store(tiles + tile + in_tile, k_k)
    inverse = _invert_unit_lower(tiles + tile, CHUNK, BLOCK, PRECISION)
    tl.debug_barrier()
    _store_factors(inverses, tile, inverse, CHUNK, PRECISION)


@triton.jit
def _gated_delta_scan(
    qkv, b, states, rows, first_chunks, starts, ends, decays, q_factors, k_factors, inverses, products, out, qkv_stride,
    b_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    prompt = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(starts + prompt)
    end = tl.load(ends + prompt)
    if start == end:
        return
    tokens, key_dims = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    value_dims = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key_dims < KEY_DIM, value_dims < VALUE_DIM
    state_mask = is_key[:, None] & is_value[None, :]
    state_ptrs = states + (tl.load(rows + prompt) * HEADS + head) * (KEY_DIM * VALUE_DIM)
    state_ptrs += key_dims[:, None] * VALUE_DIM + value_dims[None, :]
    state = tl.load(state_ptrs, mask=state_mask, other=0.0).to(tl.float32)
    key_head = head // (HEADS // KEY_HEADS)
    tile = (tl.load(first_chunks + prompt) * HEADS + head) * (CHUNK * CHUNK)
    for first in range(start, end, CHUNK):
        # Offsets within a chunk have 32 bits, which take half the registers.
        count = tl.minimum(end - first, CHUNK).to(tl.int32)
        is_token = tokens < count
        mask = is_token[:, None] & is_key[None, :]
        value_mask = is_token[:, None] & is_value[None, :]
        inputs = qkv + first * qkv_stride
        q_ptrs = inputs + key_head * KEY_DIM + tokens[:, None] * qkv_stride + key_dims[None, :]
        q = load_inputs(q_ptrs, mask, PRECISION)
        k = load_inputs(q_ptrs + KEY_HEADS * KEY_DIM, mask, PRECISION)
        of_head = first * HEADS + head
        q_factor = tl.load(q_factors + of_head + tokens * HEADS, mask=is_token, other=0.0)
        k_factor = tl.load(k_factors + of_head + tokens * HEADS, mask=is_token, other=0.0)
        v_ptrs = (
            inputs + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + tokens[:, None] * qkv_stride + value_dims[None, :]
        )
        v = tl.load(v_ptrs, mask=value_mask, other=0.0).to(tl.float32)
        b_ptrs = b + first * b_stride + head + tokens * b_stride
        rate = tl.sigmoid(tl.load(b_ptrs, mask=is_token, other=0.0).to(tl.float32))
        total = tl.load(decays + of_head + tokens * HEADS, mask=is_token, other=0.0)
        last = tl.load(decays + of_head + (count - 1) * HEADS)
        before = tl.exp(total)
        known = dot_inputs(k, state, PRECISION) * (k_factor * before)[:, None]
        result = dot_inputs(q, state, PRECISION) * (q_factor * before)[:, None]
        delta = _dot_factors(inverses, tile, (v - known) * rate[:, None], CHUNK, PRECISION)
        result += _dot_factors(products, tile, delta, CHUNK, PRECISION)
        out_ptrs = out + of_head * VALUE_DIM + tokens[:, None] * (HEADS * VALUE_DIM) + value_dims[None, :]
        tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=value_mask)
        delta *= k_factor[:, None]
        delta *= tl.exp(tl.minimum(last - total, 0.0))[:, None]
        state = state * tl.exp(last) + dot_inputs(tl.trans(k), delta, PRECISION)
        tile += HEADS * CHUNK * CHUNK
    tl.store(state_ptrs, state.to(states.dtype.element_ty), mask=state_mask)


@triton.jit
def _inverse_norm(x, eps):
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + eps)


@triton.jit
def _store_factors(factors, tile, x, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Store the left factors [CHUNK, CHUNK] of `_dot_factors` at the index `tile` of float32 numbers."""
    tokens = tl.arange(0, CHUNK)
    in_tile = tokens[:, None] * CHUNK + tokens[None, :]
    if PRECISION != "tf32x3":
        high, low = split_float(x)
        tl.store(factors + 2 * tile + in_tile, high)
        tl.store(factors + 2 * tile + CHUNK * CHUNK + in_tile, low)
    else:
        tl.store(factors + tile + in_tile, x)


@triton.jit
def _dot_factors(factors, tile, x, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return the matrix product of stored factors and of float32 values. As bfloat16, factors need no registers."""
    tokens = tl.arange(0, CHUNK)
    in_tile = tokens[:, None] * CHUNK + tokens[None, :]
    if PRECISION != "tf32x3":
        high, low = tl.load(factors + 2 * tile + in_tile), tl.load(factors + 2 * tile + CHUNK * CHUNK + in_tile)
        x_high, x_low = split_float(x)
        result = tl.dot(high, x_high, tl.dot(high, x_low, tl.dot(low, x_high)))
    else:
        result = tl.dot(tl.load(factors + tile + in_tile), x, input_precision=PRECISION)
    return result


@triton.jit
def _invert_unit_lower(matrix, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of 1 + M. M [CHUNK, CHUNK] is strictly lower triangular and in memory, where this program has
    written it, and where it is overwritten. CHUNK is at most four times BLOCK.

    The blocks on the diagonal are inverted row by row, all at once. With the inverse D of the diagonal and the blocks N
    below it, the inverse is (1 + D N)^-1 D. The fourth power of D N is 0. Powers of smaller blocks would be larger than
    the inverse, if the keys are alike, and lose its digits.
    """
    tl.static_assert(CHUNK // BLOCK <= 4)
    tokens, blocks, inner = tl.arange(0, CHUNK), tl.arange(0, CHUNK // BLOCK), tl.arange(0, BLOCK)
    row, column = inner[None, :, None], inner[None, None, :]
    block_ptrs = matrix + (blocks * (BLOCK * CHUNK + BLOCK))[:, None, None]
    inverse = tl.zeros([CHUNK // BLOCK, BLOCK, BLOCK], dtype=tl.float32) + tl.where(row == column, 1.0, 0.0)
    tl.debug_barrier()
    for i in range(1, BLOCK):
        # Row i of each block, as a column. The earlier rows of the inverse are complete.
        factors = tl.load(block_ptrs + i * CHUNK + row)
        solved = tl.sum(factors * inverse, 1)
        inverse -= tl.where(row == i, solved[:, None, :], 0.0)
    tl.debug_barrier()
    tl.store(block_ptrs + row * CHUNK + column, inverse)
    tl.debug_barrier()
    ptrs = matrix + tokens[:, None] * CHUNK + tokens[None, :]
    whole = tl.load(ptrs)
    is_below = (tokens // BLOCK)[:, None] > (tokens // BLOCK)[None, :]
    diagonal = tl.where(is_below, 0.0, whole)
    factor = dot_floats(diagonal, tl.where(is_below, whole, 0.0), PRECISION)
    square = dot_floats(factor, factor, PRECISION)
    half = diagonal + dot_floats(square, diagonal, PRECISION)
    return half - dot_floats(factor, half, PRECISION)
