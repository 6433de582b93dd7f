# SPDX-License-Identifier: Apache-2.0
"""Logits processors for one batch.

They apply allowed and forbidden tokens first, then the logit bias, and then the penalties. This is also the order of
vLLM. The processors are created once for each batch, and are used in each step until the batch changes. If no request
of a batch needs processing, the batch does not have processors. The sampler owns the processors.
"""

from collections import abc, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Self

import torch
from torch import Tensor

from quire_engine.sequence import Sequence
from quire_engine.worker.sampling.penalty_state import TokenCounts
from quire_kernels import apply_penalties, to_device_async

_NEGATIVE_INFINITY = float("-inf")
_MASK_CHUNK_ROWS = 8


class LogitsProcessors:
    """The logits processors of a batch. Each sequence has one row."""

    def __init__(
        self,
        sequences: abc.Sequence[Sequence],
        vocab_size: int,
        device: torch.device,
        token_counts: TokenCounts,
        running: abc.Sequence[Sequence],
    ) -> None:
        self._device = device
        rows = list(enumerate(sequences))
        allowed = {row: s.params.allowed_token_ids for row, s in rows if s.params.allowed_token_ids}
        biases = [(row, token, bias) for row, s in rows for token, bias in (s.params.logit_bias or {}).items()]
        penalized = {row: s for row, s in rows if s.params.has_penalties}
        self._allowed_tokens = AllowedTokens(allowed, vocab_size, device) if allowed else None
        self._logit_bias = LogitBias(biases, device) if biases else None
        self._penalties = Penalties(penalized, device, token_counts, running) if penalized else None
        self._min_tokens_rows = [(row, s) for row, s in rows if s.params.min_tokens and s.suppressed_token_ids]
        """Rows of sequences that have min_tokens and stop tokens. The stop tokens are forbidden until min_tokens is
        reached."""
        self._bad_words = [(row, s, BadWords(s.bad_words)) for row, s in rows if s.bad_words]
        self._has_static_processors = bool(self._allowed_tokens or self._logit_bias or self._penalties)

    @classmethod
    def from_sequences(
        cls,
        sequences: abc.Sequence[Sequence],
        vocab_size: int,
        device: torch.device,
        token_counts: TokenCounts,
        running: abc.Sequence[Sequence],
    ) -> Self | None:
        """Create the processors, or return None if no sequence needs processing.

        `running` contains all sequences of the step.
        """
        is_needed = any(map(needs_processing, sequences))
        return cls(sequences, vocab_size, device, token_counts, running) if is_needed else None

    def __call__(
        self, logits: Tensor, positions: abc.Sequence[int], drafts: abc.Sequence[tuple[int, ...]] | None = None
    ) -> Tensor:
        """Return the processed logits [num_rows, vocab_size].

        The result is a float32 copy, or `logits` itself if nothing changes. `positions` contains the position of each
        sampled token in its sequence. `drafts` contains the accepted draft tokens before each of these positions. It is
        None if there are no drafts.
        """
        forbidden_pairs = list(self._forbidden_pairs(positions, drafts))
        if not (forbidden_pairs or self._has_static_processors):
            return logits
        logits = logits.to(torch.float32, copy=True)
        if self._allowed_tokens:
            self._allowed_tokens.apply(logits)
        if forbidden_pairs:
            index = to_device_async(torch.tensor(forbidden_pairs), self._device)
            logits[index[:, 0], index[:, 1]] = _NEGATIVE_INFINITY
        if self._logit_bias:
            self._logit_bias.apply(logits)
        if self._penalties:
            self._penalties.apply(logits)
        return logits

    def count_tokens(self, token_ids: Tensor) -> None:
        """Count the tokens that were sampled. `token_ids` is [num_rows] int64."""
        if self._penalties:
            self._penalties.count_tokens(token_ids)

    def _forbidden_pairs(
        self, positions: abc.Sequence[int], drafts: abc.Sequence[tuple[int, ...]] | None
    ) -> Iterator[tuple[int, int]]:
        """Yield the (row, token) pairs that are forbidden in this step."""
        suppressed_by_row = {
            row: sequence.suppressed_token_ids
            for row, sequence in self._min_tokens_rows
            if positions[row] - len(sequence.prompt_token_ids) < sequence.params.min_tokens
            # After the end of a grammar, only a stop token is allowed.
            and not (sequence.grammar is not None and sequence.grammar.is_terminated)
        }
        for row, stop_token_ids in suppressed_by_row.items():
            yield from ((row, token) for token in stop_token_ids)
        for row, sequence, bad_words in self._bad_words:
            draft = drafts[row] if drafts is not None else ()
            output = [*sequence.output_token_ids, *draft] if draft else sequence.output_token_ids
            completing_tokens = {*bad_words.completing_tokens(output)}
            allowed_token_ids = sequence.params.allowed_token_ids
            # The bad words are not forbidden here if this would leave no allowed token, because `allowed_token_ids`
            # already forbids all other tokens.
            if not (
                allowed_token_ids
                and (completing_tokens | suppressed_by_row.get(row, frozenset())).issuperset(allowed_token_ids)
            ):
                yield from ((row, token) for token in completing_tokens)


