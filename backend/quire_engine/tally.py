# SPDX-License-Identifier: Apache-2.0
"""Tally: which tokens a penalized sequence has had, counted on the device as they are taken.

A row of each table per sequence, from its first token until the scheduler forgets it; the tables grow as sequences and
tokens come. No other sequence costs anything. The sampler owns it.
"""

import weakref

import torch
from torch import Tensor

from quire_engine.request import Sequence
from quire_kernels import on_device


class Tally:
    """Tokens of prompts, and counts of output tokens, by row."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        """[num_rows, vocab_size] bool."""
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        """[num_rows, vocab_size] int32."""
        self._token_ids = torch.zeros((0, 256), dtype=torch.int64, device=device)
        """[num_rows, capacity]: what a row has had, filled up with one of these tokens."""
        self._num_listed: list[int] = []
        """Per row, how many of its `_token_ids` there are."""
        self._rows: weakref.WeakKeyDictionary[Sequence, int] = weakref.WeakKeyDictionary()
        self._free: list[int] = []

    def row(self, sequence: Sequence) -> int:
        """The sequence's row; at first, one that counts what it has so far."""
        row = self._rows.get(sequence)
        if row is None:
            if not self._free:
                self._add_rows()
            row = self._rows[sequence] = self._free.pop()
            weakref.finalize(sequence, self._free.append, row).atexit = False
            self._begin(row, sequence)
        return row

    def token_ids(self, rows: list[int]) -> Tensor:
        """Tokens that the rows have had, [len(rows), most of them] int64, some of them twice."""
        most = max(self._num_listed[row] for row in rows)
        return self._token_ids[on_device(rows, self._token_ids.device), :most]

    def add(self, rows: list[int], token_ids: Tensor) -> None:
        """Count one more output token of each row, each row once; `token_ids`: [len(rows)] int64, on the device."""
        ends = [self._num_listed[row] for row in rows]
        self._widen(max(ends) + 1)
        where = on_device(torch.tensor([rows, ends]), self.counts.device)
        self._token_ids[where[0], where[1]] = token_ids
        self.counts[where[0], token_ids] += 1
        for row in rows:
            self._num_listed[row] += 1

    def _begin(self, row: int, sequence: Sequence) -> None:
        device = self.counts.device
        prompt = on_device(sequence.prompt_token_ids, device)
        output = torch.tensor(sequence.output_token_ids, dtype=torch.int64)
        self.in_prompt[row] = False
        self.in_prompt[row, prompt] = True
        self.counts[row] = on_device(output.bincount(minlength=self.counts.shape[1]), device)
        had = on_device(sorted({*sequence.prompt_token_ids, *sequence.output_token_ids}), device)
        self._widen(len(had))
        self._token_ids[row] = had[0]
        self._token_ids[row, : len(had)] = had
        self._num_listed[row] = len(had)

    def _add_rows(self) -> None:
        """Twice the rows, or 8."""
        num_rows = len(self.counts)
        more = max(num_rows, 8)
        self.in_prompt, self.counts, self._token_ids = (
            torch.cat((table, table.new_zeros((more, table.shape[1]))))
            for table in (self.in_prompt, self.counts, self._token_ids)
        )
        self._num_listed += [0] * more
        self._free += range(num_rows, num_rows + more)

    def _widen(self, num_tokens: int) -> None:
        """Make room for so many tokens of a row."""
        capacity = self._token_ids.shape[1]
        if num_tokens > capacity:
            more = max(num_tokens, 2 * capacity) - capacity
            self._token_ids = torch.cat((self._token_ids, self._token_ids[:, :1].expand(-1, more)), dim=1)
