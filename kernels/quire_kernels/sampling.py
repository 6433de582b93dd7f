# SPDX-License-Identifier: Apache-2.0
"""Choosing tokens: penalties, counter-based uniforms, thresholds of likelihood, inverse transform sampling."""

import torch
from torch import Tensor

from quire_kernels import native
from quire_kernels.dispatch import Op

# Likeliest tokens that top-p looks at before it sorts a whole row: 0.2 ms a row of 49,152, against 3 ms (a Zen 5 core).
NUCLEUS_GUESS = 256


@Op
def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) for each (seed, position), the same on every device, whatever else is drawn.

    Args:
        seeds: [num_rows] int64.
        positions: [num_rows] int64, of the token to draw in its sequence.

    Returns:
        [num_rows] float32, multiples of 2^-24.

    Source: SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), the seed mixed
    before the position is added, so that neighbouring seeds do not share shifted streams.
    """
    mixed = _mix(_mix(seeds) + positions * _GOLDEN)
    return _shifted(mixed, 40).to(torch.float32) * 2.0**-24


uniform.form_in("cuda", "own", "quire_kernels.gpu.sampling")


@Op
def most_likely(logits: Tensor) -> Tensor:
    """The largest element of each row, the first of equal ones: [num_rows] int64 of [num_rows, vocab_size]."""
    # As float32: 64 rows of 49,152 in bf16 take 10 ms instead of 3 ms (one Zen 5 core).
    return logits.to(torch.float32).argmax(dim=-1)


most_likely.form_in("cuda", "own", "quire_kernels.gpu.sampling")


@most_likely.form("cpu")
def _most_likely_cpu(logits: Tensor) -> Tensor:
    if not native.suits(logits) or not logits.is_contiguous():
        return most_likely.reference(logits)
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int64)
    native.library().quire_argmax(logits.data_ptr(), out.data_ptr(), rows, vocab_size)
    return out


@Op
def penalize(
    logits: Tensor,
    rows: Tensor,
    in_prompt: Tensor,
    counts: Tensor,
    tallied: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    token_ids: Tensor | None = None,
) -> None:
    """Lower, in place, the logits of tokens that have occurred: repetition first, then frequency and presence.

    Args:
        logits: [num_logits, vocab_size] float32; -inf stays -inf.
        rows: [num_rows] int64, the rows to change, each once.
        in_prompt: [num_tallied, vocab_size] bool, whether a prompt has the token.
        counts: [num_tallied, vocab_size] int32, how often an output has it.
        tallied: [num_rows] int64, where each row's prompt and output are in these two.
        presence: [num_rows] float32, taken off once for a token of the output.
        frequency: [num_rows] float32, taken off for each time.
        repetition: [num_rows] float32 above 0; divides positive and multiplies other logits of prompt and output.
        token_ids: [num_rows, num_tokens] int64, every token that has occurred in the row, some perhaps twice: a form
            need not look at others; None: not known.

    Source: repetition as in CTRL (Keskar et al. 2019, section 4.1), the others as in OpenAI's API reference; the order
    is vLLM's.
    """
    weights = presence, frequency, repetition
    logits[rows] = _penalized(logits[rows], in_prompt[tallied], counts[tallied], *weights)


def _penalized(
    before: Tensor, in_prompt: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    occurred = counts > 0
    factor = torch.where(occurred | in_prompt, repetition[:, None], 1.0)
    scaled = torch.where(before > 0, before / factor, before * factor)
    return scaled - frequency[:, None] * counts - presence[:, None] * occurred


@penalize.form("cpu")
def _penalize_listed(
    logits: Tensor,
    rows: Tensor,
    in_prompt: Tensor,
    counts: Tensor,
    tallied: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    token_ids: Tensor | None = None,
) -> None:
    """Touches listed tokens only: 64 rows of 49,152 with 140 tokens each add 0.7 ms to a step, and looking at all of
    the vocabulary 72 ms (one Zen 5 core)."""
    weights = presence, frequency, repetition
    if token_ids is None:
        penalize.reference(logits, rows, in_prompt, counts, tallied, *weights)
        return
    where, had = (rows[:, None], token_ids), (tallied[:, None], token_ids)
    # A token that is listed twice gets the same value twice.
    logits[where] = _penalized(logits[where], in_prompt[had], counts[had], *weights)


penalize.form_in("cuda", "own", "quire_kernels.gpu.sampling")


@Op
def keep_likely(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Zero the probabilities of tokens that a row does not want, in vLLM's order: min_p, top_k, then top_p of the rest.

    Tokens exactly as likely as the last one kept are kept too, so that a row's choice depends on nothing but the row.

    Args:
        probs: [num_rows, vocab_size] float32, rows that sum to 1.
        top_k: [num_rows] int64, 0 keeps all.
        top_p: [num_rows] float32 in (0, 1].
        min_p: [num_rows] float32 in [0, 1].

    Returns:
        [num_rows, vocab_size] float32, not normalised.
    """
    ordered = probs.sort(dim=-1, descending=True).values
    last = torch.where(top_k > 0, top_k, probs.shape[-1]).clamp(max=probs.shape[-1]) - 1
    floor = torch.maximum(ordered.gather(-1, last[:, None]), min_p[:, None] * ordered[:, :1])
    ordered = torch.where(ordered >= floor, ordered, 0.0)
    before = ordered.cumsum(dim=-1) - ordered
    wanted = (before < top_p[:, None] * ordered.sum(dim=-1, keepdim=True)) | (top_p >= 1.0)[:, None]
    wanted &= ordered > 0
    floor = torch.where(wanted, ordered, torch.inf).amin(dim=-1, keepdim=True)
    return torch.where(probs >= floor, probs, 0.0)


