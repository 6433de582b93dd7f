# SPDX-License-Identifier: Apache-2.0
"""Adapter slots: where the matrices of a model's adapters lie on the device, in one tensor with a row for each slot.

An adapter lies in its slot as one run of memory, each matrix with the rank that it has, so that filling a slot is one
copy and nothing is padded to the largest rank. A table says where each matrix begins. Operations get a linear's view of
both, `LinearSlots`.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire_kernels import native
from quire_kernels.arena import Arena

if TYPE_CHECKING:
    from quire_kernels.lora import AdapterBatch

ALIGNMENT = 32
"""Elements that every matrix begins at a multiple of: a cache line of bfloat16."""
PANEL = 32
"""Columns of a panel of B, as csrc/lora.cpp reads them."""
PINNED_BYTES = 4 << 20
"""Of a piece of an adapter in pinned memory. Torch rounds what it pins up to a power of two, so that 80 MiB would take
128, and keeps it for the next who asks for as much: pieces serve adapters of any rank."""

Pair = tuple[Tensor, Tensor]
"""A [rank, in_features] and B [out_features, rank], the scale folded into B."""


@dataclass(frozen=True, slots=True)
class Site:
    """A module that adapters change: a linear, or several with the same input side by side, or the embedding."""

    in_features: int
    """The size of the vocabulary, of an embedding."""
    widths: tuple[int, ...]
    """Output features of each slice: 3 of q, k, v, 2 of gate, up, else 1."""
    looked_up: bool = False
    """Inputs are token ids: a row of A is read for each, instead of multiplied."""

    def size(self, max_rank: int) -> int:
        """Elements of the largest adapter of this module."""
        rank = _even(max_rank)
        return sum(_aligned(rank * self.in_features) + _aligned(rank * width) for width in self.widths)


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter as it lies in a slot."""

    parts: tuple[Tensor, ...]
    """[num_elements] of the slot each, one behind the other, on the host."""
    entries: Tensor
    """[num_sites, max_slices, 3] int64, on the host: elements from the slot's start to A and to B, and the rank, which
    is 0 where the adapter leaves the slice alone."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return sum(part.nbytes for part in self.parts) + self.entries.nbytes

    def pinned(self) -> "PackedAdapter":
        """The same in pinned memory, from which a GPU copies by itself."""
        pieces = (piece for part in self.parts for piece in part.split(PINNED_BYTES // part.itemsize))
        return PackedAdapter(tuple(piece.pin_memory() for piece in pieces), self.entries.pin_memory())


class _Linear(ctypes.Structure):
    """QuireLoraLinear of csrc/lora.cpp."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("slot_size", ctypes.c_int64),
        ("entries", ctypes.c_void_p),
        ("ld_entries", ctypes.c_int64),
        ("num_slices", ctypes.c_int64),
        ("ends", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("max_rank", ctypes.c_int64),
        ("next", ctypes.c_void_p),
    )


