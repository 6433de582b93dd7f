# SPDX-License-Identifier: Apache-2.0
"""Kernels that route tokens to adapters, in two launches for each step.

The first launch counts the tokens of each slot. The second launch writes the tiles of each slot.

Together they are a counting sort that uses one program for each slot. Each program reads the slots of all tokens, and
selects the tokens of its own slot in order. The kernels use no atomics, and the tiles are deterministic.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.lora_routing import TokenRouting

_TOKENS_PER_ROUND = 1024
"""Number of tokens that a program reads in one iteration. A decoding step takes one iteration, and a prompt of 8,192
tokens takes eight.
"""
_SLOTS_PER_ROUND = 64


def route_tokens(slots: Tensor, out: TokenRouting) -> None:
    """See lora_routing.route_tokens.

    The program of each slot reads 16 bytes for each token. Only the first program reads them from memory; the others
    read them from the L2 cache. With 32 slots and 8,192 tokens, the programs read 4 MB in total.
    """
    num_slots, num_tokens = len(out.slot_counts), len(slots)
    _count_tokens[(num_slots,)](slots, out.slot_counts, num_tokens, TOKENS=_TOKENS_PER_ROUND, num_warps=4)
    # One more program marks the unused tiles.
    _fill_tiles[(num_slots + 1,)](
        slots,
        out.slot_counts,
        out.tile_slots,
        out.tile_rows,
        num_tokens,
        num_slots,
        len(out.tile_slots),
        ROWS=out.tile_rows.shape[1],
        TOKENS=_TOKENS_PER_ROUND,
        SLOTS=_SLOTS_PER_ROUND,
        num_warps=4,
    )


# A step of any size must reuse the compiled kernels, so arguments that differ between steps are not specialized.
@triton.jit(do_not_specialize=["num_tokens"])
def _count_tokens(slots_ptr, counts_ptr, num_tokens, TOKENS: tl.constexpr):
    slot = tl.program_id(0)
    count = 0
    for first_token in range(0, num_tokens, TOKENS):
        tokens = first_token + tl.arange(0, TOKENS)
        token_slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1)
        count += tl.sum((token_slots == slot).to(tl.int32))
    tl.store(counts_ptr + slot, count)


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "num_tiles"])
def _fill_tiles(
    slots_ptr,
    counts_ptr,
    tile_slots_ptr,
    tile_rows_ptr,
    num_tokens,
    num_slots,
    num_tiles,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    slot = tl.program_id(0)
    first = 0
    for at in range(0, slot, SLOTS):
        lower_slots = at + tl.arange(0, SLOTS)
        first += tl.sum((tl.load(counts_ptr + lower_slots, mask=lower_slots < slot, other=0) + ROWS - 1) // ROWS)
    if slot == num_slots:
        for at in range(first, num_tiles, SLOTS):
            tiles = at + tl.arange(0, SLOTS)
            tl.store(tile_slots_ptr + tiles, -1, mask=tiles < num_tiles)
    else:
        count = tl.load(counts_ptr + slot)
        end = first + (count + ROWS - 1) // ROWS
        for at in range(first, end, SLOTS):
            tiles = at + tl.arange(0, SLOTS)
            tl.store(tile_slots_ptr + tiles, slot, mask=tiles < end)
        row_indices = first * ROWS + count + tl.arange(0, ROWS)
        tl.store(tile_rows_ptr + row_indices, -1, mask=row_indices < end * ROWS)
        next_row = first * ROWS
        for at in range(0, num_tokens, TOKENS):
            tokens = at + tl.arange(0, TOKENS)
            token_slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1)
            is_own = (token_slots == slot).to(tl.int32)
            tl.store(tile_rows_ptr + next_row + tl.cumsum(is_own) - 1, tokens, mask=is_own > 0)
            next_row += tl.sum(is_own)
