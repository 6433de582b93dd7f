# SPDX-License-Identifier: Apache-2.0
"""LoRA deltas on a GPU. Two kernel launches compute the deltas of a linear and all its slices.

The first kernel shrinks the inputs to partial sums of A x. The second kernel expands them and adds the result to the
base output.

A program processes one tile of `TokenRouting`, which has up to 16 tokens of the same adapter. These tokens can be
anywhere in the batch. Several programs share the input features of a linear (split-K). Each of them writes its partial
sums to a plane of its own, and the expand kernel adds the planes in a fixed order. Therefore, no buffer has to be
cleared, no atomics are needed, and the result is deterministic. The grids and constants of the kernels depend only on
the sizes of the step and of the slots. The programs read the LoRA rank of an adapter on the device, so a captured step
stays valid when the adapters in the slots change.

On devices that support programmatic dependent launch (see pdl.py), the expand kernel is launched while the shrink
kernel is still running.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.gpu.launch_math import cdiv, next_power_of_2
from quire_kernels.gpu.pdl import supports_pdl
from quire_kernels.lora import LoRABatch
from quire_kernels.lora_routing import ROWS_PER_TILE, TokenRouting
from quire_kernels.lora_slots import ALIGNMENT, ModuleSlots

_MIN_RANKS = 16
"""Number of LoRA ranks that an iteration processes for an adapter of low rank. A matrix instruction cannot multiply
fewer.
"""
_MAX_RANKS = 64
"""Number of LoRA ranks that an iteration processes for an adapter of higher rank. It is smaller if the maximum rank of
the slots is smaller. The inputs are read once for all ranks of an iteration.
"""
_MIN_INPUTS_PER_PROGRAM = 512
"""Minimum number of input features that one program of the shrink kernel reads. If a linear has fewer, its inputs are
not split.
"""
_MAX_BLOCKS_PER_PROGRAM = 16
"""Maximum number of column blocks that one program of the expand kernel computes."""


@dataclass(frozen=True, slots=True)
class LoRATiles:
    """Tile sizes of both launches.

    tests/bench/gpu.py measures which sizes are best for a GPU.
    """

    inputs: int = 128
    """Number of input features that the shrink kernel reads in one iteration."""
    columns: int = 128
    """Number of columns in a block of the expand kernel."""
    min_shrink_programs: int = 264
    """Number of shrink programs that the launch tries to reach: two for each of 132 multiprocessors. The inputs are not
    split further than that, because each program of the expand kernel must read all planes.
    """
    max_expand_programs: int = 1056
    """If a launch of the expand kernel needs more programs than this number, each program processes several blocks of
    columns. It then reads its planes only once for all these blocks.
    """
    shrink_num_stages: int = 4
    """Number of stages of the compiler's pipeline. With 4 stages, 3 tiles of x and A are loaded while one tile is
    multiplied.
    """
    expand_num_stages: int = 3


TILES = LoRATiles()


def add_lora(out: Tensor, x: Tensor, adapters: ModuleSlots, batch: LoRABatch) -> None:
    """See lora.add_lora.

    The matrices of an adapter are read once for each tile of its tokens. Only the first of these reads is from memory.
    The planes are a float32 tensor [num_splits, num_tokens, num_slices, rank]. They are written once, and each program
    of the expand kernel reads them once.
    """
    use_pdl = supports_pdl(x.device)
    planes = _allocate_planes(x, adapters, batch)
    _launch_shrink(planes, x, adapters, batch, use_pdl)
    _launch_expand_planes(out, planes, adapters, batch, use_pdl)


def _allocate_planes(x: Tensor, adapters: ModuleSlots, batch: LoRABatch) -> Tensor:
    """Allocate the partial results of the product `A x`: [num_splits, num_tokens, num_slices, rank] float32."""
    num_tokens, in_features = x.shape
    num_slices = len(adapters.target.widths)
    # For each adapter, only as many columns are written and read as its LoRA rank. The other columns take up memory,
    # but cause no memory traffic.
    ld_planes = -(-adapters.max_rank // _MIN_RANKS) * _MIN_RANKS
    num_splits = cdiv(in_features, _inputs_per_program(in_features, len(_get_routing(batch).tile_slots) * num_slices))
    return x.new_empty((num_splits, num_tokens, num_slices, ld_planes), dtype=torch.float32)


def _launch_shrink(planes: Tensor, x: Tensor, adapters: ModuleSlots, batch: LoRABatch, early: bool) -> None:
    """Launch the shrink kernel. If `early` is true, the next kernel may start before this one has ended. That kernel
    calls `gdc_wait`.
    """
    in_features, routing = x.shape[1], _get_routing(batch)
    num_splits, _, num_slices, ld_planes = planes.shape
    assert x.stride(1) == 1 and num_slices <= 3
    _shrink[(len(routing.tile_slots), num_splits, num_slices)](
        x,
        x.stride(0),
        routing.tile_slots,
        routing.tile_rows,
        adapters.pages,
        adapters.entries,
        adapters.entries.stride(0),
        planes,
        planes.stride(0),
        planes.stride(1),
        ld_planes,
        in_features,
        _inputs_per_program(in_features, len(routing.tile_slots) * num_slices),
        **_constants(adapters),
        INPUTS=TILES.inputs,
        EARLY=early,
        num_warps=4,
        num_stages=TILES.shrink_num_stages,
    )


def _launch_expand_planes(out: Tensor, planes: Tensor, adapters: ModuleSlots, batch: LoRABatch, early: bool) -> None:
    """Launch the expand kernel. If `early` is true, the shrink kernel that writes these planes comes directly before
    the expand kernel in the stream, and may still be running.
    """
    assert out.stride(1) == 1
    strides = planes.stride(0), planes.stride(1)
    _launch_expand(out, planes, *strides, len(planes), adapters, _get_routing(batch), is_embedding=False, early=early)


def add_lora_embedding(out: Tensor, token_ids: Tensor, adapters: ModuleSlots, batch: LoRABatch) -> None:
    """See lora.add_lora_embedding. One launch does this. It reads a row of A for each token, and it reads B once for
    each tile.
    """
    assert out.stride(1) == 1
    _launch_expand(out, token_ids, 0, 0, 1, adapters, _get_routing(batch), is_embedding=True, early=False)


def _get_routing(batch: LoRABatch) -> TokenRouting:
    assert batch.routing is not None, "plan_adapters makes a routing for CUDA devices"
    return batch.routing


def _constants(adapters: ModuleSlots) -> dict[str, int]:
    max_ranks = min(_MAX_RANKS, max(_MIN_RANKS, next_power_of_2(adapters.max_rank)))
    return {"ALIGNMENT": ALIGNMENT, "ROWS": ROWS_PER_TILE, "NARROW": _MIN_RANKS, "WIDE": max_ranks}


def _inputs_per_program(in_features: int, num_programs: int) -> int:
    """Return how many input features each program of the shrink kernel reads.

    `num_programs` is the number of programs that the launch has if the inputs are not split.
    """
    num_splits = min(cdiv(in_features, _MIN_INPUTS_PER_PROGRAM), cdiv(TILES.min_shrink_programs, num_programs))
    return cdiv(cdiv(in_features, num_splits), TILES.inputs) * TILES.inputs


def _launch_expand(
    out: Tensor,
    source: Tensor,
    plane_size: int,
    ld_source: int,
    num_splits: int,
    adapters: ModuleSlots,
    routing: TokenRouting,
    is_embedding: bool,
    early: bool,
) -> None:
    """Launch the expand kernel on `source`, which contains either the planes, or token ids that select rows of A."""
    first, second, third = (*adapters.target.widths, 0, 0)[:3]
    num_tiles = len(routing.tile_slots)
    num_blocks = sum(cdiv(width, TILES.columns) for width in adapters.target.widths)
    share = min(_MAX_BLOCKS_PER_PROGRAM, cdiv(num_tiles * num_blocks, TILES.max_expand_programs)) * TILES.columns
    num_programs = sum(cdiv(width, share) for width in adapters.target.widths)
    _expand[(num_tiles, num_programs)](
        out,
        out.stride(0),
        routing.tile_slots,
        routing.tile_rows,
        adapters.pages,
        adapters.entries,
        adapters.entries.stride(0),
        source,
        plane_size,
        ld_source,
        ld_source // len(adapters.target.widths),
        num_splits,
        first,
        second,
        third,
        share,
        **_constants(adapters),
        MANY=adapters.max_rank > _MAX_RANKS,
        COLUMNS=TILES.columns,
        LOOKED_UP=is_embedding,
        EARLY=early,
        num_warps=4,
        num_stages=TILES.expand_num_stages,
        launch_pdl=early,
    )


@triton.jit
def _shrink(
    x_ptr,
    ld_x,
    tile_slots_ptr,
    tile_rows_ptr,
    pages_ptr,
    entries_ptr,
    ld_entries,
    planes_ptr,
    plane_size,
    ld_planes,
    slice_size,
    in_features,
    share,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    INPUTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tile, split, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tile_slots_ptr + tile).to(tl.int64)
    if slot >= 0:
        rows = tl.load(tile_rows_ptr + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        entry = entries_ptr + slot * ld_entries + index * 4
        # Every matrix begins at a multiple of ALIGNMENT. Without this hint, each load instruction would load only one
        # element.
        a_ptr = pages_ptr + tl.multiple_of(tl.load(entry), ALIGNMENT)
        rank = tl.load(entry + 2).to(tl.int32)
        dst_ptrs = planes_ptr + split.to(tl.int64) * plane_size + rows * ld_planes + index * slice_size
        first, last = split * share, min(split * share + share, in_features)
        if rank <= NARROW:
            if rank > 0:
                _shrink_ranks(
                    x_ptr, ld_x, rows, a_ptr, rank, 0, first, last, in_features, dst_ptrs, ROWS, NARROW, INPUTS
                )
        else:
            for first_rank in range(0, rank, WIDE):
                _shrink_ranks(
                    x_ptr, ld_x, rows, a_ptr, rank, first_rank, first, last, in_features, dst_ptrs, ROWS, WIDE, INPUTS
                )


@triton.jit
def _shrink_ranks(
    x_ptr,
    ld_x,
    rows,
    a_ptr,
    rank,
    first_rank,
    first,
    last,
    in_features,
    dst_ptrs,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    ranks, row_mask = first_rank + tl.arange(0, RANKS), rows >= 0
    total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    for first_input in range(first, last, INPUTS):
        k = first_input + tl.arange(0, INPUTS)
        left = tl.load(
            x_ptr + rows[:, None] * ld_x + k[None, :], mask=row_mask[:, None] & (k[None, :] < in_features), other=0.0
        )
        right = tl.load(
            a_ptr + ranks[None, :] * in_features + k[:, None],
            mask=(ranks[None, :] < rank) & (k[:, None] < in_features),
            other=0.0,
        )
        total += tl.dot(left, right, input_precision="ieee")
    tl.store(dst_ptrs[:, None] + ranks[None, :], total, mask=row_mask[:, None] & (ranks[None, :] < rank))


# A step of any size must reuse the compiled kernels. Triton would otherwise compile a second variant, because this
# argument is a multiple of 16 only in some steps.
@triton.jit(do_not_specialize=["num_splits"])
def _expand(
    out_ptr,
    ld_out,
    tile_slots_ptr,
    tile_rows_ptr,
    pages_ptr,
    entries_ptr,
    ld_entries,
    source_ptr,
    plane_size,
    ld_source,
    slice_size,
    num_splits,
    first_width,
    second_width,
    third_width,
    share,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    MANY: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOOKED_UP: tl.constexpr,
    EARLY: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tile_slots_ptr + tile).to(tl.int64)
    if slot >= 0:
        # The parts are blocks of columns. They begin with the blocks of the first slice. The blocks of the second and
        # third slice follow.
        of_first, of_second = tl.cdiv(first_width, share), tl.cdiv(second_width, share)
        index = (part >= of_first).to(tl.int32) + (part >= of_first + of_second).to(tl.int32)
        width = tl.where(index == 0, first_width, tl.where(index == 1, second_width, third_width))
        start = tl.where(index == 0, 0, tl.where(index == 1, first_width, first_width + second_width))
        before = tl.where(index == 0, 0, tl.where(index == 1, of_first, of_first + of_second))
        first = (part - before) * share
        last = min(first + share, width)
        entry = entries_ptr + slot * ld_entries + index * 4
        b_ptr = pages_ptr + tl.multiple_of(tl.load(entry + 1), ALIGNMENT)
        rank = tl.load(entry + 2).to(tl.int32)
        rows = tl.load(tile_rows_ptr + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        if LOOKED_UP:
            tokens = tl.load(source_ptr + rows, mask=rows >= 0, other=0)
            shrunk_ptr = pages_ptr + tl.load(entry) + tokens * rank
        else:
            shrunk_ptr = source_ptr + rows * ld_source + index * slice_size
        dst_ptrs = out_ptr + rows * ld_out + start
        if EARLY:
            # The shrink kernel has not written any data that was read so far. A program without a slot need not wait.
            # If all programs have no slot, the shrink kernel had no work either.
            tl.extra.cuda.gdc_wait()
        if rank <= NARROW:
            if rank > 0:
                _expand_columns(
                    shrunk_ptr, plane_size, num_splits, rows >= 0, b_ptr, rank, first, last, width, dst_ptrs,
                    ROWS, NARROW, False, COLUMNS,
                )  # fmt: skip
        else:
            _expand_columns(
                shrunk_ptr, plane_size, num_splits, rows >= 0, b_ptr, rank, first, last, width, dst_ptrs,
                ROWS, WIDE, MANY, COLUMNS,
            )  # fmt: skip


@triton.jit
def _expand_columns(
    shrunk_ptr,
    plane_size,
    num_splits,
    row_mask,
    b_ptr,
    rank,
    first,
    last,
    width,
    dst_ptrs,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    MANY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    shrunk = _sum_planes(shrunk_ptr, plane_size, num_splits, row_mask, rank, 0, ROWS, RANKS).to(b_ptr.dtype.element_ty)
    for first_column in range(first, last, COLUMNS):
        columns = first_column + tl.arange(0, COLUMNS)
        total = tl.dot(shrunk, _load_b(b_ptr, rank, 0, width, columns, RANKS), input_precision="ieee")
        if MANY:
            for first_rank in range(RANKS, rank, RANKS):
                left = _sum_planes(shrunk_ptr, plane_size, num_splits, row_mask, rank, first_rank, ROWS, RANKS)
                right = _load_b(b_ptr, rank, first_rank, width, columns, RANKS)
                total += tl.dot(left.to(right.dtype), right, input_precision="ieee")
        mask = row_mask[:, None] & (columns[None, :] < width)
        base = tl.load(dst_ptrs[:, None] + columns[None, :], mask=mask, other=0.0)
        tl.store(dst_ptrs[:, None] + columns[None, :], (base.to(tl.float32) + total).to(base.dtype), mask=mask)


@triton.jit
def _load_b(b_ptr, rank, first_rank, width, columns, RANKS: tl.constexpr):
    ranks = first_rank + tl.arange(0, RANKS)
    mask = (ranks[:, None] < rank) & (columns[None, :] < width)
    return tl.load(b_ptr + ranks[:, None] * width + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _sum_planes(
    shrunk_ptr, plane_size, num_splits, row_mask, rank, first_rank, ROWS: tl.constexpr, RANKS: tl.constexpr
):
    ranks = first_rank + tl.arange(0, RANKS)
    mask = row_mask[:, None] & (ranks[None, :] < rank)
    total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    plane_ptrs = shrunk_ptr[:, None] + ranks[None, :]
    for _ in range(num_splits):
        total += tl.load(plane_ptrs, mask=mask, other=0.0).to(tl.float32)
        plane_ptrs += plane_size
    return total
