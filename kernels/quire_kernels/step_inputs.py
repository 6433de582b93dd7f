# SPDX-License-Identifier: Apache-2.0
"""A step's inputs from the state of sequences that stays on the device: of where their blocks are, the host sends what
is new.

A sequence has a row of the state for as long as it runs. The host says which rows run.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from quire_kernels.dispatch import Op


@dataclass(frozen=True, slots=True)
class SequenceState:
    """What the device keeps of running sequences."""

    lengths: Tensor
    """[num_rows] int32: tokens that are computed, and so in the cache."""
    tables: Tensor
    """[num_rows, max_blocks] int64: blocks; what lies past those of the tokens may be anything."""

    @classmethod
    def empty(cls, num_rows: int, max_blocks: int, device: torch.device) -> Self:
        """A state of no sequence."""
        return cls(
            torch.zeros(num_rows, dtype=torch.int32, device=device),
            torch.zeros(num_rows, max_blocks, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model and `paged_attention` read of a step; memory that is filled anew each time."""

    positions: Tensor
    """[num_tokens] int64."""
    addresses: Tensor
    """[num_tokens] int64, as `write_kv` takes them."""
    context_lengths: Tensor
    """[num_spans] int32."""
    block_tables: Tensor
    """[num_spans, max_blocks] int64; past a span's blocks, its first one."""

    @classmethod
    def empty(cls, num_tokens: int, num_spans: int, max_blocks: int, device: torch.device) -> Self:
        """Room for a step of at most so many tokens and spans."""
        like = {"dtype": torch.int64, "device": device}
        return cls(
            torch.zeros(num_tokens, **like),
            torch.zeros(num_tokens, **like),
            torch.zeros(num_spans, dtype=torch.int32, device=device),
            torch.zeros(num_spans, max_blocks, **like),
        )


@Op
def prepare_inputs(rows: Tensor, query_starts: Tensor, state: SequenceState, block_size: int, out: StepInputs) -> None:
    """Fill `out` for spans of sequences.

    Args:
        rows: [num_spans] int64, each span's row of the state.
        query_starts: [num_spans + 1] int32: span i has tokens [query_starts[i], query_starts[i + 1]), at least one.
        state: of all sequences; a span begins after its sequence's computed tokens.
        block_size: tokens of a block.
        out: written to; its sizes are those of the step.
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
    out.block_tables.copy_(torch.where(filled, state.tables[rows, :width], state.tables[rows, :1]))


prepare_inputs.register_lazy("cuda", "own", "quire_kernels.gpu.step_inputs")