@keep_likely.form("cpu")
def _keep_likely_cpu(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Sorts only what the rows need: sorting 64 rows of 49,152 takes 190 ms on a core."""
    vocab_size = probs.shape[-1]
    floor = min_p[:, None] * probs.amax(dim=-1, keepdim=True)
    most = int(top_k.max())
    if most > 0:
        ordered = probs.topk(min(most, vocab_size), dim=-1).values
        kth = ordered.gather(-1, (top_k.clamp(1, vocab_size) - 1)[:, None])
        floor = torch.where((top_k > 0)[:, None], torch.maximum(floor, kth), floor)
    kept = torch.where(probs >= floor, probs, 0.0)
    rows = (top_p < 1.0).nonzero().flatten()
    for guess in (NUCLEUS_GUESS, 16 * NUCLEUS_GUESS, vocab_size):
        if not len(rows):
            break
        rows = _cut_nucleus(kept, rows, top_p, min(guess, vocab_size))
    return kept


def _cut_nucleus(kept: Tensor, rows: Tensor, top_p: Tensor, guess: int) -> Tensor:
    """Cut, in place, those of `rows` whose nucleus is within their `guess` likeliest tokens; return the others."""
    probs = kept[rows]
    wanted_mass = top_p[rows, None] * probs.sum(dim=-1, keepdim=True)
    ordered = probs.topk(guess, dim=-1).values
    mass = ordered.cumsum(dim=-1)
    found = (mass[:, -1] >= wanted_mass[:, 0]) | (guess == kept.shape[-1])
    last = ((mass - ordered < wanted_mass) & (ordered > 0)).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    cut = torch.where(probs >= ordered.gather(-1, last), probs, 0.0)
    kept[rows[found]] = cut[found]
    return rows[~found]


@Op
def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse transform sampling: the first token at which the running sum passes the uniform's share of the total.

    Args:
        weights: [num_rows, vocab_size] float32, not negative, each row with a positive sum.
        uniforms: [num_rows] float32 in [0, 1).

    Returns:
        [num_rows] int64; never a token of weight 0.
    """
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1]
    # Rounding must not push a share onto the total, which no running sum passes.
    share = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, share[:, None], right=True)[:, 0].clamp_(max=weights.shape[-1] - 1)


@Op
def choose(
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    cuts: bool = True,
    greedy: bool = True,
) -> Tensor:
    """A token for each row: the most likely one, or one drawn from those that `keep_likely` keeps.

    Args:
        logits: [num_rows, vocab_size], any float dtype.
        temperatures: [num_rows] float32, what logits are divided by; 0 takes the most likely token.
        top_k, top_p, min_p: as `keep_likely` takes them; no matter in rows of temperature 0.
        seeds, positions: as `uniform` takes them, likewise.
        cuts: False promises that every row keeps all tokens.
        greedy: False promises that no temperature is 0.

    Returns:
        [num_rows] int64. The same on every device but for rounding: a draw that falls within it of the border between
        two tokens may take either.
    """
    wide = logits.to(torch.float32)
    likeliest = temperatures <= 0
    shifted = (wide - wide.amax(dim=-1, keepdim=True)) / torch.where(likeliest, 1.0, temperatures)[:, None]
    weights = shifted.softmax(dim=-1)
    if cuts:
        # Of greedy rows everything is kept, which costs nothing; their draw is not used.
        top_k, top_p = torch.where(likeliest, 0, top_k), torch.where(likeliest, 1.0, top_p)
        weights = keep_likely(weights, top_k, top_p, torch.where(likeliest, 0.0, min_p))
    drawn = draw(weights, uniform(seeds, positions))
    return torch.where(likeliest, wide.argmax(dim=-1), drawn) if greedy else drawn


choose.form_in("cuda", "own", "quire_kernels.gpu.sampling")


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _mix(x: Tensor) -> Tensor:
    x = x + _GOLDEN
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift right; torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
