# SPDX-License-Identifier: Apache-2.0
"""Adapter deltas in two launches a linear, all its slices together: shrink into planes, expand into the base's output.

The inputs of a linear are split between programs, each of which writes a plane of its own of A x; expand adds the
planes up in their order. So nothing is cleared before, nothing is added atomically, and the result is the same every
time. Loops go to the rank that an adapter has. Never run on a GPU yet: tested in the interpreter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.lora import AdapterBatch
from quire_kernels.lora_slots import LinearSlots

_ROWS = 16
"""Rows of a tile: 8 at most are tokens (lora.TILE_ROWS), and a matrix product takes no fewer than 16."""
_RANKS = 16
_INPUTS = 64
_COLUMNS = 64
_SPLIT = 512
"""Inputs of one program: a decoding step has few tokens, and would keep few processors busy by them alone."""


def add_lora(out: Tensor, x: Tensor, adapters: LinearSlots, batch: AdapterBatch) -> None:
    """See lora.add_lora. Reads each adapter's matrices once a tile of 8 tokens; the planes, float32 [num_splits,
    num_tokens, num_slices, max_rank], are written and read once."""
    num_tokens, in_features = x.shape
    widths = adapters.site.widths
    assert x.stride(1) == out.stride(1) == 1 and len(widths) <= 3
    num_splits = triton.cdiv(in_features, _SPLIT)
    planes = x.new_empty((num_splits, num_tokens, len(widths), adapters.max_rank), dtype=torch.float32)
    num_tiles = batch.tiles.shape[0]
    tiles = batch.device_tiles
    shared = (
        tiles,
        adapters.slots,
        adapters.slots.stride(0),
        adapters.entries,
        adapters.entries.stride(0),
        planes,
        planes.stride(0),
        adapters.max_rank,
    )
    _shrink[(num_tiles, num_splits)](
        x,
        x.stride(0),
        *shared,
        in_features,
        SLICES=len(widths),
        SPLIT=_SPLIT,
        ROWS=_ROWS,
        RANKS=_RANKS,
        INPUTS=_INPUTS,
    )
    first, second, third = (*widths, 0, 0)[:3]
    blocks = [triton.cdiv(width, _COLUMNS) for width in (first, second, third)]
    _expand[(num_tiles, sum(blocks))](
        out,
        out.stride(0),
        *shared,
        num_splits,
        first,
        second,
        third,
        SLICES=len(widths),
        ROWS=_ROWS,
        RANKS=_RANKS,
        COLUMNS=_COLUMNS,
    )


@triton.jit
def _shrink(
    x_ptr,
    ld_x,
    tiles_ptr,
    slots_ptr,
    slot_size,
    entries_ptr,
    ld_entries,
    planes_ptr,
    plane_size,
    max_rank,
    in_features,
    SLICES: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles_ptr + 3 * tile)
    rows = tl.load(tiles_ptr + 3 * tile + 1) + tl.arange(0, ROWS)
    live = rows < tl.load(tiles_ptr + 3 * tile + 2)
    ranks, inputs = tl.arange(0, RANKS), tl.arange(0, INPUTS)
    for index in tl.static_range(SLICES):
        entry = entries_ptr + slot * ld_entries + index * 3
        a_ptr = slots_ptr + slot * slot_size + tl.load(entry)
        rank = tl.load(entry + 2)
        for first_rank in range(0, rank, RANKS):
            of_rank = first_rank + ranks
            total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
            for at in range(split * SPLIT, min(split * SPLIT + SPLIT, in_features), INPUTS):
                k = at + inputs
                in_k = k < in_features
                left = tl.load(x_ptr + rows[:, None] * ld_x + k[None, :], mask=live[:, None] & in_k[None, :], other=0.0)
                right = tl.load(
                    a_ptr + of_rank[None, :] * in_features + k[:, None],
                    mask=(of_rank[None, :] < rank) & in_k[:, None],
                    other=0.0,
                )
                total += tl.dot(left, right, input_precision="ieee")
            to = planes_ptr + split * plane_size + (rows[:, None] * SLICES + index) * max_rank + of_rank[None, :]
            tl.store(to, total, mask=live[:, None] & (of_rank[None, :] < rank))


@triton.jit
def _expand(
    out_ptr,
    ld_out,
    tiles_ptr,
    slots_ptr,
    slot_size,
    entries_ptr,
    ld_entries,
    planes_ptr,
    plane_size,
    max_rank,
    num_splits,
    first_width,
    second_width,
    third_width,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles_ptr + 3 * tile)
    rows = tl.load(tiles_ptr + 3 * tile + 1) + tl.arange(0, ROWS)
    live = rows < tl.load(tiles_ptr + 3 * tile + 2)
    # Blocks of the first slice's columns, then the second's, then the third's.
    first_blocks, second_blocks = tl.cdiv(first_width, COLUMNS), tl.cdiv(second_width, COLUMNS)
    index = (block >= first_blocks).to(tl.int32) + (block >= first_blocks + second_blocks).to(tl.int32)
    width = tl.where(index == 0, first_width, tl.where(index == 1, second_width, third_width))
    start = tl.where(index == 0, 0, tl.where(index == 1, first_width, first_width + second_width))
    before = tl.where(index == 0, 0, tl.where(index == 1, first_blocks, first_blocks + second_blocks))
    columns = (block - before) * COLUMNS + tl.arange(0, COLUMNS)
    entry = entries_ptr + slot * ld_entries + index * 3
    b_ptr = slots_ptr + slot * slot_size + tl.load(entry + 1)
    rank = tl.load(entry + 2)
    if rank > 0:
        ranks = tl.arange(0, RANKS)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for first_rank in range(0, rank, RANKS):
            of_rank = first_rank + ranks
            wanted = live[:, None] & (of_rank[None, :] < rank)
            at = planes_ptr + (rows[:, None] * SLICES + index) * max_rank + of_rank[None, :]
            shrunk = tl.zeros((ROWS, RANKS), dtype=tl.float32)
            for split in range(num_splits):
                shrunk += tl.load(at + split * plane_size, mask=wanted, other=0.0)
            right = tl.load(
                b_ptr + of_rank[:, None] * width + columns[None, :],
                mask=(of_rank[:, None] < rank) & (columns[None, :] < width),
                other=0.0,
            )
            total += tl.dot(shrunk.to(right.dtype), right, input_precision="ieee")
        to = out_ptr + rows[:, None] * ld_out + start + columns[None, :]
        mask = live[:, None] & (columns[None, :] < width)
        base = tl.load(to, mask=mask, other=0.0)
        tl.store(to, (base.to(tl.float32) + total).to(base.dtype), mask=mask)
