# SPDX-License-Identifier: Apache-2.0
"""Sampler: logits to tokens, each row by its own sequence's parameters. Called by the runner, once a step.

A row is one position of one sequence. A draw depends on the row's logits, its sequence's seed and its position, and on
nothing else: not on the batch, the row's place in it, or whether the sequence was preempted.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_engine.request import Sequence
from quire_engine.step import Logprob, Sampled
from quire_kernels import draw, keep_likely, uniform
from quire_spec.sampling import SamplingParams

# float32 logits worked on at a time: what a core's share of the cache holds, and below the size at which the C library
# returns memory after each use (64 rows of 151,936 at once: softmax 18 ms instead of 4 ms, one Zen 5 core).
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One position to choose a token for."""

    sequence: Sequence
    position: int
    """Of the token to choose, in its sequence; the prompt's first token is 0."""


class Sampler:
    """Chooses tokens. Stateless; a class because device-resident parameters will live here."""

    def __call__(self, logits: Tensor, rows: Rows[Row]) -> list[Sampled]:
        """One token per row.

        Args:
            logits: [num_rows, vocab_size], any float dtype; left as they are.
            rows: what they belong to.
        """
        size = max(1, _CHUNK_BYTES // (4 * logits.shape[1]))
        sampled: list[Sampled] = []
        for start in range(0, len(rows), size):
            sampled += _sample(logits[start : start + size], rows[start : start + size])
        return sampled


def _sample(logits: Tensor, rows: Rows[Row]) -> list[Sampled]:
    params = [row.sequence.params for row in rows]
    allowed = _forbid_stops(logits, rows)
    if all(p.greedy for p in params):
        # As float32: 64 rows of 49,152 in bf16 take 10 ms instead of 3 ms (one Zen 5 core).
        taken = allowed.to(torch.float32).argmax(dim=-1)
    else:
        taken = _draw(allowed.to(torch.float32), rows, params)
    token_ids = taken.tolist()
    logprobs = _logprobs(logits, taken, params)
    return [Sampled([token], logprobs.get(i)) for i, token in enumerate(token_ids)]


def _forbid_stops(logits: Tensor, rows: Rows[Row]) -> Tensor:
    """Logits without the tokens that would end an output of fewer than min_tokens."""
    pairs = [
        (i, token)
        for i, row in enumerate(rows)
        if row.position - len(row.sequence.prompt_token_ids) < row.sequence.params.min_tokens
        for token in row.sequence.stop_token_ids
    ]
    if not pairs:
        return logits
    where = torch.tensor(pairs, device=logits.device)
    return logits.index_put((where[:, 0], where[:, 1]), logits.new_tensor(float("-inf")))


def _draw(logits: Tensor, rows: Rows[Row], params: Rows[SamplingParams]) -> Tensor:
    """[num_rows] int64 from float32 logits; greedy rows get their most likely token."""
    device = logits.device
    greedy = torch.tensor([p.greedy for p in params], device=device)
    # A temperature that float32 rounds to 0 would divide 0 by 0.
    temperature = torch.tensor([1.0 if p.greedy else max(p.temperature, 1e-6) for p in params], device=device)
    shifted = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]
    weights = shifted.softmax(dim=-1)
    if any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params if not p.greedy):
        # Greedy rows draw from everything, which costs nothing; their draw is not used.
        top_k = torch.tensor([0 if p.greedy else max(p.top_k, 0) for p in params], device=device)
        top_p = torch.tensor([1.0 if p.greedy else p.top_p for p in params], device=device)
        min_p = torch.tensor([0.0 if p.greedy else p.min_p for p in params], device=device)
        weights = keep_likely(weights, top_k, top_p, min_p)
    seeds = torch.tensor([row.sequence.seed for row in rows], device=device)
    positions = torch.tensor([row.position for row in rows], device=device)
    drawn = draw(weights, uniform(seeds, positions))
    return torch.where(greedy, logits.argmax(dim=-1), drawn) if any(p.greedy for p in params) else drawn


def _logprobs(logits: Tensor, taken: Tensor, params: Rows[SamplingParams]) -> dict[int, list[list[Logprob]]]:
    """Log probabilities of the rows that ask, by row: of the model's own distribution, before any parameter."""
    wanted = {i: p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
    if not wanted:
        return {}
    index = torch.tensor(list(wanted), device=logits.device)
    table = logits[index].to(torch.float32).log_softmax(dim=-1)
    own = table.gather(-1, taken[index, None])
    ranks = (table > own).sum(dim=-1) + 1
    best = table.topk(min(max(wanted.values()), table.shape[-1]), dim=-1)
    columns = (taken[index].tolist(), own[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist())
    found = {}
    for (i, count), token, logprob, rank, tokens, values in zip(wanted.items(), *columns, strict=True):
        likely = zip(tokens[:count], values[:count], strict=True)
        found[i] = [[Logprob(token, logprob, rank), *(Logprob(*entry, at) for at, entry in enumerate(likely, 1))]]
    return found
