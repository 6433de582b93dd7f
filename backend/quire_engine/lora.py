# SPDX-License-Identifier: Apache-2.0
"""Adapter slots on the device: stacked A and B per linear, filled from host copies. Which adapter goes where is the
registry's business (adapters.py); what an adapter is, peft.py's."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire_engine.peft import HostAdapter
from quire_kernels import SlotRows, lora_expand, lora_shrink


class SlotWeights:
    """The adapters of one linear, whose output is one or more slices side by side (q, k, v; gate, up)."""

    def __init__(
        self, in_features: int, slices: Mapping[str, int], num_slots: int, max_rank: int, like: Tensor
    ) -> None:
        """`slices`: output features by name; `like`: a tensor of the dtype and on the device that slots get."""
        self.names = tuple(slices)
        self.a = like.new_empty((num_slots, len(slices) * max_rank, in_features))
        """[num_slots, num_slices * max_rank, in_features]; a slot's slices one after another at their live ranks."""
        self.b = tuple(like.new_empty((num_slots, width, max_rank)) for width in slices.values())
        """Per slice [num_slots, out_features, max_rank], scales folded in."""
        self.ranks: list[tuple[int, ...]] = [(0,) * len(slices)] * num_slots
        """Per slot, the live rank of each slice."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.a.nbytes + sum(b.nbytes for b in self.b)

    def load(self, slot: int, pairs: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        """Fill a slot: A [rank, in] and B [out, rank] of each slice, None where the adapter leaves it alone."""
        row = 0
        ranks = []
        for stacked, pair in zip(self.b, pairs, strict=True):
            rank = 0
            if pair is not None:
                a, b = pair
                rank = a.shape[0]
                self.a[slot, row : row + rank].copy_(a, non_blocking=True)
                stacked[slot, :, :rank].copy_(b, non_blocking=True)
            ranks.append(rank)
            row += rank
        self.ranks[slot] = tuple(ranks)

    def add(self, out: Tensor, x: Tensor, segments: Sequence[SlotRows]) -> None:
        """Add the adapters' deltas to the base output.

        Args:
            out: [num_tokens, out_features of all slices], written in place.
            x: [num_tokens, in_features].
            segments: which tokens run with which slot.
        """
        touched = [s for s in segments if any(self.ranks[s.slot])]
        if touched:
            lora_expand(lora_shrink(x, self.a, self.ranks, touched), self.b, self.ranks, touched, out)


class AdapterSlots:
    """All slots of a model, and the host copies that fill them."""

    def __init__(self, weights: Mapping[tuple[int, str], SlotWeights], pin: bool) -> None:
        """`weights`: each linear's slots, by layer and name of its first slice; `pin`: keep host copies in pinned
        memory, from which a GPU copies while it computes."""
        self._weights = dict(weights)
        self._pin = pin
        self._host: dict[str, HostAdapter] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots on the device."""
        return sum(weights.num_bytes for weights in self._weights.values())

    def hold(self, digest: str, adapter: HostAdapter) -> None:
        """Keep a host copy under its content digest."""
        self._host[digest] = adapter.pinned() if self._pin else adapter

    def drop(self, digest: str) -> None:
        """Forget a host copy; unknown digests are ignored."""
        self._host.pop(digest, None)

    def activate(self, digest: str, slot: int) -> None:
        """Copy an adapter from host memory into a slot."""
        pairs = self._host[digest].pairs
        with torch.inference_mode():
            for (layer, _), weights in self._weights.items():
                weights.load(slot, [pairs.get((layer, name)) for name in weights.names])