class LinearSlots:
    """What one module's operations see of the slots."""

    def __init__(self, site: Site, slots: Tensor, entries: Tensor, host_entries: Tensor, max_rank: int) -> None:
        self.site = site
        self.slots = slots
        """[num_slots, slot_size]."""
        self.entries = entries
        """[num_slots, max_slices, 3] int64, on the device: see PackedAdapter."""
        self.host_entries = host_entries
        """The same on the host; one tensor where that is the device."""
        self.max_rank = max_rank
        self.users = set(range(len(slots)))
        """Slots whose adapter changes the module, and those that are not filled yet: a step that is run to measure its
        memory computes the module for them."""
        self.packed = _packs(site, slots)
        """Whether matrices lie as the compiled form reads them."""
        if self.packed:
            ends = [sum(site.widths[: i + 1]) // PANEL for i in range(len(site.widths))]
            self._ends = torch.tensor(ends)
            self.native = _Linear(
                slots.data_ptr(),
                slots.stride(0),
                entries.data_ptr(),
                entries.shape[1],
                len(site.widths),
                self._ends.data_ptr(),
                site.in_features,
                _even(max_rank),
                None,
            )
            self.address = ctypes.addressof(self.native)

    def concern(self, batch: "AdapterBatch") -> bool:
        """Whether an adapter of the batch changes this module, or could."""
        return batch.users is None or not self.users.isdisjoint(batch.users)

    def precede(self, other: "LinearSlots") -> None:
        """Say which module is computed next: its A comes from memory while this one multiplies."""
        if self.packed and other.packed:
            self.native.next = other.address
            self._next = other  # as long as there is a pointer to it

    def matrices(self, slot: int, index: int) -> Pair | None:
        """A slice's matrices in a slot: A [rank, in_features], of an embedding [in_features, rank], and B [rank,
        out_features]; None where its adapter leaves the slice alone."""
        a, b, rank = self.host_entries[slot, index].tolist()
        if rank == 0:
            return None
        width, features = self.site.widths[index], self.site.in_features
        row = self.slots[slot]
        if not self.packed:
            first = (features, rank) if self.site.looked_up else (rank, features)
            return row[a : a + rank * features].view(first), row[b : b + rank * width].view(rank, width)
        left = row[a : a + rank * features].view(features // 2, rank, 2).transpose(0, 1).reshape(rank, features)
        right = row[b : b + _even(rank) * width].view(width // PANEL, -1, PANEL, 2)
        return left, right.permute(1, 3, 0, 2).reshape(-1, width)[:rank]


class LoraSlots:
    """All slots of a model."""

    def __init__(self, sites: Sequence[Site], num_slots: int, max_rank: int, like: Tensor) -> None:
        """`sites`: in the order in which a step computes them; `like`: a tensor of the dtype and on the device of the
        slots."""
        self._max_rank = max_rank
        shape = (num_slots, sum(site.size(max_rank) for site in sites))
        if like.device.type == "cpu":
            # 156 MB for 16 adapters of a 135M Llama, which a step reads once from end to end.
            self._slots = Arena().empty(shape, like.dtype)
        else:
            self._slots = like.new_empty(shape)
        most = max(len(site.widths) for site in sites)
        self._host_entries = torch.zeros(len(sites), num_slots, most, 3, dtype=torch.int64)
        self._entries = self._host_entries.to(like.device)
        self.modules = tuple(
            LinearSlots(site, self._slots, self._entries[i], self._host_entries[i], max_rank)
            for i, site in enumerate(sites)
        )
        """In the order of `sites`."""
        for one, other in zip(self.modules, (*self.modules[1:], self.modules[0]), strict=True):
            one.precede(other)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, without the table."""
        return self._slots.nbytes

    def pack(self, pairs: Sequence[Sequence[Pair | None]]) -> PackedAdapter:
        """Lay an adapter out as it will lie in a slot: for each module, its slices' matrices."""
        entries = torch.zeros(self._host_entries[:, 0].shape, dtype=torch.int64)
        end, parts = 0, []
        for i, (module, slices) in enumerate(zip(self.modules, pairs, strict=True)):
            for j, pair in enumerate(slices):
                if pair is None:
                    continue
                a, b = pair
                rank = a.shape[0]
                assert rank <= self._max_rank and a.shape[1] == module.site.in_features
                assert b.shape == (module.site.widths[j], rank)
                starts = end, end + _aligned(a.numel())
                end = starts[1] + _aligned(b.shape[0] * (_even(rank) if module.packed else rank))
                entries[i, j] = torch.tensor([*starts, rank])
                parts.append((module, a, b, *starts))
        data = self._slots.new_zeros(end, device="cpu")
        for module, a, b, at, then in parts:
            _lay_out(module, a.to(data.dtype).contiguous(), b.to(data.dtype).contiguous(), data[at:], data[then:])
        return PackedAdapter((data,), entries)

    def write(self, slot: int, adapter: PackedAdapter) -> None:
        """Fill a slot, which no operation may read meanwhile."""
        self._host_entries[:, slot] = adapter.entries
        for module, used in zip(self.modules, adapter.entries[:, :, 2].any(1).tolist(), strict=True):
            (module.users.add if used else module.users.discard)(slot)
        row, end = self._slots[slot], 0
        for part in adapter.parts:
            start, end = end, end + part.numel()
            row[start:end].copy_(part, non_blocking=True)
        if self._entries is not self._host_entries:
            self._entries[:, slot].copy_(adapter.entries, non_blocking=True)


def _lay_out(module: LinearSlots, a: Tensor, b: Tensor, to_a: Tensor, to_b: Tensor) -> None:
    rank, features = a.shape
    if module.packed:
        native.library().quire_pack_adapter(
            a.data_ptr(), b.data_ptr(), to_a.data_ptr(), to_b.data_ptr(), rank, features, b.shape[0]
        )
        return
    to_a[: a.numel()] = (a.t() if module.site.looked_up else a).flatten()
    to_b[: b.numel()] = b.t().flatten()


def _packs(site: Site, slots: Tensor) -> bool:
    fits = site.in_features % 2 == 0 and all(width % PANEL == 0 for width in site.widths)
    return fits and not site.looked_up and native.suits(slots)


def _even(rank: int) -> int:
    return rank + rank % 2


def _aligned(num_elements: int) -> int:
    return -(-num_elements // ALIGNMENT) * ALIGNMENT
