# SPDX-License-Identifier: Apache-2.0
"""Bitmasks of the tokens that grammars allow: one row of bits per sampled row of a sequence with a grammar.

Filled on the host, by llguidance without the GIL, and applied to the logits on the device just before sampling. The
model runner owns it.
"""

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import torch
from llguidance import LLExecutor, LLMatcher
from torch import Tensor

from quire_engine import sequence as engine_sequence
from quire_engine.sequence import SequenceStatus
from quire_kernels import apply_token_bitmask, to_device_async

_MAX_THREADS = 4
_BITS = 32


@dataclass(frozen=True, slots=True)
class TokenBitmask:
    """The allowed tokens of some rows of a batch. A sequence can have several rows."""

    rows: list[int]
    """Rows of the logits, ascending."""
    bits: Tensor
    """[len(rows), ceil(vocab_size / 32)] int32 on the device: bit i of word w allows token 32 * w + i."""

    def for_rows(self, rows: slice) -> "TokenBitmask | None":
        """Return the part for a slice of the batch, renumbered; None if it has no rows there."""
        start, stop = bisect_left(self.rows, rows.start), bisect_left(self.rows, rows.stop)
        if start == stop:
            return None
        return TokenBitmask([row - rows.start for row in self.rows[start:stop]], self.bits[start:stop])

    def apply(self, logits: Tensor) -> None:
        """Set the logits of all other tokens of these rows to -inf, in place."""
        apply_token_bitmask(logits, self.bits, to_device_async(self.rows, logits.device))


BitmaskFuture: TypeAlias = Callable[[], TokenBitmask | None]
"""Waits for a bitmask; None if no row has a grammar."""


def no_bitmask() -> None:
    """The future of a step without grammars."""


class GrammarBitmask:
    """Fills the bitmasks of steps."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._num_words = -(-vocab_size // _BITS)
        self._device = device
        self._executor: LLExecutor | None = None
        self._thread_pool: ThreadPoolExecutor | None = None

    def fill_async(self, sequences: Sequence[engine_sequence.Sequence]) -> BitmaskFuture:
        """Start to fill the bitmask of a batch in another thread. The sequences' tokens must be known."""
        if all(sequence.grammar is None for sequence in sequences):
            return no_bitmask
        if self._thread_pool is None:
            self._thread_pool = ThreadPoolExecutor(1, "grammar")
        return self._thread_pool.submit(self.fill, sequences).result

    def allow_all(self, num_rows: int) -> TokenBitmask:
        """Return a bitmask that allows all tokens in all rows of a batch, for the warm-up."""
        bits = torch.full((num_rows, self._num_words), -1, dtype=torch.int32)
        return TokenBitmask(list(range(num_rows)), to_device_async(bits, self._device))

    def fill(self, sequences: Sequence[engine_sequence.Sequence]) -> TokenBitmask | None:
        """Return the bitmask of a batch, one row of logits per sequence; None if no sequence has a grammar."""
        grammars = {
            row: sequence.grammar
            for row, sequence in enumerate(sequences)
            if sequence.grammar is not None and sequence.status is not SequenceStatus.FINISHED
        }
        if not grammars:
            return None
        # All bits set, for grammars that have not begun.
        bits = torch.full((len(grammars), self._num_words), -1, dtype=torch.int32)
        begun = ((g.matcher, i) for i, g in enumerate(grammars.values()) if g.has_begun)
        self._fill_begun([(matcher, i) for matcher, i in begun if matcher is not None], bits)
        for i, grammar in enumerate(grammars.values()):
            for token_id in grammar.excluded_token_ids:
                word, bit = divmod(token_id, _BITS)
                bits[i, word] &= ~(1 << bit) if bit < _BITS - 1 else 0x7FFFFFFF
            if (forced_token_id := grammar.forced_token_id) is not None:
                word, bit = divmod(forced_token_id, _BITS)
                bits[i] = 0
                bits[i, word] = 1 << bit if bit < _BITS - 1 else -(1 << bit)
        return TokenBitmask(list(grammars), to_device_async(bits, self._device))

    def _fill_begun(self, matchers: list[tuple[LLMatcher, int]], bits: Tensor) -> None:
        if not matchers:
            return
        if self._executor is None:
            # The cores of a CPU compute the model at the same time.
            num_threads = 1 if self._device.type == "cpu" else min(_MAX_THREADS, len(os.sched_getaffinity(0)))
            self._executor = LLExecutor(num_threads=num_threads)
        self._executor.unsafe_compute_mask_ptr(matchers, bits.data_ptr(), bits.stride(0) * bits.itemsize, len(bits))
