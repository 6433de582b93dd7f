# SPDX-License-Identifier: Apache-2.0
"""Adapter slots on the device: stacked A and B per linear, filled from host copies. Which adapter goes where is the
registry's business (adapters.py); what an adapter is, peft.py's."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from quire_engine.peft import HostAdapter
from quire_kernels import AdapterBatch, add_lora


class SlotWeights:
    """The adapters of one linear, whose output is one or more slices side by side (q, k, v; gate, up)."""

    def __init__(
        self, in_features: int, slices: Mapping[str, int], num_slots: int, max_rank: int, like: Tensor
    ) -> None:
        """`slices`: output features by name; `like`: a tensor of the dtype and on the device that slots get."""
        self.names = tuple(slices)
        # Zeros past an adapter's rank: there are forms of `add_lora` that multiply all of it.
        self.a = like.new_zeros((len(slices), num_slots, max_rank, in_features))
        """[num_slices, num_slots, max_rank, in_features]."""
        self.b = tuple(like.new_zeros((num_slots, max_rank, width)) for width in slices.values())
        """Per slice [num_slots, max_rank, out_features], scales folded in."""
        self.ranks: list[tuple[int, ...]] = [(0,) * len(slices)] * num_slots
        """Per slot, the rank of each slice; 0 where its adapter leaves the slice alone."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.a.nbytes + sum(b.nbytes for b in self.b)

    def load(self, slot: int, pairs: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        """Fill a slot: A [rank, in] and B [out, rank] of each slice, None where the adapter leaves it alone."""
        for a, b, pair in zip(self.a, self.b, pairs, strict=True):
            rank = 0
            if pair is not None:
                rank = pair[0].shape[0]
                a[slot, :rank].copy_(pair[0], non_blocking=True)
                b[slot, :rank].copy_(pair[1].t(), non_blocking=True)
            a[slot, rank:].zero_()
            b[slot, rank:].zero_()
        self.ranks[slot] = tuple(0 if pair is None else pair[0].shape[0] for pair in pairs)

    def add(self, out: Tensor, x: Tensor, batch: AdapterBatch) -> None:
        """Add the adapters' deltas to the base output.

        Args:
            out: [num_tokens, out_features of all slices], written in place.
            x: [num_tokens, in_features].
            batch: which tokens run with which slot.
        """
        if any(any(self.ranks[s.slot]) for s in batch.segments):
            add_lora(out, x, self.a, self.b, self.ranks, batch)


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

    def pack(self, adapter: HostAdapter) -> HostAdapter:
        """An adapter as `hold` keeps it, for any thread."""
        return adapter.pinned() if self._pin else adapter

    def hold(self, digest: str, packed: HostAdapter) -> None:
        """Keep a host copy under its content digest."""
        self._host[digest] = packed

    def drop(self, digest: str) -> None:
        """Forget a host copy; unknown digests are ignored."""
        self._host.pop(digest, None)

    def load(self, digest: str, slot: int) -> Callable[[], None]:
        """The work of copying an adapter from host memory into a slot, for any thread.

        On a GPU it is done on a stream of its own, which waits for the work that is queued now (a step may still read
        what is in the slot) and holds up none that is queued later. When it returns, the copy is there.
        """
        adapter = self._host[digest]
        before = torch.cuda.current_stream().record_event() if self._pin else None
        return lambda: self._fill(slot, adapter, before)

    @torch.inference_mode()
    def _fill(self, slot: int, adapter: HostAdapter, before: "torch.cuda.Event | None") -> None:
        if before is None:
            self._copy(slot, adapter)
            return
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            stream.wait_event(before)
            self._copy(slot, adapter)
        stream.synchronize()

    def _copy(self, slot: int, adapter: HostAdapter) -> None:
        for (layer, _), weights in self._weights.items():
            weights.load(slot, [adapter.pairs.get((layer, name)) for name in weights.names])
