# SPDX-License-Identifier: Apache-2.0
"""Adapter deltas over stacked slots: shrink to the adapters' ranks, expand into the base output.

A slot's A holds the adapters of one merged linear's slices one after another at their live ranks: slice i has rows
[r0 + .. + r(i-1), r0 + .. + ri). Rows past the live ones are never read, so a slot of rank 64 that holds an adapter of
rank 8 costs what rank 8 costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels.dispatch import Op


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Tokens [start, end) of the batch run with the adapter in `slot`."""

    slot: int
    start: int
    end: int


@Op
def lora_shrink(x: Tensor, a: Tensor, ranks: Sequence[Sequence[int]], segments: Sequence[SlotRows]) -> Tensor:
    """x A^T for the tokens of each segment.

    Args:
        x: [num_tokens, in_features].
        a: [num_slots, num_slices * max_rank, in_features], dtype of x.
        ranks: live rank of each slice, by slot; 0 where the adapter leaves a slice alone.
        segments: tokens by slot, not overlapping.

    Returns:
        [num_tokens, num_slices * max_rank], dtype of x; only a segment's tokens and live columns are written.
    """
    shrunk = x.new_empty(x.shape[0], a.shape[1])
    for s in segments:
        if live := sum(ranks[s.slot]):
            shrunk[s.start : s.end, :live] = torch.mm(x[s.start : s.end], a[s.slot, :live].t())
    return shrunk


@Op
def lora_expand(
    shrunk: Tensor,
    b: Sequence[Tensor],
    ranks: Sequence[Sequence[int]],
    segments: Sequence[SlotRows],
    out: Tensor,
) -> None:
    """Add B (A x) of each slice to its columns of `out`; scales are folded into B.

    Args:
        shrunk: what `lora_shrink` returned.
        b: one [num_slots, out_features of the slice, max_rank] per slice, dtype of shrunk.
        ranks: as for `lora_shrink`.
        segments: as for `lora_shrink`.
        out: [num_tokens, out_features of all slices], the base linear's output; written in place.
    """
    for s in segments:
        row = column = 0
        for slice_b, rank in zip(b, ranks[s.slot], strict=True):
            width = slice_b.shape[1]
            if rank:
                target = out[s.start : s.end, column : column + width]
                target.addmm_(shrunk[s.start : s.end, row : row + rank], slice_b[s.slot, :, :rank].t())
            row, column = row + rank, column + width
