# SPDX-License-Identifier: Apache-2.0
"""Tally: which tokens a penalized sequence has had, counted on the device as they are taken.

A row of two tables per sequence, from its first token until the scheduler forgets it; the tables grow as sequences
come. No other sequence costs anything. The sampler owns it.
"""

import weakref

import torch
from torch import Tensor

from quire_engine.request import Sequence


class Tally:
    """Tokens of prompts, and counts of output tokens, by row."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        """[num_rows, vocab_size] bool."""
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        """[num_rows, vocab_size] int32."""
        self._rows: weakref.WeakKeyDictionary[Sequence, int] = weakref.WeakKeyDictionary()
        self._free: list[int] = []

    def row(self, sequence: Sequence) -> int:
        """The sequence's row; at first, one that counts what it has so far."""
        row = self._rows.get(sequence)
        if row is None:
            if not self._free:
                self._grow()
            row = self._rows[sequence] = self._free.pop()
            weakref.finalize(sequence, self._free.append, row).atexit = False
            self._begin(row, sequence)
        return row

    def add(self, rows: Tensor, token_ids: Tensor) -> None:
        """Count one more output token of each row; both [num] int64, on the device, each row once."""
        self.counts[rows, token_ids] += 1

    def _begin(self, row: int, sequence: Sequence) -> None:
        device = self.counts.device
        self.in_prompt[row] = False
        self.in_prompt[row, torch.tensor(sequence.prompt_token_ids, device=device)] = True
        output = torch.tensor(sequence.output_token_ids, dtype=torch.int64, device=device)
        self.counts[row] = output.bincount(minlength=self.counts.shape[1])

    def _grow(self) -> None:
        """Twice the rows, or 8."""
        num_rows = len(self.counts)
        more = max(num_rows, 8)
        self.in_prompt = torch.cat((self.in_prompt, self.in_prompt.new_zeros((more, self.in_prompt.shape[1]))))
        self.counts = torch.cat((self.counts, self.counts.new_zeros((more, self.counts.shape[1]))))
        self._free += range(num_rows, num_rows + more)
