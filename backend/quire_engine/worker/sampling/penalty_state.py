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

from quire_engine.sequence import Sequence
from quire_kernels import to_device_async


class TokenCounts:
    """Tokens of prompts, and counts of output tokens, by row."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """`num_rows`: no step has more sequences."""
        self._num_rows = num_rows
        self.in_prompt = torch.empty((0, vocab_size), dtype=torch.bool, device=device)
        """[num_rows, vocab_size] bool; no rows before the first sequence, and so the next one."""
        self.counts = torch.empty((0, vocab_size), dtype=torch.int32, device=device)
        """[num_rows, vocab_size] int32."""
        uses_lists = _uses_token_lists(device)
        self._token_ids = torch.empty((num_rows, 256), dtype=torch.int64, device=device) if uses_lists else None
        """[num_rows, capacity]: what a row has had, filled up with one of these tokens."""
        self._num_listed_tokens = [0] * num_rows
        """Per row, how many of its `_token_ids` there are."""
        self._row_by_sequence: weakref.WeakKeyDictionary[Sequence, int] = weakref.WeakKeyDictionary()
        self._free_rows: list[int] = []

    def rows_for(self, sequences: Iterable[Sequence], running: Sequences[Sequence]) -> list[int]:
        """The row of each sequence; at first, one that counts what it has so far. Sequences that are not `running`,
        those of the step, may lose theirs."""
        return [self._row_for(sequence, running) for sequence in sequences]

    def token_ids(self, rows: list[int]) -> Tensor | None:
        """Tokens that the rows have had, [len(rows), most of them] int64, some of them twice; None on a GPU."""
        if self._token_ids is None:
            return None
        max_tokens = max(self._num_listed_tokens[row] for row in rows)
        return self._token_ids[to_device_async(rows, self._token_ids.device), :max_tokens]

    def add(self, rows: list[int], token_ids: Tensor) -> None:
        """Count one more output token of each row, each row once; `token_ids`: [len(rows)] int64, on the device."""
        row_index = to_device_async(rows, self.counts.device)
        self.counts[row_index, token_ids] += 1
        if self._token_ids is not None:
            ends = [self._num_listed_tokens[row] for row in rows]
            self._grow(max(ends) + 1)[row_index, to_device_async(ends, self.counts.device)] = token_ids
            for row in rows:
                self._num_listed_tokens[row] += 1

    def _row_for(self, sequence: Sequence, running: Sequences[Sequence]) -> int:
        row = self._row_by_sequence.get(sequence)
        if row is None:
            if not len(self.counts):
                self.in_prompt, self.counts = (
                    table.new_zeros((self._num_rows, table.shape[1])) for table in (self.in_prompt, self.counts)
                )
            if not self._free_rows:
                running_rows = {
                    s: running_row for s in running if (running_row := self._row_by_sequence.get(s)) is not None
                }
                self._row_by_sequence = weakref.WeakKeyDictionary(running_rows)
                self._free_rows = sorted({*range(self._num_rows)} - {*running_rows.values()}, reverse=True)
            row = self._row_by_sequence[sequence] = self._free_rows.pop()
            self._init_row(row, sequence)
        return row

    def _init_row(self, row: int, sequence: Sequence) -> None:
        device = self.counts.device
        self.in_prompt[row] = False
        self.in_prompt[row, to_device_async(sequence.prompt_token_ids, device)] = True
        self.counts[row] = 0
        if sequence.output_token_ids:
            output = to_device_async(sequence.output_token_ids, device)
            self.counts[row].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        if self._token_ids is not None:
            seen_tokens = to_device_async(sorted({*sequence.prompt_token_ids, *sequence.output_token_ids}), device)
            token_lists = self._grow(len(seen_tokens))
            token_lists[row] = seen_tokens[0]
            token_lists[row, : len(seen_tokens)] = seen_tokens
            self._num_listed_tokens[row] = len(seen_tokens)

    def _grow(self, num_tokens: int) -> Tensor:
        """Make room for so many tokens of a row; returns the lists."""
        assert self._token_ids is not None
        capacity = self._token_ids.shape[1]
        if num_tokens > capacity:
            num_new_columns = max(num_tokens, 2 * capacity) - capacity
            self._token_ids = torch.cat((self._token_ids, self._token_ids[:, :1].expand(-1, num_new_columns)), dim=1)
        return self._token_ids


def _uses_token_lists(device: torch.device) -> bool:
    """A CPU goes over the tokens that a sequence has had, a GPU over all of the vocabulary."""
    return device.type == "cpu"
