# SPDX-License-Identifier: Apache-2.0
"""Bitmasks of the tokens that grammars allow.

If a sequence has a grammar, each of its sampled rows has one row of bits. The library llguidance fills the bits on the
host, and releases the GIL while it fills them. The bits are applied to the logits on the device just before sampling.
The span sampler owns the `GrammarBitmask`.
"""

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import torch
from llguidance import LLExecutor
from torch import Tensor

from quire_engine.sequence import SequenceStatus
from quire_engine.step.plan import ScheduledSpan
from quire_engine.structured_outputs.grammar import Grammar
from quire_kernels import apply_token_bitmask, to_device_async

_MAX_THREADS = 4
_BITS = 32


@dataclass(frozen=True, slots=True)
class TokenBitmask:
    """The tokens that are allowed in some rows of a batch. Several rows can belong to the same sequence."""

    rows: list[int]
    """Indices of these rows in the logits, in ascending order."""
    bits: Tensor
    """The allowed tokens, as [len(rows), ceil(vocab_size / 32)] int32 on the device. Bit i of word w allows token 32 *
    w + i."""

    def for_rows(self, rows: slice) -> "TokenBitmask | None":
        """Return the bitmask for a slice of the batch, or None if the bitmask has no rows in the slice.

        In the result, the rows are numbered from the start of the slice.
        """
        start, stop = bisect_left(self.rows, rows.start), bisect_left(self.rows, rows.stop)
        if start == stop:
            return None
        return TokenBitmask([row - rows.start for row in self.rows[start:stop]], self.bits[start:stop])

    def select(self, rows: Sequence[int]) -> "TokenBitmask | None":
        """Return the bitmask for some rows of the batch, or None if the bitmask has none of these rows.

        `rows` must be in ascending order. In the result, the rows are numbered from 0.
        """
        index_by_row = {row: index for index, row in enumerate(self.rows)}
        selected = [(i, index_by_row[row]) for i, row in enumerate(rows) if row in index_by_row]
        if not selected:
            return None
        indices = to_device_async([index for _, index in selected], self.bits.device)
        return TokenBitmask([row for row, _ in selected], torch.index_select(self.bits, 0, indices))

    def apply(self, logits: Tensor) -> None:
        """Set logits to -inf in place, for all tokens that are not allowed."""
        apply_token_bitmask(logits, self.bits, to_device_async(self.rows, logits.device))


BitmaskFuture: TypeAlias = Callable[[], TokenBitmask | None]
"""Waits for a bitmask and returns it. It returns None if no row has a grammar."""


def no_bitmask() -> None:
    """Return None, because a step without grammars does not have a bitmask."""


class GrammarBitmask:
    """Fills the bitmasks of steps."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._num_words = -(-vocab_size // _BITS)
        self._device = device
        self._executor: LLExecutor | None = None
        self._thread_pool: ThreadPoolExecutor | None = None

    def fill_async(self, spans: Sequence[ScheduledSpan]) -> BitmaskFuture:
        """Start to fill the bitmask of a batch in another thread.

        At this time, all tokens of the sequences must be known.
        """
        if all(span.sequence.grammar is None for span in spans):
            return no_bitmask
        if self._thread_pool is None:
            self._thread_pool = ThreadPoolExecutor(1, "grammar")
        return self._thread_pool.submit(self.fill, spans).result

    def allow_all(self, num_rows: int) -> TokenBitmask:
        """Return a bitmask for the warm-up. It allows all tokens in all rows of a batch."""
        bits = torch.full((num_rows, self._num_words), -1, dtype=torch.int32)
        return TokenBitmask(list(range(num_rows)), to_device_async(bits, self._device))

    def fill(self, spans: Sequence[ScheduledSpan]) -> TokenBitmask | None:
        """Return the bitmask of spans, or None if no span has a grammar.

        Each span must sample a token. A span has one row, and one more row for each draft token. The row of a draft
        token contains the tokens that the grammar allows after this draft token.
        """
        rows: list[int] = []
        begun: list[tuple[Grammar, int, list[int]]] = []
        not_begun: list[tuple[int, Grammar]] = []
        forced: list[tuple[int, int]] = []
        end = 0
        for span in spans:
            start, end = end, end + 1 + len(span.draft_token_ids)
            grammar = span.sequence.grammar
            if grammar is None or span.sequence.status is SequenceStatus.FINISHED:
                continue
            num_before = grammar.num_rows_before_begin(span.draft_token_ids)
            not_begun += [(len(rows) + i, grammar) for i in range(num_before)]
            if num_before < end - start and grammar.matcher is not None:
                begun.append((grammar, len(rows) + num_before, list(span.draft_token_ids[num_before:])))
            if (forced_token_id := grammar.forced_token_id) is not None:
                # A span with a forced token has no draft.
                forced.append((len(rows), forced_token_id))
            rows += range(start, end)
        if not rows:
            return None
        # At first, all bits are set, which allows every token. If a grammar has not begun, only the tokens that it
        # excludes are cleared below.
        bits = torch.full((len(rows), self._num_words), -1, dtype=torch.int32)
        self._fill_begun(begun, bits)
        for row, grammar in not_begun:
            for token_id in grammar.excluded_token_ids:
                word, bit = divmod(token_id, _BITS)
                bits[row, word] &= ~(1 << bit) if bit < _BITS - 1 else 0x7FFFFFFF
        for row, token_id in forced:
            word, bit = divmod(token_id, _BITS)
            bits[row] = 0
            bits[row, word] = 1 << bit if bit < _BITS - 1 else -(1 << bit)
        return TokenBitmask(rows, to_device_async(bits, self._device))

    def _fill_begun(self, begun: list[tuple[Grammar, int, list[int]]], bits: Tensor) -> None:
        """Fill the rows of grammars that have begun.

        For each of these grammars, `begun` contains the grammar, its first row and its draft tokens.
        """
        if not begun:
            return
        if self._executor is None:
            # One thread is used if the device is a CPU, because its cores compute the model at the same time.
            num_threads = 1 if self._device.type == "cpu" else min(_MAX_THREADS, len(os.sched_getaffinity(0)))
            self._executor = LLExecutor(num_threads=num_threads)
        row_bytes = bits.stride(0) * bits.itemsize
        matchers = [(grammar.matcher, row, draft) for grammar, row, draft in begun if grammar.matcher is not None]
        if plain := [(matcher, row) for matcher, row, draft in matchers if not draft]:
            self._executor.unsafe_compute_mask_ptr(plain, bits.data_ptr(), row_bytes, len(bits))
        if drafts := [entry for entry in matchers if entry[2]]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafts, bits.data_ptr(), row_bytes, len(bits))
        failed = [entry for entry in begun if entry[0].matcher is not None and entry[0].matcher.is_error()]
        self._fill_begun([entry for entry in failed if entry[0].renew_matcher()], bits)
