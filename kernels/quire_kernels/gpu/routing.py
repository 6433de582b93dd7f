# SPDX-License-Identifier: Apache-2.0
"""Routing in two launches a step: count each slot's tokens, then write its tiles where those of the slots before end.

A counting sort whose buckets are programs: each reads all tokens' slots and keeps its own, in order. So there are no
atomics and the tiles are the same each time. Never run on a GPU yet: tested in the interpreter.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.routing import ROUTED_ROWS, Routing

_TOKENS = 1024
"""Tokens that a program reads at a time: a decoding step is one round, a prompt of 8,192 tokens eight."""
_SLOTS = 64


def route(slots: Tensor, out: Routing) -> None:
    """See routing.route. Each slot's program reads 16 bytes a token, from the L2 cache but for the first: 32 slots of
    8,192 tokens are 4 MB."""
    num_slots, num_tokens = len(out.counts), len(slots)
    _count[(num_slots,)](slots, out.counts, num_tokens, TOKENS=_TOKENS, num_warps=4)
    # One more program marks the tiles that nobody needs.
    _fill[(num_slots + 1,)](
        slots,
        out.counts,
        out.slots,
        out.rows,
        num_tokens,
        num_slots,
        len(out.slots),
        ROWS=ROUTED_ROWS,
        TOKENS=_TOKENS,
        SLOTS=_SLOTS,
        num_warps=4,
    )


# A step of any size must find its kernels compiled: numbers that differ between steps are not specialised.
@triton.jit(do_not_specialize=["num_tokens"])
def _count(slots_ptr, counts_ptr, num_tokens, TOKENS: tl.constexpr):
    slot = tl.program_id(0)
    count = 0
    for at in range(0, num_tokens, TOKENS):
        tokens = at + tl.arange(0, TOKENS)
        found = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1)
        count += tl.sum((found == slot).to(tl.int32))
    tl.store(counts_ptr + slot, count)


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "num_tiles"])
def _fill(
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
        before = at + tl.arange(0, SLOTS)
        first += tl.sum((tl.load(counts_ptr + before, mask=before < slot, other=0) + ROWS - 1) // ROWS)
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
        free = first * ROWS + count + tl.arange(0, ROWS)
        tl.store(tile_rows_ptr + free, -1, mask=free < end * ROWS)
        place = first * ROWS
        for at in range(0, num_tokens, TOKENS):
            tokens = at + tl.arange(0, TOKENS)
            found = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1)
            own = (found == slot).to(tl.int32)
            tl.store(tile_rows_ptr + place + tl.cumsum(own) - 1, tokens, mask=own > 0)
            place += tl.sum(own)
