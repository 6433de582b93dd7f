# SPDX-License-Identifier: Apache-2.0
"""Adjustment: what some rows of a batch want done to their logits before a token is chosen.

Tokens forbidden and biased, then penalties, in vLLM's order. Made once for a batch of sequences and used in each step
until the batch changes; a batch in which nobody asks for any of it has none. The sampler owns it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Sequences
from typing import Self

import torch
from torch import Tensor

from quire_engine.request import Sequence
from quire_engine.tally import Tally
from quire_kernels import apply_penalties, to_device_async

_FORBIDDEN = float("-inf")
_MASKED_ROWS = 8


class Adjustment:
    """For the rows of `sequences`, one each, in this order."""

    def __init__(
        self,
        sequences: Sequences[Sequence],
        vocab_size: int,
        device: torch.device,
        tally: Tally,
        running: Sequences[Sequence],
    ) -> None:
        self._device = device
        self._allowed = _Allowed.of(sequences, vocab_size, device)
        self._bias = _Bias.of(sequences, device)
        self._penalties = _Penalties.of(sequences, device, tally, running)
        self._held = [(row, s) for row, s in enumerate(sequences) if s.params.min_tokens and s.held_token_ids]
        """Rows that no stop token may end yet."""
        self._bad_words = [(row, s, _BadWords(s.bad_words)) for row, s in enumerate(sequences) if s.bad_words]
        self._always = bool(self._allowed or self._bias or self._penalties)

    @classmethod
    def of(
        cls,
        sequences: Sequences[Sequence],
        vocab_size: int,
        device: torch.device,
        tally: Tally,
        running: Sequences[Sequence],
    ) -> Self | None:
        """None when no sequence asks for anything. `running`: all sequences of the step."""
        wanted = any(map(_asks, sequences))
        return cls(sequences, vocab_size, device, tally, running) if wanted else None

    def __call__(self, logits: Tensor, positions: Sequences[int]) -> Tensor:
        """Logits to choose from, [num_rows, vocab_size]: float32 and new, or `logits` when there is nothing to do.

        `positions`: of the token to choose, in each sequence.
        """
        forbidden = list(self._forbidden(positions))
        if not (forbidden or self._always):
            return logits
        logits = logits.to(torch.float32, copy=True)
        if self._allowed:
            self._allowed.apply(logits)
        if forbidden:
            where = to_device_async(torch.tensor(forbidden), self._device)
            logits[where[:, 0], where[:, 1]] = _FORBIDDEN
        if self._bias:
            self._bias.apply(logits)
        if self._penalties:
            self._penalties.apply(logits)
        return logits

    def count(self, taken: Tensor) -> None:
        """Take note of the tokens that were chosen: [num_rows] int64."""
        if self._penalties:
            self._penalties.count(taken)

    def _forbidden(self, positions: Sequences[int]) -> Iterator[tuple[int, int]]:
        """(row, token) pairs that only this step forbids."""
        held = {
            row: sequence.held_token_ids
            for row, sequence in self._held
            if positions[row] - len(sequence.prompt_token_ids) < sequence.params.min_tokens
        }
        for row, stops in held.items():
            yield from ((row, token) for token in stops)
        for row, sequence, words in self._bad_words:
            completed = {*words.completed_by(sequence.output_token_ids)}
            allowed = sequence.params.allowed_token_ids
            # Where no allowed token were left, a bad word comes: any other token would be one that is not allowed.
            if not (allowed and (completed | held.get(row, frozenset())).issuperset(allowed)):
                yield from ((row, token) for token in completed)


class _Allowed:
    """allowed_token_ids."""

    def __init__(self, rows: list[int], allowed: list[tuple[int, ...]], vocab_size: int, device: torch.device) -> None:
        self._rows = to_device_async(rows, device)
        self._others = torch.ones((len(rows), vocab_size), dtype=torch.bool, device=device)
        for others, token_ids in zip(self._others, allowed, strict=True):
            others[to_device_async(token_ids, device)] = False

    @classmethod
    def of(cls, sequences: Sequences[Sequence], vocab_size: int, device: torch.device) -> Self | None:
        wanted = {row: s.params.allowed_token_ids for row, s in enumerate(sequences) if s.params.allowed_token_ids}
        return cls(list(wanted), list(wanted.values()), vocab_size, device) if wanted else None

    def apply(self, logits: Tensor) -> None:
        # A few rows at a time, as they are copied.
        for start in range(0, len(self._rows), _MASKED_ROWS):
            part = slice(start, start + _MASKED_ROWS)
            rows = self._rows[part]
            logits[rows] = logits[rows].masked_fill_(self._others[part], _FORBIDDEN)


class _Bias:
    """logit_bias: each (row, token) pair once."""

    def __init__(self, entries: list[tuple[int, int, float]], device: torch.device) -> None:
        rows, tokens, biases = zip(*entries, strict=True)
        self._rows, self._tokens = to_device_async(rows, device), to_device_async(tokens, device)
        self._biases = to_device_async(torch.tensor(biases, dtype=torch.float32), device)

    @classmethod
    def of(cls, sequences: Sequences[Sequence], device: torch.device) -> Self | None:
        biased = ((row, s.params.logit_bias) for row, s in enumerate(sequences))
        entries = [(row, token, b) for row, bias in biased if bias for token, b in bias.items()]
        return cls(entries, device) if entries else None

    def apply(self, logits: Tensor) -> None:
        logits[self._rows, self._tokens] += self._biases


class _Penalties:
    """presence_penalty, frequency_penalty and repetition_penalty."""

    def __init__(
        self, wanted: dict[int, Sequence], device: torch.device, tally: Tally, running: Sequences[Sequence]
    ) -> None:
        self._tally = tally
        self._rows = to_device_async(list(wanted), device)
        # The tally keeps a row as long as the sequence lives, and this refers to it.
        self._sequences = list(wanted.values())
        self._tallied = tally.rows(self._sequences, running)
        self._of_tally = to_device_async(self._tallied, device)
        params = [s.params for s in self._sequences]
        self._presence = to_device_async([p.presence_penalty for p in params], device)
        self._frequency = to_device_async([p.frequency_penalty for p in params], device)
        self._repetition = to_device_async([p.repetition_penalty for p in params], device)

    @classmethod
    def of(
        cls, sequences: Sequences[Sequence], device: torch.device, tally: Tally, running: Sequences[Sequence]
    ) -> Self | None:
        wanted = {row: s for row, s in enumerate(sequences) if s.params.has_penalties}
        return cls(wanted, device, tally, running) if wanted else None

    def apply(self, logits: Tensor) -> None:
        occurred = self._tally.in_prompt, self._tally.counts, self._of_tally
        weights = self._presence, self._frequency, self._repetition
        apply_penalties(logits, self._rows, *occurred, *weights, self._tally.token_ids(self._tallied))

    def count(self, taken: Tensor) -> None:
        self._tally.add(self._tallied, taken[self._rows])


class _BadWords:
    """Which tokens would complete a bad word; one look-up by the last token, so that a long list costs little."""

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self._alone: list[int] = []
        self._after: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in words:
            if len(word) == 1:
                self._alone.append(word[0])
            else:
                self._after[word[-2]].append(word)

    def completed_by(self, output: list[int]) -> Iterator[int]:
        yield from self._alone
        for word in self._after.get(output[-1], ()) if output else ():
            if tuple(output[1 - len(word) :]) == word[:-1]:
                yield word[-1]


def _asks(sequence: Sequence) -> bool:
    params = sequence.params
    return bool(
        params.has_penalties or params.logit_bias or params.allowed_token_ids or params.min_tokens or sequence.bad_words
    )
