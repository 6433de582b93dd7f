# SPDX-License-Identifier: Apache-2.0
"""Counts the tokens of sequences with penalties.

The counts are on the device, and are updated when tokens are sampled. The sampler owns them. The table is allocated
when the first sequence with penalties arrives. It has `max_num_seqs` rows and never grows. The warm-up steps include
such a sequence, so that the memory profiling at startup includes the table. A sequence keeps its row until it is freed.
If no row is free, another sequence can take the row of a sequence that is not running. The tokens of the sequence that
lost its row are counted again when it runs.
"""

import weakref
from collections import abc

import torch
from torch import Tensor

from quire_engine.sequence import Sequence
from quire_kernels import to_device_async


class TokenCounts:
    """The prompt tokens and the counts of output tokens. Each sequence has one row."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """`num_rows` is the maximum number of sequences in a step."""
        self._num_rows = num_rows
        self.in_prompt = torch.empty((0, vocab_size), dtype=torch.bool, device=device)
        """True for each token that is in the prompt, as [num_rows, vocab_size] bool. Before the first sequence with
        penalties arrives, this tensor and `counts` have no rows."""
        self.counts = torch.empty((0, vocab_size), dtype=torch.int32, device=device)
        """[num_rows, vocab_size] int32."""
        uses_lists = _uses_token_lists(device)
        self._token_ids = torch.empty((num_rows, 256), dtype=torch.int64, device=device) if uses_lists else None
        """Tokens of each row, as [num_rows, capacity]. The remaining columns of a row are filled with one of its
        tokens."""
        self._num_listed_tokens = [0] * num_rows
        """Number of tokens in each row of `_token_ids`, without the columns that only fill the row."""
        self._row_by_sequence: weakref.WeakKeyDictionary[Sequence, int] = weakref.WeakKeyDictionary()
        self._free_rows: list[int] = []

    def rows_for(self, sequences: abc.Iterable[Sequence], running: abc.Sequence[Sequence]) -> list[int]:
        """Return the row of each sequence.

        If a sequence gets a new row, its tokens are counted. `running` contains all sequences of this step. Sequences
        that are not in it can lose their rows.
        """
        return [self._row_for(sequence, running) for sequence in sequences]

    def forget(self, sequences: abc.Iterable[Sequence]) -> None:
        """Free the rows of sequences. If such a sequence needs a row later, its tokens are counted again."""
        for sequence in sequences:
            if (row := self._row_by_sequence.pop(sequence, None)) is not None:
                self._free_rows.append(row)

    def token_ids(self, rows: list[int]) -> Tensor | None:
        """Return the tokens of the rows as [len(rows), max_tokens] int64, or None on a GPU.

        The same token can occur several times in a row. On a GPU, penalties do not use these lists.
        """
        if self._token_ids is None:
            return None
        max_tokens = max(self._num_listed_tokens[row] for row in rows)
        return self._token_ids[to_device_async(rows, self._token_ids.device), :max_tokens]

    def add(self, rows: list[int], token_ids: Tensor) -> None:
        """Count one more output token in each row. `token_ids` is [len(rows)] int64 on the device."""
        row_index = to_device_async(rows, self.counts.device)
        self.counts[row_index, token_ids] += 1
        if self._token_ids is not None:
            ends = [self._num_listed_tokens[row] for row in rows]
            self._grow(max(ends) + 1)[row_index, to_device_async(ends, self.counts.device)] = token_ids
            for row in rows:
                self._num_listed_tokens[row] += 1

    def _row_for(self, sequence: Sequence, running: abc.Sequence[Sequence]) -> int:
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
        """Extend the token lists to at least `num_tokens` columns, and return them."""
        assert self._token_ids is not None
        capacity = self._token_ids.shape[1]
        if num_tokens > capacity:
            num_new_columns = max(num_tokens, 2 * capacity) - capacity
            self._token_ids = torch.cat((self._token_ids, self._token_ids[:, :1].expand(-1, num_new_columns)), dim=1)
        return self._token_ids


def _uses_token_lists(device: torch.device) -> bool:
    """Return whether penalties use lists of tokens.

    On a CPU, penalties read only the tokens of a sequence. On a GPU, they read the counts of the whole vocabulary.
    """
    return device.type == "cpu"
