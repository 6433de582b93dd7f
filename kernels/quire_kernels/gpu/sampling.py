# SPDX-License-Identifier: Apache-2.0
"""Token sampling that needs no sort and does not wait for the host.

The thresholds of the filters are found by bisection. Tokens are drawn by inverse transform sampling.

A program processes one row of logits in several passes. In bfloat16, 256 rows with a vocabulary of 128,256 take 66 MB.
Most of this stays in the L2 cache of a large GPU between two passes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.gpu.launch_math import cdiv, next_power_of_2

_BLOCK = 4096
_WARPS = 16


def argmax_first(logits: Tensor) -> Tensor:
    """See sampling.argmax_first. Reads each row once."""
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    assert logits.stride(1) == 1
    _argmax_first[(rows,)](logits, out, logits.stride(0), vocab_size, BLOCK=_block(vocab_size), num_warps=_WARPS)
    return out


def sample(
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    any_filtered: bool = True,
    any_greedy: bool = True,
) -> Tensor:
    """See sampling.sample. The most likely token is computed for all rows, even for those that are not greedy.

    A greedy row is read once, and any other row three times. The top-k filter adds 13 passes, and the top-p filter adds
    13. The threshold has 30 bits. Each of these passes divides the range that can contain it by 5.
    """
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    assert logits.stride(1) == 1
    _sample[(rows,)](
        logits,
        out,
        temperatures,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        logits.stride(0),
        vocab_size,
        CUTS=any_filtered,
        BLOCK=_block(vocab_size),
        num_warps=_WARPS,
    )
    return out


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """See sampling.uniform."""
    out = torch.empty(seeds.shape, dtype=torch.float32, device=seeds.device)
    _uniforms[(cdiv(len(seeds), 128),)](seeds, positions, out, len(seeds), BLOCK=128)
    return out


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    in_prompt: Tensor,
    counts: Tensor,
    state_rows: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    token_ids: Tensor | None = None,
) -> None:
    """See sampling.apply_penalties.

    This reads 5 bytes for each row and each token of the vocabulary, which is 164 MB for 256 rows and 128,256 tokens.
    It changes only the logits of tokens that have occurred. The function never allocates memory, even for long
    sequences.
    """
    vocab_size = logits.shape[1]
    assert logits.stride(1) == 1 and in_prompt.is_contiguous() and counts.is_contiguous()
    block = _block(vocab_size)
    _apply_penalties[(len(rows), cdiv(vocab_size, block))](
        logits,
        rows,
        in_prompt,
        counts,
        state_rows,
        presence,
        frequency,
        repetition,
        logits.stride(0),
        vocab_size,
        BLOCK=block,
        num_warps=_WARPS // 2,
    )


def apply_token_bitmask(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """See sampling.apply_token_bitmask. This reads one bit for each row and each token of the vocabulary, and it writes
    only the logits of forbidden tokens.
    """
    vocab_size = logits.shape[1]
    assert logits.stride(1) == 1 and bits.stride(1) == 1
    block = _block(vocab_size)
    _apply_token_bitmask[(len(rows), cdiv(vocab_size, block))](
        logits, bits, rows, logits.stride(0), bits.stride(0), vocab_size, BLOCK=block, num_warps=_WARPS // 2
    )


def _block(vocab_size: int) -> int:
    return min(next_power_of_2(vocab_size), _BLOCK)


@triton.jit
def _mix(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """See sampling.uniform. The computation uses unsigned 64-bit numbers that wrap around."""
    golden = tl.full(seed.shape, 0x9E3779B97F4A7C15, tl.uint64)
    mixed = _mix(_mix(seed.to(tl.uint64, bitcast=True)) + position.to(tl.uint64, bitcast=True) * golden)
    return (mixed >> 40).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit(do_not_specialize=["num_rows"])
def _uniforms(seeds, positions, out, num_rows, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    seed = tl.load(seeds + rows, mask=mask, other=0)
    position = tl.load(positions + rows, mask=mask, other=0)
    tl.store(out + rows, _uniform(seed, position), mask=mask)


@triton.jit
def _row_argmax(row, vocab_size, BLOCK: tl.constexpr):
    """Return the largest logit and the first token that has it."""
    columns = tl.arange(0, BLOCK)
    max_logits = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    argmax_columns = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, vocab_size, BLOCK):
        x = tl.load(row + first + columns, mask=first + columns < vocab_size, other=float("-inf")).to(tl.float32)
        argmax_columns = tl.where(x > max_logits, first + columns, argmax_columns)
        max_logits = tl.maximum(max_logits, x)
    row_max = tl.max(max_logits, axis=0)
    return row_max, tl.min(tl.where(max_logits == row_max, argmax_columns, vocab_size - 1), axis=0)


@triton.jit
def _argmax_first(logits, out, stride, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    _, token = _row_argmax(logits + row.to(tl.int64) * stride, vocab_size, BLOCK)
    tl.store(out + row, token.to(tl.int64))


@triton.jit
def _softmax_weights(row, first, vocab_size, row_max, temperature, BLOCK: tl.constexpr):
    """Return the weights of a block of a row: e^((logit - maximum) / temperature). The most likely token has the weight
    1.
    """
    columns = first + tl.arange(0, BLOCK)
    x = tl.load(row + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.exp((x - row_max) / temperature)


@triton.jit
def _threshold(row, vocab_size, row_max, temperature, low, target, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Find the threshold of a filter, and return its float32 bits.

    The threshold is the smallest weight for which the sum of all larger weights is less than `target`. It is never less
    than `low`. If COUNTS is true, `target` is compared with the number of larger weights, not with their sum. The
    result is either the weight of a token or `low`.
    """
    # These are the bits of 1.0, which is the weight of the most likely token. No weight is larger.
    high = 0x3F800000
    while low < high:
        step = (high - low) // 5 + 1
        over_1 = tl.zeros([BLOCK], dtype=tl.float32)
        over_2 = tl.zeros([BLOCK], dtype=tl.float32)
        over_3 = tl.zeros([BLOCK], dtype=tl.float32)
        over_4 = tl.zeros([BLOCK], dtype=tl.float32)
        at_1 = low + step - 1
        at_2 = at_1 + step
        at_3 = at_2 + step
        at_4 = at_3 + step
        for first in range(0, vocab_size, BLOCK):
            weights = _softmax_weights(row, first, vocab_size, row_max, temperature, BLOCK)
            bits = weights.to(tl.int32, bitcast=True)
            if COUNTS:
                weights = tl.where(weights >= 0.0, 1.0, 0.0)
            over_1 += tl.where(bits > at_1, weights, 0.0)
            over_2 += tl.where(bits > at_2, weights, 0.0)
            over_3 += tl.where(bits > at_3, weights, 0.0)
            over_4 += tl.where(bits > at_4, weights, 0.0)
        # Count for how many of the four candidates the sum of all larger weights is not less than the target. The
        # threshold is greater than these candidates.
        passed = tl.where(tl.sum(over_1, axis=0) < target, 0, 1)
        passed += tl.where(tl.sum(over_2, axis=0) < target, 0, 1)
        passed += tl.where(tl.sum(over_3, axis=0) < target, 0, 1)
        passed += tl.where(tl.sum(over_4, axis=0) < target, 0, 1)
        high = tl.where(passed == 4, high, tl.minimum(low + (passed + 1) * step - 1, high))
        low = tl.minimum(low + passed * step, high)
    return low


