# SPDX-License-Identifier: Apache-2.0
"""Token sampling with histograms.

Several programs share a row of logits. Histograms replace the bisection of sampling.py.

A row of 128,256 logits has 32 programs. Therefore, a few rows are enough to use the whole GPU. Top-k and top-p each
have a threshold for the weights of tokens. A threshold is a float32 number from 0 to 1, which has 30 bits. A pass finds
10 of these bits. To do so, it divides the tokens into 1,024 bins. For each bin, it counts the tokens and adds up their
weights. Top-k and top-p share their first histogram. Each of them alone needs three passes, and both together need
five. The bisection needs 13 passes for top-k, and another 13 for top-p.

Weights are converted to integers in units of 2^-40 before they are added. The sum of integers does not depend on the
order of the atomic additions. Therefore, a row gives the same token each time.

The atomic additions take longer than the bisection if there are many rows (sample.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.gpu import sampling
from quire_kernels.gpu.launch_math import cdiv, next_power_of_2
from quire_kernels.gpu.sampling import _row_argmax, _softmax_weights, _uniform

_BINS = 1024
_NUM_HISTOGRAMS = 5
"""Number of histograms. The first one is shared; two more refine it for top-k, and another two refine it for top-p."""
_NUM_STAGES = 6
_WARPS = 8


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
    """See sampling.sample. It reads each row three times. If there are filters, it reads the row up to five more
    times."""
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    block, parts = sampling._block(vocab_size), parts_per_row(vocab_size)
    device = logits.device
    maxima, sums = torch.empty(2, rows, parts, device=device)
    tokens = torch.empty(rows, parts, dtype=torch.int32, device=device)
    floors = torch.zeros(rows, dtype=torch.int32, device=device)
    sizes = {"PARTS": max(next_power_of_2(parts), 16), "BLOCK": block}
    grid = (rows, parts)
    _part_maxima[grid](logits, maxima, tokens, logits.stride(0), vocab_size, parts, BLOCK=block, num_warps=_WARPS)
    # Counts and weights of each bin, and the results of each stage.
    num_histograms = _NUM_HISTOGRAMS if any_filtered else 0
    bins = torch.zeros(2, num_histograms, rows, _BINS, dtype=torch.int64, device=device)
    state = torch.empty(_NUM_STAGES, rows, 3, dtype=torch.int64, device=device)
    for stage in range(0 if any_filtered else _NUM_STAGES - 1, _NUM_STAGES):
        _filter[grid](
            logits,
            maxima,
            temperatures,
            top_k,
            top_p,
            min_p,
            bins,
            state,
            floors,
            sums,
            logits.stride(0),
            vocab_size,
            rows,
            parts,
            STAGE=stage,
            CUTS=any_filtered,
            HISTOGRAMS=_NUM_HISTOGRAMS,
            BINS=_BINS,
            **sizes,
            num_warps=_WARPS,
        )
    out = torch.empty(rows, dtype=torch.int64, device=device)
    _draw[(rows,)](
        logits,
        out,
        maxima,
        tokens,
        floors,
        sums,
        temperatures,
        seeds,
        positions,
        logits.stride(0),
        vocab_size,
        parts,
        **sizes,
        num_warps=_WARPS,
    )
    return out


def parts_per_row(vocab_size: int) -> int:
    """Return the number of programs that share a row."""
    return cdiv(vocab_size, sampling._block(vocab_size))


@triton.jit
def _part_maxima(logits, maxima, tokens, stride, vocab_size, num_parts, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    part = tl.program_id(1)
    first = part * BLOCK
    part_size = tl.minimum(vocab_size - first, BLOCK)
    part_max, token = _row_argmax(logits + row.to(tl.int64) * stride + first, part_size, BLOCK)
    tl.store(maxima + row * num_parts + part, part_max)
    tl.store(tokens + row * num_parts + part, first + token)


@triton.jit
def _row_max(maxima, row, num_parts, PARTS: tl.constexpr):
    parts = tl.arange(0, PARTS)
    return tl.max(tl.load(maxima + row * num_parts + parts, mask=parts < num_parts, other=float("-inf")), axis=0)


@triton.jit
def _select_bin(values, others, base, other_base, target, BINS: tl.constexpr):
    """Find the lowest bin for which the `values` of all higher bins add up to less than `target`.

    Return this bin. Also return the sum of `values` and the sum of `others` in the higher bins. `base` and `other_base`
    are added to these sums. They belong to tokens that are above all bins.
    """
    bins = tl.arange(0, BINS)
    above = base + tl.sum(values, axis=0) - tl.cumsum(values, axis=0)
    selected = tl.min(tl.where(above.to(tl.float64) < target, bins, BINS - 1), axis=0)
    is_above = bins > selected
    return (
        selected,
        base + tl.sum(tl.where(is_above, values, 0), axis=0),
        other_base + tl.sum(tl.where(is_above, others, 0), axis=0),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _filter(
    logits, maxima, temperatures, top_ks, top_ps, min_ps, bins_ptr, state, floors, sums, stride, vocab_size, num_rows,
    num_parts,
    STAGE: tl.constexpr, CUTS: tl.constexpr, HISTOGRAMS: tl.constexpr, BINS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Select a bin of the histogram that the previous stage filled.

    Then take the tokens that are in the selected bin and in this program's part of the row, and add them to the next
    histogram. The last stage does not fill a histogram. Instead, it adds up the weights of the tokens that are kept.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        row_max = _row_max(maxima, row, num_parts, PARTS)
        weights = _softmax_weights(
            logits + row.to(tl.int64) * stride, part * BLOCK, vocab_size, row_max, temperature, BLOCK
        )
        bits = weights.to(tl.int32, bitcast=True)
        floor = 0
        if CUTS:
            top_k = tl.load(top_ks + row)
            top_p = tl.load(top_ps + row)
            floor = tl.load(min_ps + row).to(tl.int32, bitcast=True)
            cuts_k = (top_k > 0) & (top_k < vocab_size)
            cuts_p = top_p < 1.0
            bins = tl.arange(0, BINS)
            # Histogram h of this row begins at h * step; the weights follow the counts of all histograms.
            step = num_rows.to(tl.int64) * BINS
            counts_ptr = bins_ptr + row.to(tl.int64) * BINS
            masses_ptr = counts_ptr + HISTOGRAMS * step
            state_step = num_rows * 3
            own_state = state + row * 3
            # Determine which histogram this stage fills, which tokens it counts, and which bits of a weight select the
            # bin.
            is_counted = (bits > 0) & (bits >= floor)
            fills = cuts_k | cuts_p
            histogram = 0
            keys = bits >> 20
            if STAGE == 1 or STAGE == 2:
                fills = cuts_k
                histogram = STAGE
                if cuts_k:
                    counts = tl.load(counts_ptr + (STAGE - 1) * step + bins)
                    masses = tl.load(masses_ptr + (STAGE - 1) * step + bins)
                    prefix = tl.zeros([], dtype=tl.int64)
                    base = tl.zeros([], dtype=tl.int64)
                    mass_base = tl.zeros([], dtype=tl.int64)
                    if STAGE == 2:
                        prefix = tl.load(own_state + state_step)
                        base = tl.load(own_state + state_step + 1)
                        mass_base = tl.load(own_state + state_step + 2)
                    selected, base, mass_base = _select_bin(counts, masses, base, mass_base, top_k.to(tl.float64), BINS)
                    prefix = prefix * BINS + selected
                    tl.store(own_state + STAGE * state_step, prefix, mask=part == 0)
                    tl.store(own_state + STAGE * state_step + 1, base, mask=part == 0)
                    tl.store(own_state + STAGE * state_step + 2, mass_base, mask=part == 0)
                    is_counted &= (bits >> (30 - 10 * STAGE)) == prefix
                    keys = (bits >> (20 - 10 * STAGE)) & (BINS - 1)
            if STAGE == 3:
                fills = cuts_p
                histogram = 3
                masses = tl.load(masses_ptr + bins)
                kept = tl.sum(masses, axis=0)
                if cuts_k:
                    own_masses = tl.load(masses_ptr + 2 * step + bins)
                    selected, _, above = _select_bin(
                        tl.load(counts_ptr + 2 * step + bins), own_masses, tl.load(own_state + 2 * state_step + 1),
                        tl.load(own_state + 2 * state_step + 2), top_k.to(tl.float64), BINS,
                    )  # fmt: skip
                    kept = above + tl.sum(tl.where(bins == selected, own_masses, 0), axis=0)
                    k_floor = (tl.load(own_state + 2 * state_step) * BINS + selected).to(tl.int32)
                    floor = tl.maximum(floor, k_floor)
                tl.store(floors + row, floor, mask=part == 0)
                if cuts_p:
                    selected, base, _ = _select_bin(
                        masses, masses, tl.zeros([], dtype=tl.int64), tl.zeros([], dtype=tl.int64),
                        top_p.to(tl.float64) * kept.to(tl.float64), BINS,
                    )  # fmt: skip
                    tl.store(own_state + 3 * state_step, selected.to(tl.int64), mask=part == 0)
                    tl.store(own_state + 3 * state_step + 1, base, mask=part == 0)
                    tl.store(own_state + 3 * state_step + 2, kept, mask=part == 0)
                    is_counted &= (bits >> 20) == selected
                    keys = (bits >> 10) & (BINS - 1)
            if STAGE == 4 or STAGE == 5:
                fills = cuts_p
                histogram = 4
                floor = tl.load(floors + row)
                if cuts_p:
                    before = own_state + (STAGE - 1) * state_step
                    masses = tl.load(masses_ptr + (STAGE - 1) * step + bins)
                    kept = tl.load(before + 2)
                    selected, base, _ = _select_bin(
                        masses, masses, tl.load(before + 1), tl.zeros([], dtype=tl.int64),
                        top_p.to(tl.float64) * kept.to(tl.float64), BINS,
                    )  # fmt: skip
                    prefix = tl.load(before) * BINS + selected
                    if STAGE == 4:
                        tl.store(own_state + 4 * state_step, prefix, mask=part == 0)
                        tl.store(own_state + 4 * state_step + 1, base, mask=part == 0)
                        tl.store(own_state + 4 * state_step + 2, kept, mask=part == 0)
                        is_counted &= (bits >> 10) == prefix
                        keys = bits & (BINS - 1)
                    else:
                        floor = tl.maximum(floor, prefix.to(tl.int32))
            if STAGE < 5:  # noqa: SIM102 - only STAGE is a constant
                if fills:
                    ones = tl.full([BLOCK], 1, dtype=tl.int64)
                    units = (weights * 1099511627776.0).to(tl.int64)
                    tl.atomic_add(counts_ptr + histogram * step + keys, ones, mask=is_counted, sem="relaxed")
                    tl.atomic_add(masses_ptr + histogram * step + keys, units, mask=is_counted, sem="relaxed")
        if STAGE == 5:
            tl.store(sums + row * num_parts + part, tl.sum(tl.where(bits >= floor, weights, 0.0), axis=0))
            if CUTS:
                # Another program of the same row may read the new number instead of the old one. It computes the same
                # result from both.
                tl.store(floors + row, floor, mask=part == 0)


@triton.jit
def _draw(
    logits, out, maxima, tokens, floors, sums, temperatures, seeds, positions, stride, vocab_size, num_parts,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    parts = tl.arange(0, PARTS)
    is_part = parts < num_parts
    temperature = tl.load(temperatures + row)
    part_maxima = tl.load(maxima + row * num_parts + parts, mask=is_part, other=float("-inf"))
    row_max = tl.max(part_maxima, axis=0)
    first_tokens = tl.load(tokens + row * num_parts + parts, mask=is_part, other=vocab_size - 1)
    token = tl.min(tl.where(part_maxima == row_max, first_tokens, vocab_size - 1), axis=0)
    if temperature > 0.0:
        floor = tl.load(floors + row)
        sums_to = tl.cumsum(tl.load(sums + row * num_parts + parts, mask=is_part, other=0.0), axis=0)
        total = tl.max(sums_to, axis=0)
        # No cumulative sum exceeds the total. Rounding must therefore not raise the threshold to the total.
        threshold = tl.minimum(
            _uniform(tl.load(seeds + row), tl.load(positions + row)) * total, total * (1.0 - 1.1920929e-07)
        )
        part = tl.min(tl.where(sums_to > threshold, parts, num_parts - 1), axis=0)
        sum_before = tl.max(tl.where(parts < part, sums_to, 0.0), axis=0)
        first_column = part * BLOCK
        weights = _softmax_weights(
            logits + row.to(tl.int64) * stride, first_column, vocab_size, row_max, temperature, BLOCK
        )
        weights = tl.where(weights.to(tl.int32, bitcast=True) >= floor, weights, 0.0)
        columns = tl.arange(0, BLOCK)
        is_past = (sum_before + tl.cumsum(weights, 0) > threshold) & (weights > 0.0)
        # Because of rounding, it can happen that no cumulative sum within the part exceeds the threshold. In that case,
        # the last token is selected.
        last = tl.max(tl.where(weights > 0.0, columns, 0), axis=0)
        token = first_column + tl.minimum(tl.min(tl.where(is_past, columns, BLOCK), axis=0), last)
    tl.store(out + row, token.to(tl.int64))