class AllowedTokens:
    """Applies allowed_token_ids."""

    def __init__(self, allowed_token_ids: Mapping[int, tuple[int, ...]], vocab_size: int, device: torch.device) -> None:
        self._rows = to_device_async(list(allowed_token_ids), device)
        self._disallowed_mask = torch.ones((len(allowed_token_ids), vocab_size), dtype=torch.bool, device=device)
        for row_mask, token_ids in zip(self._disallowed_mask, allowed_token_ids.values(), strict=True):
            row_mask[to_device_async(token_ids, device)] = False

    def apply(self, logits: Tensor) -> None:
        # Only a few rows are processed at a time, because indexing copies them.
        for start in range(0, len(self._rows), _MASK_CHUNK_ROWS):
            chunk = slice(start, start + _MASK_CHUNK_ROWS)
            rows = self._rows[chunk]
            logits[rows] = logits[rows].masked_fill_(self._disallowed_mask[chunk], _NEGATIVE_INFINITY)


class LogitBias:
    """Applies logit_bias. Each pair of row and token has at most one bias."""

    def __init__(self, entries: list[tuple[int, int, float]], device: torch.device) -> None:
        rows, tokens, biases = zip(*entries, strict=True)
        self._rows, self._tokens = to_device_async(rows, device), to_device_async(tokens, device)
        self._biases = to_device_async(torch.tensor(biases, dtype=torch.float32), device)

    def apply(self, logits: Tensor) -> None:
        logits[self._rows, self._tokens] += self._biases


class Penalties:
    """Applies presence_penalty, frequency_penalty and repetition_penalty."""

    def __init__(
        self,
        sequence_by_row: dict[int, Sequence],
        device: torch.device,
        token_counts: TokenCounts,
        running: abc.Sequence[Sequence],
    ) -> None:
        self._token_counts = token_counts
        self._rows = to_device_async(list(sequence_by_row), device)
        # This list keeps the sequences alive. If a sequence is garbage-collected, its row in the token counts is freed.
        self._sequences = list(sequence_by_row.values())
        self._count_rows = token_counts.rows_for(self._sequences, running)
        self._count_rows_on_device = to_device_async(self._count_rows, device)
        params = [s.params for s in self._sequences]
        self._presence = to_device_async([p.presence_penalty for p in params], device)
        self._frequency = to_device_async([p.frequency_penalty for p in params], device)
        self._repetition = to_device_async([p.repetition_penalty for p in params], device)

    def apply(self, logits: Tensor) -> None:
        occurrences = self._token_counts.in_prompt, self._token_counts.counts, self._count_rows_on_device
        weights = self._presence, self._frequency, self._repetition
        apply_penalties(logits, self._rows, *occurrences, *weights, self._token_counts.token_ids(self._count_rows))

    def count_tokens(self, token_ids: Tensor) -> None:
        self._token_counts.add(self._count_rows, token_ids[self._rows])


class BadWords:
    """Finds tokens that would complete a bad word. To be fast with long lists of bad words, it only compares the words
    whose second-to-last token is the last token of the sequence."""

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self._single_token_words: list[int] = []
        self._words_by_previous_token: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in words:
            if len(word) == 1:
                self._single_token_words.append(word[0])
            else:
                self._words_by_previous_token[word[-2]].append(word)

    def completing_tokens(self, output_token_ids: list[int]) -> Iterator[int]:
        yield from self._single_token_words
        for word in self._words_by_previous_token.get(output_token_ids[-1], ()) if output_token_ids else ():
            if tuple(output_token_ids[1 - len(word) :]) == word[:-1]:
                yield word[-1]


def needs_processing(sequence: Sequence) -> bool:
    params = sequence.params
    return bool(
        params.has_penalties or params.logit_bias or params.allowed_token_ids or params.min_tokens or sequence.bad_words
    )
