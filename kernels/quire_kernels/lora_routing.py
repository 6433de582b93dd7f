# SPDX-License-Identifier: Apache-2.0
"""Routing of tokens to adapters or experts on the device.

Each step groups its tokens into tiles whose tokens have the same slot.

The host does not have to know which slots the tokens use. A captured step can therefore be replayed with other
adapters. The maximum number of tiles depends only on the number of tokens in the step and on the number of slots. A
launch has one program for each possible tile. A program whose tile has no tokens exits at once.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from quire_kernels.dispatch import Op

ROWS_PER_TILE = 16
"""Maximum number of tokens in a tile. All tokens of a tile have the same adapter. A GPU's matrix instructions need at
least this many rows."""


@dataclass(frozen=True, slots=True)
class TokenRouting:
    """The tokens of a step, grouped by slot, in buffers that the next step overwrites. A slot is an adapter slot or the
    index of an expert.
    """

    tile_slots: Tensor
    """[max_tiles] int32: the slot of each tile, in ascending order. Tiles without tokens are at the end, and have the
    slot -1.
    """
    tile_rows: Tensor
    """[max_tiles, rows_per_tile] int32: the tokens of each tile, in ascending order and padded with -1. The rows of a
    tile without tokens are undefined.
    """
    slot_counts: Tensor
    """[num_slots] int32: the number of tokens in each slot."""

    @classmethod
    def empty(cls, num_tokens: int, num_slots: int, device: torch.device, rows_per_tile: int = ROWS_PER_TILE) -> Self:
        """Allocate buffers that are large enough for any step of at most `num_tokens` tokens."""
        num_tiles = max_tiles(num_tokens, num_slots, rows_per_tile)
        like = {"dtype": torch.int32, "device": device}
        return cls(
            torch.empty(num_tiles, **like),
            torch.empty(num_tiles, rows_per_tile, **like),
            torch.empty(num_slots, **like),
        )


def max_tiles(num_tokens: int, num_slots: int, rows_per_tile: int = ROWS_PER_TILE) -> int:
    """Return the largest number of tiles that a step can need.

    A step needs this number if its tokens use as many slots as possible, and if the last tile of each of these slots
    contains only one token.
    """
    return (num_tokens + (rows_per_tile - 1) * min(num_tokens, num_slots)) // rows_per_tile


@Op
def route_tokens(slots: Tensor, out: TokenRouting) -> None:
    """Group tokens of the same slot into tiles.

    Args:
        slots: [num_tokens] int64, in any order. -1 means that the token has no adapter. Such tokens are not in any
            tile.
        out: output, large enough for the tokens and for all slots.
    """
    counts = torch.bincount(slots[slots >= 0], minlength=len(out.slot_counts))
    rows_per_tile = out.tile_rows.shape[1]
    tiles = -(-counts // rows_per_tile)
    out.slot_counts.copy_(counts)
    out.tile_slots.fill_(-1)
    out.tile_slots[: tiles.sum()] = torch.repeat_interleave(tiles).to(torch.int32)
    tokens = slots.argsort(stable=True)[(slots < 0).sum() :]
    token_slots = slots[tokens]
    # Index of each token among the tokens of its slot. Tiles are not shared between slots.
    index_in_slot = torch.arange(len(tokens), device=slots.device) - (counts.cumsum(0) - counts)[token_slots]
    out.tile_rows.fill_(-1)
    out.tile_rows.view(-1)[(tiles.cumsum(0) - tiles)[token_slots] * rows_per_tile + index_in_slot] = tokens.to(
        torch.int32
    )


route_tokens.register_lazy("cuda", "own", "quire_kernels.gpu.lora_routing")
