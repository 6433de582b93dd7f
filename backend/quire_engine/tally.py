# SPDX-License-Identifier: Apache-2.0
"""Tally: which tokens a penalized sequence has had, counted on the device as they are taken.

From the first such sequence on it has room for as many as a step can have, and never takes more of a GPU's memory: who
runs before there are requests measures all of it. A sequence keeps its row until it is gone, or until it does not run
while another one needs a row; then what it has had is counted again. The sampler owns it.
"""

import weakref
from collections.abc import Iterable
from collections.abc import Sequence as Sequences

import torch
from torch import Tensor

from quire_engine.request import Sequence
from quire_kernels import to_device_async


class Tally:
    """Tokens of prompts, and counts of output tokens, by row."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """`num_rows`: no step has more sequences."""
        self._num_rows = num_rows
        self.in_prompt = torch.empty((0, vocab_size), dtype=torch.bool, device=device)
        """[num_rows, vocab_size] bool; no rows before the first sequence, and so the next one."""
        self.counts = torch.empty((0, vocab_size), dtype=torch.int32, device=device)
        """[num_rows, vocab_size] int32."""
        lists = _goes_over_lists(device)
        self._token_ids = torch.empty((num_rows, 256), dtype=torch.int64, device=device) if lists else None
        """[num_rows, capacity]: what a row has had, filled up with one of these tokens."""
        self._num_listed = [0] * num_rows
        """Per row, how many of its `_token_ids` there are."""
        self._rows: weakref.WeakKeyDictionary[Sequence, int] = weakref.WeakKeyDictionary()
        self._free: list[int] = []

    def rows(self, sequences: Iterable[Sequence], running: Sequences[Sequence]) -> list[int]:
        """The row of each sequence; at first, one that counts what it has so far. Sequences that are not `running`,
        those of the step, may lose theirs."""
        return [self._row(sequence, running) for sequence in sequences]

    def token_ids(self, rows: list[int]) -> Tensor | None:
        """Tokens that the rows have had, [len(rows), most of them] int64, some of them twice; None on a GPU."""
        if self._token_ids is None:
            return None
        most = max(self._num_listed[row] for row in rows)
        return self._token_ids[to_device_async(rows, self._token_ids.device), :most]

    def add(self, rows: list[int], token_ids: Tensor) -> None:
        """Count one more output token of each row, each row once; `token_ids`: [len(rows)] int64, on the device."""
        where = to_device_async(rows, self.counts.device)
        self.counts[where, token_ids] += 1
        if self._token_ids is not None:
            ends = [self._num_listed[row] for row in rows]
            self._widen(max(ends) + 1)[where, to_device_async(ends, self.counts.device)] = token_ids
            for row in rows:
                self._num_listed[row] += 1

    def _row(self, sequence: Sequence, running: Sequences[Sequence]) -> int:
        row = self._rows.get(sequence)
        if row is None:
            if not len(self.counts):
                self.in_prompt, self.counts = (
                    table.new_zeros((self._num_rows, table.shape[1])) for table in (self.in_prompt, self.counts)
                )
            if not self._free:
                kept = {s: at for s in running if (at := self._rows.get(s)) is not None}
                self._rows = weakref.WeakKeyDictionary(kept)
                self._free = sorted({*range(self._num_rows)} - {*kept.values()}, reverse=True)
            row = self._rows[sequence] = self._free.pop()
            self._begin(row, sequence)
        return row

    def _begin(self, row: int, sequence: Sequence) -> None:
        device = self.counts.device
        self.in_prompt[row] = False
        self.in_prompt[row, to_device_async(sequence.prompt_token_ids, device)] = True
        self.counts[row] = 0
        if sequence.output_token_ids:
            output = to_device_async(sequence.output_token_ids, device)
            self.counts[row].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        if self._token_ids is not None:
            had = to_device_async(sorted({*sequence.prompt_token_ids, *sequence.output_token_ids}), device)
            listed = self._widen(len(had))
            listed[row] = had[0]
            listed[row, : len(had)] = had
            self._num_listed[row] = len(had)

    def _widen(self, num_tokens: int) -> Tensor:
        """Make room for so many tokens of a row; returns the lists."""
        assert self._token_ids is not None
        capacity = self._token_ids.shape[1]
        if num_tokens > capacity:
            more = max(num_tokens, 2 * capacity) - capacity
            self._token_ids = torch.cat((self._token_ids, self._token_ids[:, :1].expand(-1, more)), dim=1)
        return self._token_ids


def _goes_over_lists(device: torch.device) -> bool:
    """A CPU goes over the tokens that a sequence has had, a GPU over all of the vocabulary."""
    return device.type == "cpu"
