# SPDX-License-Identifier: Apache-2.0
"""Routing of tokens to adapters on the device: tiles of tokens that run with the same slot, made anew in each step.

Nobody has to sort the tokens or to know their slots on the host, so a captured step can be replayed with others. How
many tiles there are at most follows from the sizes alone: launches have a program for each, and those without tokens
end at once.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from quire_kernels.dispatch import Op

ROWS_PER_TILE = 16
"""Tokens of a tile at most: a GPU's matrix products take no fewer rows."""


@dataclass(frozen=True, slots=True)
class TokenRouting:
    """Which tokens run with which slot; memory that is filled anew each time."""

    tile_slots: Tensor
    """[max_tiles] int32: the slot of each tile, ascending; -1: the tile has no tokens, nor have those after it."""
    tile_rows: Tensor
    """[max_tiles, 16] int32: its tokens, ascending; -1 after the last one. Of a tile without tokens, anything."""
    slot_counts: Tensor
    """[num_slots] int32: the tokens of each slot."""

    @classmethod
    def empty(cls, num_tokens: int, num_slots: int, device: torch.device) -> Self:
        """Room for any step of so many tokens."""
        num_tiles = max_tiles(num_tokens, num_slots)
        like = {"dtype": torch.int32, "device": device}
        return cls(
            torch.empty(num_tiles, **like),
            torch.empty(num_tiles, ROWS_PER_TILE, **like),
            torch.empty(num_slots, **like),
        )


def max_tiles(num_tokens: int, num_slots: int) -> int:
    """Tiles of any step of so many tokens: each slot that has some can leave all but one row of a tile empty."""
    return (num_tokens + (ROWS_PER_TILE - 1) * min(num_tokens, num_slots)) // ROWS_PER_TILE


@Op
def route_tokens(slots: Tensor, out: TokenRouting) -> None:
    """Put tokens of the same slot into tiles.

    Args:
        slots: [num_tokens] int64, in any order; -1: in no tile.
        out: written to; it has room for so many tokens, and for all slots.
    """
    counts = torch.bincount(slots[slots >= 0], minlength=len(out.slot_counts))
    tiles = -(-counts // ROWS_PER_TILE)
    out.slot_counts.copy_(counts)
    out.tile_slots.fill_(-1)
    out.tile_slots[: tiles.sum()] = torch.repeat_interleave(tiles).to(torch.int32)
    tokens = slots.argsort(stable=True)[(slots < 0).sum() :]
    token_slots = slots[tokens]
    # A token's number among those of its slot; the tiles of slots before it are full, or end with empty rows.
    index_in_slot = torch.arange(len(tokens), device=slots.device) - (counts.cumsum(0) - counts)[token_slots]
    out.tile_rows.fill_(-1)
    out.tile_rows.view(-1)[(tiles.cumsum(0) - tiles)[token_slots] * ROWS_PER_TILE + index_in_slot] = tokens.to(
        torch.int32
    )


route_tokens.register_lazy("cuda", "own", "quire_kernels.gpu.lora_routing")
