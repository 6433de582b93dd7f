# SPDX-License-Identifier: Apache-2.0
"""Token sampling, which consists of penalties, filters and the random choice of a token.

The filters are top-k, top-p and min-p. Random numbers depend only on a seed and a position, and a token is chosen by
inverse transform sampling.
"""

import functools

import torch
from torch import Tensor

from quire_kernels import cpu_native
from quire_kernels.dispatch import Op

# The top-p filter first sorts only this many of the most likely tokens, because they are usually enough. For a row of
# 49,152 tokens, this takes 0.2 ms on one Zen 5 core. Sorting the whole row takes 3 ms.
NUCLEUS_CANDIDATES = 256


@Op
def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a number in [0, 1) for each pair of a seed and a position.

    The number is the same on every device and in every batch.

    Args:
        seeds: [num_rows] int64.
        positions: [num_rows] int64, position of the token to sample in its sequence.

    Returns:
        [num_rows] float32, multiples of 2^-24.

    Source: SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014). The seed is
    mixed before the position is added, so that the numbers of one seed are not the shifted numbers of an adjacent seed.
    """
    mixed = _mix(_mix(seeds) + positions * _GOLDEN)
    return _logical_shift_right(mixed, 40).to(torch.float32) * 2.0**-24


uniform.register_lazy("cuda", "own", "quire_kernels.gpu.sampling")


@Op
def argmax_first(logits: Tensor) -> Tensor:
    """Return the index of the largest element of each row: [num_rows] int64.

    If several elements are equal, the first one is returned.
    """
    # The rows are converted to float32 because this is faster. For 64 rows of 49,152 tokens, argmax takes 3 ms on one
    # Zen 5 core. In bf16, it takes 10 ms.
    return logits.to(torch.float32).argmax(dim=-1)


argmax_first.register_lazy("cuda", "own", "quire_kernels.gpu.sampling")


@argmax_first.register("cpu")
def _argmax_first_cpu(logits: Tensor) -> Tensor:
    if not cpu_native.supports(logits):
        return argmax_first.reference(logits)
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int64)
    cpu_native.get_library().quire_argmax(logits.data_ptr(), logits.stride(0), out.data_ptr(), rows, vocab_size)
    return out


@Op
def logsumexp(logits: Tensor) -> Tensor:
    """Return the logarithm of the sum of the exponentials of each row: [num_rows] float32.

    Args:
        logits: [num_rows, vocab_size] float32.
    """
    return logits.logsumexp(dim=-1)


@logsumexp.register("cpu")
def _logsumexp_cpu(logits: Tensor) -> Tensor:
    """Add each row in the same order, however many rows there are. torch does not."""
    if logits.dtype != torch.float32 or logits.stride(-1) != 1 or cpu_native.load_library() is None:
        return logsumexp.reference(logits)
    out = torch.empty(len(logits))
    cpu_native.get_library().quire_logsumexp(logits.data_ptr(), logits.stride(0), out.data_ptr(), *logits.shape)
    return out


@Op
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
    """Penalize the tokens that have occurred, by changing their logits in place.

    The repetition penalty is applied first, then the frequency and presence penalties.

    Args:
        logits: [num_logits, vocab_size] float32; -inf stays -inf.
        rows: [num_rows] int64, the rows to change, without repetitions.
        in_prompt: [num_states, vocab_size] bool, whether the prompt contains the token.
        counts: [num_states, vocab_size] int32, occurrences of the token in the output.
        state_rows: [num_rows] int64, each row's index in `in_prompt` and `counts`.
        presence: [num_rows] float32, subtracted once for a token that the output contains.
        frequency: [num_rows] float32, subtracted for each occurrence.
        repetition: [num_rows] float32 above 0. It applies to the tokens of the prompt and the output: positive logits
            are divided by it, and other logits are multiplied by it.
        token_ids: [num_rows, num_tokens] int64, every token that has occurred in the row, possibly more than once. All
            other tokens can then be skipped. None: these tokens are not known.

    Source: the repetition penalty is that of CTRL (Keskar et al. 2019, section 4.1), the other penalties are those of
    OpenAI's API reference; the order is vLLM's.
    """
    weights = presence, frequency, repetition
    logits[rows] = _penalize_logits(logits[rows], in_prompt[state_rows], counts[state_rows], *weights)


def _penalize_logits(
    logits: Tensor, in_prompt: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    occurred = counts > 0
    factor = torch.where(occurred | in_prompt, repetition[:, None], 1.0)
    scaled = torch.where(logits > 0, logits / factor, logits * factor)
    return scaled - frequency[:, None] * counts - presence[:, None] * occurred


@apply_penalties.register("cpu")
def _apply_penalties_cpu(
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
    """Apply the penalties only to the logits of `token_ids`.

    For 64 rows with a vocabulary of 49,152 and 140 tokens in `token_ids` for each row, this adds 0.7 ms to a step.
    Going through the whole vocabulary would add 72 ms (measured on one Zen 5 core).
    """
    weights = presence, frequency, repetition
    if token_ids is None:
        apply_penalties.reference(logits, rows, in_prompt, counts, state_rows, *weights)
        return
    logit_index, state_index = (rows[:, None], token_ids), (state_rows[:, None], token_ids)
    # A token that is listed twice gets the same value twice.
    logits[logit_index] = _penalize_logits(logits[logit_index], in_prompt[state_index], counts[state_index], *weights)


apply_penalties.register_lazy("cuda", "own", "quire_kernels.gpu.sampling")


@Op
def apply_token_bitmask(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """If a bitmask forbids a token, set its logit to -inf, in place.

    Args:
        logits: [num_logits, vocab_size], any float dtype.
        bits: [num_rows, ceil(vocab_size / 32)] int32; bit i of word w allows token 32 * w + i.
        rows: [num_rows] int64, the rows of `logits` to change, without repetitions.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    is_forbidden = ((bits[:, :, None] >> shifts) & 1 == 0).flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(is_forbidden, float("-inf"))


