# SPDX-License-Identifier: Apache-2.0
"""Sampler: logits to tokens, each row by its own sequence's parameters. Called by the runner, once a step.

A row is one position of one sequence. What its sequence asks for is put on the device once and kept while the batch
stays the same, so that a step does no work for parameters that nobody in it uses. A draw depends on the row's logits,
its sequence's seed and its position, and on nothing else: not on the batch, the row's place in it, or whether the
sequence was preempted.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_engine.adjustment import Adjustment
from quire_engine.logprobs import Scores, logprobs_of, score
from quire_engine.request import Logprob, Sequence
from quire_engine.step import Sampled
from quire_engine.tally import Tally
from quire_engine.trace import stretch
from quire_kernels import argmax_first, sample, to_device_async

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
    """Chooses tokens. Keeps what it prepared for the last batch, and the tokens that penalized sequences have had."""

    def __init__(self, max_rows: int) -> None:
        """`max_rows`: of a step."""
        self._max_rows = max_rows
        self._choices: dict[int, _Choice] = {}
        """By the first row of the part of the batch that they are for."""
        self._tally: Tally | None = None

    def __call__(self, logits: Tensor, rows: Rows[Row], mask: Tensor | None = None) -> list[Sampled]:
        """One token per row.

        Args:
            logits: [num_rows, vocab_size], any float dtype; left as they are.
            rows: what they belong to.
            mask: [num_rows, vocab_size] bool, tokens that may be taken; None: all. It is for what is decided anew in
                each step, such as a grammar, outside of it.
        """
        sampled: list[Sampled] = []
        for part, choice, taken in self._taken(logits, rows, mask):
            logprobs = choice.find_logprobs(logits[part], taken)
            sampled += [Sampled([token], logprobs.get(i)) for i, token in enumerate(taken.tolist())]
        return sampled

    def begin(self, logits: Tensor, rows: Rows[Row]) -> tuple[Tensor, list[tuple[list[int], Scores]]]:
        """The same where it is computed, and nothing waits for it: tokens, [num_rows] int64 on the device, and which
        rows ask for log probabilities, with these."""
        taken, scored = [], []
        for part, choice, of_part in self._taken(logits, rows, None):
            taken.append(of_part)
            if (scores := choice.score(logits[part], of_part)) is not None:
                scored.append(([part.start + i for i in choice.logprobs], scores))
        return taken[0] if len(taken) == 1 else torch.cat(taken), scored

    def _taken(self, logits: Tensor, rows: Rows[Row], mask: Tensor | None) -> Iterator[tuple[slice, "_Choice", Tensor]]:
        """The tokens of a part of the rows after the other, and what chose them."""
        # A GPU has no use for parts.
        on_cpu = logits.device.type == "cpu"
        size = max(1, _CHUNK_BYTES // (4 * logits.shape[1]) if on_cpu else len(rows))
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            choice = self._choice(start, logits, rows[part], rows)
            with stretch("sampler"):
                yield part, choice, choice(logits[part], rows[part], None if mask is None else mask[part])
        # So that no sequence of an earlier, larger batch is kept alive.
        self._choices = {start: choice for start, choice in self._choices.items() if start < len(rows)}

    def _choice(self, start: int, logits: Tensor, part: Rows[Row], rows: Rows[Row]) -> "_Choice":
        """How a part of the rows choose."""
        sequences = [row.sequence for row in part]
        choice = self._choices.get(start)
        if choice is None or choice.sequences != sequences:
            # Not kept beside its successor: a mask of all rows and tokens may be among what it holds.
            self._choices.pop(start, None)
            choice = None
            vocab_size, device = logits.shape[1], logits.device
            if self._tally is None:
                self._tally = Tally(self._max_rows, vocab_size, device)
            running = [row.sequence for row in rows]
            adjustment = Adjustment.of(sequences, vocab_size, device, self._tally, running)
            choice = self._choices[start] = _Choice(sequences, adjustment, device)
        return choice


class _Choice:
    """How the rows of `sequences`, one each, choose; their parameters on the device."""

    def __init__(self, sequences: list[Sequence], adjustment: Adjustment | None, device: torch.device) -> None:
        params = [sequence.params for sequence in sequences]
        self.sequences = sequences
        self._adjustment = adjustment
        self._device = device
        self.logprobs = {i: p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
        """By row, for those that ask: how many of the likeliest."""
        self._all_greedy, self._any_greedy = all(p.greedy for p in params), any(p.greedy for p in params)
        if self._all_greedy:
            return
        # A temperature that float32 rounds to 0 would be one of a greedy row.
        temperatures = [0.0 if p.greedy else max(p.temperature, 1e-6) for p in params]
        self._temperatures = to_device_async(temperatures, device)
        self._seeds = to_device_async([sequence.seed for sequence in sequences], device)
        self._cuts = any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params if not p.greedy)
        self._top_k = to_device_async([max(p.top_k, 0) for p in params], device)
        self._top_p = to_device_async([p.top_p for p in params], device)
        self._min_p = to_device_async([p.min_p for p in params], device)

    def __call__(self, logits: Tensor, rows: Rows[Row], mask: Tensor | None) -> Tensor:
        """[num_rows] int64, on the device."""
        allowed = logits if mask is None else logits.masked_fill(~mask, float("-inf"))
        if self._adjustment is not None:
            allowed = self._adjustment(allowed, [row.position for row in rows])
        taken = argmax_first(allowed) if self._all_greedy else self._draw(allowed, rows)
        if self._adjustment is not None:
            self._adjustment.count(taken)
        return taken

    def find_logprobs(self, logits: Tensor, taken: Tensor) -> dict[int, list[list[Logprob]]]:
        """By row, for those that ask: of the model's own distribution, before any parameter."""
        if not self.logprobs:
            return {}
        index = to_device_async(list(self.logprobs), self._device)
        found = logprobs_of(logits, taken[index], list(self.logprobs.values()), index)
        return {i: [entries] for i, entries in zip(self.logprobs, found, strict=True)}

    def score(self, logits: Tensor, taken: Tensor) -> Scores | None:
        """The same where it is computed; None when nobody asks."""
        if not self.logprobs:
            return None
        index = to_device_async(list(self.logprobs), self._device)
        return score(logits, taken[index], list(self.logprobs.values()), index)

    def _draw(self, logits: Tensor, rows: Rows[Row]) -> Tensor:
        """[num_rows] int64; greedy rows get their most likely token."""
        positions = to_device_async([row.position for row in rows], self._device)
        limits = self._top_k, self._top_p, self._min_p
        return sample(logits, self._temperatures, *limits, self._seeds, positions, self._cuts, self._any_greedy)