@triton.jit
def _sample(
    logits,
    out,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    stride,
    vocab_size,
    CUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_index = tl.program_id(0)
    row = logits + row_index.to(tl.int64) * stride
    temperature = tl.load(temperatures + row_index)
    row_max, token = _row_argmax(row, vocab_size, BLOCK)
    if temperature > 0.0:
        # 0 is less than the bits of every positive float, so all tokens are kept.
        floor = 0
        if CUTS:
            top_k = tl.load(top_ks + row_index)
            top_p = tl.load(top_ps + row_index)
            floor = tl.load(min_ps + row_index).to(tl.int32, bitcast=True)
            if (top_k > 0) & (top_k < vocab_size):
                floor = _threshold(row, vocab_size, row_max, temperature, floor, top_k.to(tl.float32), True, BLOCK)
            if top_p < 1.0:
                kept_weights = tl.zeros([BLOCK], dtype=tl.float32)
                for first in range(0, vocab_size, BLOCK):
                    weights = _softmax_weights(row, first, vocab_size, row_max, temperature, BLOCK)
                    kept_weights += tl.where(weights.to(tl.int32, bitcast=True) >= floor, weights, 0.0)
                target = top_p * tl.sum(kept_weights, axis=0)
                floor = _threshold(row, vocab_size, row_max, temperature, floor, target, False, BLOCK)
        # Both passes add the weights in the same order, so that their sums are exactly equal.
        total = 0.0
        for first in range(0, vocab_size, BLOCK):
            weights = _softmax_weights(row, first, vocab_size, row_max, temperature, BLOCK)
            total += tl.sum(tl.where(weights.to(tl.int32, bitcast=True) >= floor, weights, 0.0), axis=0)
        # No cumulative sum exceeds the total. Rounding must therefore not raise the threshold to the total.
        threshold = tl.minimum(
            _uniform(tl.load(seeds + row_index), tl.load(positions + row_index)) * total, total * (1.0 - 1.1920929e-07)
        )
        running = 0.0
        sum_before = 0.0
        first_column = -1
        for first in range(0, vocab_size, BLOCK):
            weights = _softmax_weights(row, first, vocab_size, row_max, temperature, BLOCK)
            block_sum = tl.sum(tl.where(weights.to(tl.int32, bitcast=True) >= floor, weights, 0.0), axis=0)
            is_crossed = (first_column < 0) & (running + block_sum > threshold)
            sum_before = tl.where(is_crossed, running, sum_before)
            first_column = tl.where(is_crossed, first, first_column)
            running += block_sum
        first_column = tl.maximum(first_column, 0)
        weights = _softmax_weights(row, first_column, vocab_size, row_max, temperature, BLOCK)
        weights = tl.where(weights.to(tl.int32, bitcast=True) >= floor, weights, 0.0)
        columns = tl.arange(0, BLOCK)
        is_past = (sum_before + tl.cumsum(weights, 0) > threshold) & (weights > 0.0)
        # Because of rounding, it can happen that no cumulative sum within the block exceeds the threshold. In that
        # case, the last token is selected.
        last = tl.max(tl.where(weights > 0.0, columns, 0), axis=0)
        token = first_column + tl.minimum(tl.min(tl.where(is_past, columns, BLOCK), axis=0), last)
    tl.store(out + row_index, token.to(tl.int64))


@triton.jit
def _apply_penalties(
    logits,
    rows,
    in_prompt,
    counts,
    state_rows,
    presence,
    frequency,
    repetition,
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row_index = tl.program_id(0)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    vocab_mask = tokens < vocab_size
    state_offsets = tl.load(state_rows + row_index) * vocab_size + tokens
    count = tl.load(counts + state_offsets, mask=vocab_mask, other=0)
    occurred = count > 0
    mask = occurred | (tl.load(in_prompt + state_offsets, mask=vocab_mask, other=0) != 0)
    logit = logits + tl.load(rows + row_index) * stride + tokens
    value = tl.load(logit, mask=mask, other=0.0)
    factor = tl.load(repetition + row_index)
    scaled = tl.where(value > 0.0, value / factor, value * factor)
    penalty = tl.load(frequency + row_index) * count.to(tl.float32) + tl.where(
        occurred, tl.load(presence + row_index), 0.0
    )
    tl.store(logit, scaled - penalty, mask=mask)


@triton.jit
def _apply_token_bitmask(logits, bits, rows, stride, bits_stride, vocab_size, BLOCK: tl.constexpr):
    row_index = tl.program_id(0)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    vocab_mask = tokens < vocab_size
    words = tl.load(bits + row_index.to(tl.int64) * bits_stride + tokens // 32, mask=vocab_mask, other=0)
    is_forbidden = ((words >> (tokens % 32)) & 1) == 0
    row = logits + tl.load(rows + row_index) * stride
    tl.store(row + tokens, float("-inf"), mask=vocab_mask & is_forbidden)