@apply_token_bitmask.register("cpu")
def _apply_token_bitmask_cpu(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """Mask one row after the other, because one row fits into the processor's cache. A table of 256 entries converts
    bits to bytes.
    """
    vocab_size = logits.shape[1]
    if cpu_native.supports(logits):
        cpu_native.get_library().quire_apply_bitmask(
            logits.data_ptr(), logits.stride(0), bits.data_ptr(), bits.stride(0), rows.data_ptr(), len(rows), vocab_size
        )
        return
    table = _forbidden_bits()
    for row, words in zip(rows.tolist(), bits, strict=True):
        is_forbidden = table[words.view(torch.uint8).to(torch.int64)].flatten()[:vocab_size]
        logits[row].masked_fill_(is_forbidden, float("-inf"))


apply_token_bitmask.register_lazy("cuda", "own", "quire_kernels.gpu.sampling")


@functools.cache
def _forbidden_bits() -> Tensor:
    """Return a table [256, 8] bool that contains, for each byte, which of its bits are 0."""
    return (torch.arange(256)[:, None] >> torch.arange(8)) & 1 == 0


@Op
def filter_top_k_top_p_min_p(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set the probabilities of filtered tokens to zero.

    The filters are applied in the same order as in vLLM: first min_p, then top_k, and then top_p to the tokens that
    remain.

    If other tokens are exactly as likely as the last token that a filter keeps, they are kept too. The result therefore
    depends only on the row.

    Args:
        probs: [num_rows, vocab_size] float32, rows that sum to 1.
        top_k: [num_rows] int64, 0 keeps all.
        top_p: [num_rows] float32 in (0, 1].
        min_p: [num_rows] float32 in [0, 1].

    Returns:
        [num_rows, vocab_size] float32, not normalised.
    """
    sorted_probs = probs.sort(dim=-1, descending=True).values
    last_kept = torch.where(top_k > 0, top_k, probs.shape[-1]).clamp(max=probs.shape[-1]) - 1
    floor = torch.maximum(sorted_probs.gather(-1, last_kept[:, None]), min_p[:, None] * sorted_probs[:, :1])
    sorted_probs = torch.where(sorted_probs >= floor, sorted_probs, 0.0)
    mass_before = sorted_probs.cumsum(dim=-1) - sorted_probs
    in_nucleus = (mass_before < top_p[:, None] * sorted_probs.sum(dim=-1, keepdim=True)) | (top_p >= 1.0)[:, None]
    in_nucleus &= sorted_probs > 0
    floor = torch.where(in_nucleus, sorted_probs, torch.inf).amin(dim=-1, keepdim=True)
    return torch.where(probs >= floor, probs, 0.0)


@filter_top_k_top_p_min_p.register("cpu")
def _filter_top_k_top_p_min_p_cpu(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """For each row, sort only as many of the most likely tokens as the filters need.

    A complete sort of 64 rows of 49,152 tokens takes 190 ms on one core.
    """
    vocab_size = probs.shape[-1]
    floor = min_p[:, None] * probs.amax(dim=-1, keepdim=True)
    max_top_k = int(top_k.max())
    if max_top_k > 0:
        ordered = probs.topk(min(max_top_k, vocab_size), dim=-1).values
        kth = ordered.gather(-1, (top_k.clamp(1, vocab_size) - 1)[:, None])
        floor = torch.where((top_k > 0)[:, None], torch.maximum(floor, kth), floor)
    filtered = torch.where(probs >= floor, probs, 0.0)
    rows = (top_p < 1.0).nonzero().flatten()
    for num_candidates in (NUCLEUS_CANDIDATES, 16 * NUCLEUS_CANDIDATES, vocab_size):
        if not len(rows):
            break
        rows = _filter_top_p_of_rows(filtered, rows, top_p, min(num_candidates, vocab_size))
    return filtered


def _filter_top_p_of_rows(filtered: Tensor, rows: Tensor, top_p: Tensor, num_candidates: int) -> Tensor:
    """Apply the top-p filter in place to all rows whose nucleus is within the `num_candidates` most likely tokens.

    Return the other rows.
    """
    probs = filtered[rows]
    nucleus_mass = top_p[rows, None] * probs.sum(dim=-1, keepdim=True)
    ordered = probs.topk(num_candidates, dim=-1).values
    mass = ordered.cumsum(dim=-1)
    is_resolved = (mass[:, -1] >= nucleus_mass[:, 0]) | (num_candidates == filtered.shape[-1])
    last_kept = ((mass - ordered < nucleus_mass) & (ordered > 0)).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    nucleus = torch.where(probs >= ordered.gather(-1, last_kept), probs, 0.0)
    filtered[rows[is_resolved]] = nucleus[is_resolved]
    return rows[~is_resolved]


@Op
def inverse_transform(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return, for each row, the first token at which the cumulative sum of the row is greater than uniform * total.

    Args:
        weights: [num_rows, vocab_size] float32, nonnegative, each row with a positive sum.
        uniforms: [num_rows] float32 in [0, 1).

    Returns:
        [num_rows] int64; never a token of weight 0.
    """
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1]
    # No cumulative sum exceeds the total. Rounding must therefore not raise the threshold to the total.
    threshold = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, threshold[:, None], right=True)[:, 0].clamp_(max=weights.shape[-1] - 1)


