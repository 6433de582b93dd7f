# SPDX-License-Identifier: Apache-2.0
"""Computation of a step's inputs on the device, from the state of the sequences. The host sends only new block numbers.

While a sequence runs, it keeps one row of the state. For each step, the host passes the rows that its spans use.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from quire_kernels.dispatch import Op


@dataclass(frozen=True, slots=True)
class SequenceState:
    """State of running sequences on the device."""

    lengths: Tensor
    """[num_rows] int32: the number of tokens whose keys and values are in the cache."""
    tables: Tensor
    """[num_rows, max_blocks] int64: the KV blocks. The entries after the blocks that contain computed or scheduled
    tokens are undefined.
    """

    @classmethod
    def empty(cls, num_rows: int, max_blocks: int, device: torch.device) -> Self:
        """Allocate the state. At first, no sequence uses any row."""
        return cls(
            torch.zeros(num_rows, dtype=torch.int32, device=device),
            torch.zeros(num_rows, max_blocks, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of the model and of `paged_attention`, in buffers that the next step overwrites."""

    positions: Tensor
    """[num_tokens] int64."""
    addresses: Tensor
    """[num_tokens] int64, see `write_kv`."""
    context_lengths: Tensor
    """[num_spans] int32."""
    block_tables: Tensor
    """[num_spans, max_blocks] int64. The columns after the blocks of a context are not written, because in nearly every
    step, most columns are unused.
    """

    @classmethod
    def empty(cls, num_tokens: int, num_spans: int, max_blocks: int, device: torch.device) -> Self:
        """Allocate buffers for a step of at most `num_tokens` tokens and `num_spans` spans."""
        like = {"dtype": torch.int64, "device": device}
        return cls(
            torch.zeros(num_tokens, **like),
            torch.zeros(num_tokens, **like),
            torch.zeros(num_spans, dtype=torch.int32, device=device),
            torch.zeros(num_spans, max_blocks, **like),
        )

    def first(self, num_tokens: int, num_spans: int) -> Self:
        """Return views of the buffers, shortened to the given numbers of tokens and spans."""
        return type(self)(
            self.positions[:num_tokens],
            self.addresses[:num_tokens],
            self.context_lengths[:num_spans],
            self.block_tables[:num_spans],
        )


@Op
def prepare_inputs(rows: Tensor, query_starts: Tensor, state: SequenceState, block_size: int, out: StepInputs) -> None:
    """Fill `out` with the inputs of the spans.

    Args:
        rows: [num_spans] int64, the state row of each span.
        query_starts: [num_spans + 1] int32: span i has tokens [query_starts[i], query_starts[i + 1]), which can be
            empty.
        state: state of all sequences; a span begins after its sequence's computed tokens.
        block_size: number of tokens in a KV block.
        out: tensors for the inputs, with the sizes of the step.
    """
    starts = query_starts.long()
    lengths = starts.diff()
    spans = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), lengths)
    row = rows[spans]
    positions = state.lengths[row].long() + torch.arange(len(out.positions), device=rows.device) - starts[spans]
    out.positions.copy_(positions)
    out.addresses.copy_(state.tables[row, positions // block_size] * block_size + positions % block_size)
    out.context_lengths.copy_(state.lengths[rows] + lengths)
    width = out.block_tables.shape[1]
    filled = torch.arange(width, device=rows.device) < -(-out.context_lengths[:, None] // block_size)
    out.block_tables.copy_(torch.where(filled, state.tables[rows, :width], out.block_tables))


prepare_inputs.register_lazy("cuda", "own", "quire_kernels.gpu.step_inputs")
