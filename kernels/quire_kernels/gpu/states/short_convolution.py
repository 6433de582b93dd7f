# SPDX-License-Identifier: Apache-2.0
"""The short convolution: one launch for all sequences that decode, and one for all prompts of a step."""

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.gpu.launch_math import cdiv, next_power_of_2
from quire_kernels.state_batch import PROMPT_CHUNK, StateBatch

_BLOCK = 512
"""Features that a program computes for one sequence that decodes."""
_PROMPT_BLOCK = 64
"""Features that a program computes for a chunk of 64 tokens of a prompt."""


def short_convolution(
    x: Tensor, weight: Tensor, states: Tensor, batch: StateBatch, bias: Tensor | None = None, has_silu: bool = True
) -> Tensor:
    """See gated_delta.short_convolution. Moves 2 * kernel_size * size elements for each token, and the weight."""
    out, (size, num_taps) = x.new_empty(x.shape), weight.shape
    assert states.is_contiguous() and weight.is_contiguous() and x.stride(1) == 1
    if len(batch.decode_tokens):
        block = min(next_power_of_2(size), _BLOCK)
        _convolve[(len(batch.decode_tokens), cdiv(size, block))](
            x,
            weight,
            bias,
            states,
            batch.decode_tokens,
            batch.decode_rows,
            batch.decode_lengths,
            batch.decode_kept,
            out,
            x.stride(0),
            size,
            TAPS=num_taps,
            PADDED_TAPS=max(next_power_of_2(num_taps), 2),
            BLOCK=block,
            HAS_SILU=has_silu,
            num_warps=4,
        )
    if (chunks := batch.chunks) is not None and len(chunks.prompts):
        assert num_taps <= PROMPT_CHUNK  # only the first chunk of a prompt reads its state
        block = min(max(next_power_of_2(size), 16), _PROMPT_BLOCK)
        _convolve_prompts[(len(chunks.prompts), cdiv(size, block))](
            x,
            weight,
            bias,
            states,
            chunks.prompts,
            chunks.rows,
            chunks.first_chunks,
            chunks.starts,
            chunks.ends,
            out,
            x.stride(0),
            size,
            TAPS=num_taps,
            PADDED_TAPS=max(next_power_of_2(num_taps), 2),
            CHUNK=PROMPT_CHUNK,
            BLOCK=block,
            HAS_SILU=has_silu,
            num_warps=4,
        )
    return out


@triton.jit
def _convolve(
    x, weight, bias, states, tokens, rows, lengths, kept, out, stride, size,
    TAPS: tl.constexpr, PADDED_TAPS: tl.constexpr, BLOCK: tl.constexpr, HAS_SILU: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    taps = tl.arange(0, PADDED_TAPS)[:, None]
    is_feature = features < size
    mask = is_feature[None, :] & (taps < TAPS)
    weights = tl.load(weight + features[None, :] * TAPS + taps, mask=mask, other=0.0).to(tl.float32)
    shift = tl.zeros([BLOCK], dtype=tl.float32)
    if bias is not None:
        shift += tl.load(bias + features, mask=is_feature, other=0.0).to(tl.float32)
    first = tl.load(tokens + span)
    num_kept = tl.load(kept + span)
    state = states + tl.load(rows + span) * (TAPS - 1) * size
    length = tl.load(lengths + span)
    # Tap j of token i multiplies the input i + j of the sequence, which begins with the TAPS - 1 inputs of the state.
    for i in range(length):
        inputs = i + taps
        is_earlier = inputs < TAPS - 1
        earlier = tl.load(state + inputs * size + features[None, :], mask=mask & is_earlier, other=0.0)
        token = first + inputs - (TAPS - 1)
        window = tl.load(x + token * stride + features[None, :], mask=mask & ~is_earlier, other=0.0)
        total = tl.sum((earlier + window).to(tl.float32) * weights, 0) + shift
        if HAS_SILU:
            total = total * tl.sigmoid(total)
        tl.store(out + (first + i) * size + features, total.to(out.dtype.element_ty), mask=is_feature)
    # Every load of the state must come before these stores. Input j of the new state is input j + num_kept.
    inputs = num_kept + taps
    is_earlier = inputs < TAPS - 1
    is_kept = mask & (taps < TAPS - 1)
    earlier = tl.load(state + inputs * size + features[None, :], mask=is_kept & is_earlier, other=0.0)
    token = first + inputs - (TAPS - 1)
    window = tl.load(x + token * stride + features[None, :], mask=is_kept & ~is_earlier, other=0.0)
    tl.debug_barrier()
    tl.store(state + taps * size + features[None, :], earlier + window, mask=is_kept)


@triton.jit
def _convolve_prompts(
    x, weight, bias, states, prompts, rows, first_chunks, starts, ends, out, stride, size, TAPS: tl.constexpr,
    PADDED_TAPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, HAS_SILU: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_feature = features < size
    prompt = tl.load(prompts + chunk)
    index = chunk - tl.load(first_chunks + prompt)
    start = tl.load(starts + prompt)
    length = tl.load(ends + prompt) - start
    state = states + tl.load(rows + prompt) * (TAPS - 1) * size
    first = index * CHUNK
    # Offsets within a chunk have 32 bits, which take half the registers.
    tokens = tl.arange(0, CHUNK)[:, None]
    # Only the first chunk reads the state.
    skipped = tl.minimum(first, CHUNK).to(tl.int32)
    count = tl.minimum(length - first, CHUNK).to(tl.int32)
    mask = (tokens < count) & is_feature[None, :]
    total = tl.zeros([CHUNK, BLOCK], dtype=tl.float32)
    if bias is not None:
        total += tl.load(bias + features, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    # Tap j of token i multiplies input i + j of the sequence, which begins with the TAPS - 1 inputs of the state.
    for tap in tl.static_range(TAPS):
        inputs = tokens + tap
        is_earlier = skipped + inputs < TAPS - 1
        earlier = tl.load(state + inputs * size + features[None, :], mask=mask & is_earlier, other=0.0)
        x_ptrs = x + (start + first - (TAPS - 1)) * stride + inputs * stride + features[None, :]
        present = tl.load(x_ptrs, mask=mask & ~is_earlier, other=0.0)
        weights = tl.load(weight + features * TAPS + tap, mask=is_feature, other=0.0).to(tl.float32)
        total += (earlier + present).to(tl.float32) * weights[None, :]
    if HAS_SILU:
        total = total * tl.sigmoid(total)
    out_ptrs = out + (start + first) * size + tokens * size + features[None, :]
    tl.store(out_ptrs, total.to(out.dtype.element_ty), mask=mask)
    if first == 0:
        # No other program reads this part of the state, and every load of this one must come before these stores. Input
        # j of the new state is input j + length.
        taps = tl.arange(0, PADDED_TAPS)[:, None]
        is_held = (taps < TAPS - 1) & is_feature[None, :]
        kept = length + taps
        old = tl.load(state + kept * size + features[None, :], mask=is_held & (kept < TAPS - 1), other=0.0)
        kept_place = start + kept - (TAPS - 1)
        new = tl.load(x + kept_place * stride + features[None, :], mask=is_held & (kept >= TAPS - 1), other=0.0)
        tl.debug_barrier()
        tl.store(state + taps * size + features[None, :], old + new, mask=is_held)
