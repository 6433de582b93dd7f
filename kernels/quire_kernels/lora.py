# SPDX-License-Identifier: Apache-2.0
"""Adapter deltas over stacked slots: shrink to the adapters' ranks, expand into the base linear's output."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels.dispatch import Op

# What one more product of a few rows costs, in operations of a large one: 34 us a pair, bf16, one Zen 5 core.
PAIR_LAUNCH_FLOPS = 12e6


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Tokens [start, end) of the batch run with the adapter in `slot`."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class AdapterBatch:
    """Which tokens of a step run with which adapter; made once a step by `plan_adapters`."""

    segments: tuple[SlotRows, ...]
    foreign: Tensor
    """[num_tokens, num_slots] bool: True where a token does not run with a slot."""


def plan_adapters(segments: Sequence[SlotRows], num_tokens: int, num_slots: int, device: torch.device) -> AdapterBatch:
    """Describe a step's adapters to `add_lora`; segments do not overlap."""
    foreign = torch.ones(num_tokens, num_slots, dtype=torch.bool)
    for s in segments:
        foreign[s.start : s.end, s.slot] = False
    return AdapterBatch(tuple(segments), foreign.to(device))


@Op
def add_lora(
    out: Tensor, x: Tensor, a: Tensor, b: Sequence[Tensor], ranks: Sequence[Sequence[int]], batch: AdapterBatch
) -> None:
    """Add B (A x) of each token's adapter, slice by slice of a merged linear; scales are folded into B.

    Args:
        out: [num_tokens, out_features of all slices], the base linear's output; written in place.
        x: [num_tokens, in_features], dtype of out.
        a: [num_slices, num_slots, max_rank, in_features], dtype of out; 0 past an adapter's rank.
        b: one [num_slots, max_rank, out_features of the slice] per slice, likewise.
        ranks: of each slice, by slot; 0 where the adapter leaves a slice alone.
        batch: the tokens' slots; those of no segment are left as they are.
    """
    for s in batch.segments:
        column = 0
        for i, rank in enumerate(ranks[s.slot]):
            width = b[i].shape[2]
            if rank:
                shrunk = torch.mm(x[s.start : s.end], a[i, s.slot, :rank].t())
                out[s.start : s.end, column : column + width].addmm_(shrunk, b[i][s.slot, :rank])
            column += width


@add_lora.form("cpu")
def _add_lora_cpu(
    out: Tensor, x: Tensor, a: Tensor, b: Sequence[Tensor], ranks: Sequence[Sequence[int]], batch: AdapterBatch
) -> None:
    num_pairs = sum(1 for s in batch.segments for rank in ranks[s.slot] if rank)
    num_slices, num_slots, max_rank, in_features = a.shape
    flops = 2 * x.shape[0] * num_slots * max_rank * (num_slices * in_features + out.shape[1])
    if x.dtype == torch.bfloat16 and flops < num_pairs * PAIR_LAUNCH_FLOPS:
        _all_slots(out, x, a, b, batch)
    else:
        add_lora.reference(out, x, a, b, ranks, batch)


def _all_slots(out: Tensor, x: Tensor, a: Tensor, b: Sequence[Tensor], batch: AdapterBatch) -> None:
    """Every token against every slot, what is not its own put to 0: two large products instead of many small ones.

    64 tokens over 8 slots of rank 16, q, k and v of 576 to 960, bf16, one Zen 5 core: 0.2 ms against 0.8 ms.
    """
    shrunk = torch.mm(x, a.flatten(0, 2).t()).view(x.shape[0], *a.shape[:3])
    # Not a product with 0: a foreign adapter's infinity must not become this token's NaN.
    shrunk.masked_fill_(batch.foreign[:, None, :, None], 0)
    column = 0
    for i, slots in enumerate(b):
        width = slots.shape[2]
        out[:, column : column + width].addmm_(shrunk[:, i].flatten(1), slots.flatten(0, 1))
        column += width