@Op
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
    """Return a token for each row.

    This is either the most likely token, or a token that is sampled after `filter_top_k_top_p_min_p`.

    Args:
        logits: [num_rows, vocab_size], any float dtype.
        temperatures: [num_rows] float32, divisor of the logits; 0 selects the most likely token.
        top_k, top_p, min_p: see `filter_top_k_top_p_min_p`; ignored in rows of temperature 0.
        seeds, positions: see `uniform`; ignored in rows of temperature 0.
        any_filtered: False guarantees that top_k, top_p and min_p keep all tokens of every row.
        any_greedy: False guarantees that no temperature is 0.

    Returns:
        [num_rows] int64. Every device gives the same tokens, except for rounding: a random number close to the border
        between two tokens can select either token.
    """
    logits_f32 = logits.to(torch.float32)
    is_greedy = temperatures <= 0
    shifted = (logits_f32 - logits_f32.amax(dim=-1, keepdim=True)) / torch.where(is_greedy, 1.0, temperatures)[:, None]
    weights = shifted.softmax(dim=-1)
    if any_filtered:
        # For greedy rows, the filters are set to keep all tokens, which costs nothing. The token that is sampled for a
        # greedy row is not used.
        top_k, top_p = torch.where(is_greedy, 0, top_k), torch.where(is_greedy, 1.0, top_p)
        weights = filter_top_k_top_p_min_p(weights, top_k, top_p, torch.where(is_greedy, 0.0, min_p))
    sampled = inverse_transform(weights, uniform(seeds, positions))
    return torch.where(is_greedy, logits_f32.argmax(dim=-1), sampled) if any_greedy else sampled


@sample.register("cpu")
def _sample_cpu(
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
    """Use a single pass over the logits to sample the rows that have no filters.

    How a row is sampled depends only on its own parameters. For 64 rows of 49,152 tokens in bf16, this takes 2.0 ms,
    compared with 9.8 ms for torch (measured on two shared cores).
    """
    filters = top_k, top_p, min_p
    if (
        logits.dtype not in (torch.bfloat16, torch.float32)
        or logits.stride(-1) != 1
        or cpu_native.load_library() is None
    ):
        return sample.reference(logits, temperatures, *filters, seeds, positions, any_filtered, any_greedy)
    uniforms, tokens = uniform(seeds, positions), torch.empty(len(logits), dtype=torch.int64)
    cpu_native.get_library().quire_sample(
        logits.data_ptr(),
        logits.dtype == torch.float32,
        logits.stride(0),
        temperatures.data_ptr(),
        uniforms.data_ptr(),
        tokens.data_ptr(),
        *logits.shape,
    )
    if any_filtered:
        is_filtered = ((top_k > 0) | (top_p < 1) | (min_p > 0)) & (temperatures > 0)
        rows = is_filtered.nonzero().flatten()
        if len(rows):
            selected = (each[rows] for each in (logits, temperatures, *filters, seeds, positions))
            tokens[rows] = sample.reference(*selected, any_filtered=True, any_greedy=False)
    return tokens


sample.register_lazy("cuda", "own", "quire_kernels.gpu.sample")
# `own` selects one of the two by the number of rows.
sample.register_lazy("cuda", "bisection", "quire_kernels.gpu.sampling")
sample.register_lazy("cuda", "histogram", "quire_kernels.gpu.histogram_sampling")


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _mix(x: Tensor) -> Tensor:
    x = x + _GOLDEN
    x = (x ^ _logical_shift_right(x, 30)) * _MIX_1
    x = (x ^ _logical_shift_right(x, 27)) * _MIX_2
    return x ^ _logical_shift_right(x, 31)


def _logical_shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros. torch's own shift is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
