# SPDX-License-Identifier: Apache-2.0
"""Adapter slots, which store the LoRA matrices on the device.

All slots share one tensor, which is divided into pages. A page has the size of one LoRA rank of an adapter that changes
all modules. A slot has as many consecutive pages as its adapter needs; the caller decides which.

The matrices of an adapter are contiguous, and each matrix has its own LoRA rank. Therefore, an adapter is loaded with
one copy, and no matrix is padded to the largest rank. A table contains the offset of each matrix. An operation gets a
`ModuleSlots`, through which it reads the pages and the table for one module.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire_kernels import cpu_native
from quire_kernels.huge_pages import HugePageArena

if TYPE_CHECKING:
    from quire_kernels.lora import LoRABatch

ALIGNMENT = 32
"""Every matrix begins at a multiple of this number of elements. A cache line holds this many bfloat16 numbers."""
PANEL_COLUMNS = 32
"""Number of columns in a panel of B; csrc/lora.cpp has the same number."""
PINNED_BYTES = 4 << 20
"""In pinned memory, an adapter is divided into chunks of this many bytes.

torch rounds a pinned allocation up to a power of two, so 80 MiB would take 128 MiB. Moreover, torch reuses a freed
allocation only for another allocation of the same size. Because all chunks have the same size, adapters of any rank can
reuse them.
"""

LoRAPair = tuple[Tensor, Tensor]
"""The matrices A [rank, in_features] and B [out_features, rank]. The scale of the adapter is already part of B. For
experts, both have a first dimension of num_experts."""
RowTransform = Tensor
"""Scales and addends [2, out_features]: a base product p, without its bias, becomes p + p * scale + addend. DoRA has
scales, and trained biases are addends. Most adapters have neither. Of a norm: its weight and its bias."""


@dataclass(frozen=True, slots=True)
class LoRATarget:
    """A module that adapters change: a linear, several merged linears with the same input, or the embedding."""

    in_features: int
    """Number of input features. For an embedding, this is the size of the vocabulary."""
    widths: tuple[int, ...]
    """Number of output features of each slice. The module with the merged q, k and v has three slices, and the module
    with the merged gate and up has two. Every other module has one slice.
    """
    is_embedding: bool = False
    """True if the inputs are token ids. A is then a table that contains a row for each token."""
    num_experts: int = 0
    """Number of experts that have matrices of these sizes. In a slot, the matrices A of all experts follow each other,
    and then the matrices B. 0: the module is not a projection of experts."""
    max_rank: int | None = None
    """The largest LoRA rank of this module; None: that of the slots."""
    is_norm: bool = False
    """True if adapters replace the weight and the bias of a norm. These are a transform, without LoRA matrices."""
    is_absorbed: bool = False
    """True if the layer itself reads parts of the matrices, as latent attention does, instead of adding their product
    to its output."""

    @property
    def page_elements(self) -> int:
        """Number of elements of this module in a page: half of what two LoRA ranks need, because an odd rank is padded
        to an even one. Transforms use what the adapter leaves."""
        if self.is_norm:
            return 0
        return max(1, self.num_experts) * sum(
            (_round_up_to_alignment(2 * self.in_features) + _round_up_to_alignment(2 * width)) // 2
            for width in self.widths
        )


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter on the host, in the layout that it has in its pages."""

    chunks: tuple[Tensor, ...]
    """The content of the pages, divided into consecutive tensors [num_elements]."""
    entries: Tensor
    """[num_targets, max_slices, 4] int64: the offset of A, the offset of B, the LoRA rank, and the offset of the
    transform of the base product. The offsets are relative to the first page. The rank is 0 for a slice that the
    adapter does not change. The last number is 0 for a slice whose base product is not transformed.
    """

    @property
    def num_elements(self) -> int:
        """Number of elements that the adapter needs on the device."""
        return sum(part.numel() for part in self.chunks)

    @property
    def num_bytes(self) -> int:
        """Size of the matrices and of the table of offsets, in bytes."""
        return sum(part.nbytes for part in self.chunks) + self.entries.nbytes

    def pin_memory(self) -> "PackedAdapter":
        """Return a copy in pinned memory, which can be copied to a GPU asynchronously."""
        pinned_chunks = (piece for part in self.chunks for piece in part.split(PINNED_BYTES // part.itemsize))
        return PackedAdapter(tuple(piece.pin_memory() for piece in pinned_chunks), self.entries.pin_memory())


class _Linear(ctypes.Structure):
    """The C struct QuireLoraLinear, which csrc/lora.cpp defines."""

    _fields_ = (
        ("pages", ctypes.c_void_p),
        ("entries", ctypes.c_void_p),
        ("ld_entries", ctypes.c_int64),
        ("num_slices", ctypes.c_int64),
        ("ends", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("max_rank", ctypes.c_int64),
        ("next", ctypes.c_void_p),
    )


class ModuleSlots:
    """One module's view of the slots."""

    def __init__(self, target: LoRATarget, pages: Tensor, entries: Tensor, host_entries: Tensor, max_rank: int) -> None:
        self.target = target
        self.pages = pages
        """The matrices of all modules in all slots, [num_elements]."""
        self.entries = entries
        """[num_slots, max_slices, 4] int64, on the device. `PackedAdapter.entries` describes the numbers, but here the
        offsets are relative to the first element of `pages`."""
        self.host_entries = host_entries
        """Copy of `entries` on the host. If the device is the CPU, this is the same tensor."""
        self.max_rank = max_rank
        self.active_slots = set(range(len(host_entries)))
        """The module must be computed if a step uses one of these slots. The set also contains the empty slots, because
        warm-up steps use them to measure memory.
        """
        self.by_expert: ModuleSlots | None = None
        """For experts without compiled kernels: the same matrices, as those of a module whose slots are all pairs
        (adapter slot, expert). The number of a pair is adapter slot * num_experts + expert."""
        self.transformed_slots: set[int] = set()
        """Slots whose adapter transforms the base product of the module."""
        self.is_panel_packed = _supports_panels(target, pages)
        """Whether the matrices have the layout that the compiled kernels need."""
        if self.is_panel_packed:
            slice_ends = [sum(target.widths[: i + 1]) // PANEL_COLUMNS for i in range(len(target.widths))]
            self._slice_ends = torch.tensor(slice_ends)
            self.native = _Linear(
                pages.data_ptr(),
                entries.data_ptr(),
                entries.shape[1],
                len(target.widths),
                self._slice_ends.data_ptr(),
                target.in_features,
                _round_up_to_even(max_rank),
                None,
            )
            self.address = ctypes.addressof(self.native)

    def applies_to(self, batch: "LoRABatch") -> bool:
        """Return whether this module must be computed for the batch. This is the case if an adapter of the batch may
        change the module."""
        return batch.active_slots is None or not self.active_slots.isdisjoint(batch.active_slots)

    def transforms(self, batch: "LoRABatch") -> bool:
        """Return whether an adapter of the batch transforms the module's base product, or replaces the norm. This is
        never the case if the slots are known only on the device."""
        return batch.active_slots is not None and not self.transformed_slots.isdisjoint(batch.active_slots)

    def set_next_module(self, next_module: "ModuleSlots") -> None:
        """Set the module that is computed after this one. While the GEMM of this module runs, the matrices A of the
        next module are prefetched.
        """
        if self.is_panel_packed and next_module.is_panel_packed:
            self.native.next = next_module.address
            self._next_module = next_module  # keeps alive what the pointer refers to

    def get_matrices(self, slot: int, index: int, expert: int = 0) -> LoRAPair | None:
        """Return the matrices of one slice or of one expert in a slot, or None if the adapter does not change it.

        A has the shape [rank, in_features], or [in_features, rank] for an embedding. B has the shape [rank,
        out_features].
        """
        a_start, b_start, rank, _ = self.host_entries[slot, index].tolist()
        if rank == 0:
            return None
        width, features = self.target.widths[index], self.target.in_features
        a_size, b_size = self.matrix_sizes(rank, width)
        a_start, b_start = a_start + expert * a_size, b_start + expert * b_size
        pages = self.pages
        if not self.is_panel_packed:
            a_shape = (features, rank) if self.target.is_embedding else (rank, features)
            a_matrix = pages[a_start : a_start + rank * features].view(a_shape)
            return a_matrix, pages[b_start : b_start + rank * width].view(rank, width)
        a_matrix = (
            pages[a_start : a_start + rank * features]
            .view(features // 2, rank, 2)
            .transpose(0, 1)
            .reshape(rank, features)
        )
        b_panels = pages[b_start : b_start + _round_up_to_even(rank) * width].view(
            width // PANEL_COLUMNS, -1, PANEL_COLUMNS, 2
        )
        return a_matrix, b_panels.permute(1, 3, 0, 2).reshape(-1, width)[:rank]

    def matrix_sizes(self, rank: int, width: int) -> tuple[int, int]:
        """Return the numbers of elements that A and B of one slice or of one expert take."""
        b_rank = _round_up_to_even(rank) if self.is_panel_packed else rank
        return _round_up_to_alignment(rank * self.target.in_features), _round_up_to_alignment(b_rank * width)

    def get_transform(self, slot: int, index: int) -> RowTransform | None:
        """Return the transform of one slice in a slot, or None if its base product is not transformed."""
        start, width = int(self.host_entries[slot, index, 3]), self.target.widths[index]
        return self.pages[start : start + 2 * width].view(2, width) if start else None


class LoRASlots:
    """All adapter slots of a model."""

    def __init__(
        self, targets: Sequence[LoRATarget], num_slots: int, max_rank: int, like: Tensor, num_pages: int | None = None
    ) -> None:
        """`targets` must be in the order in which a step computes them. The slots get the dtype and the device of the
        tensor `like`. By default, there are enough pages for an adapter of `max_rank` in each slot.
        """
        self.page_size = _round_up_to_alignment(sum(site.page_elements for site in targets))
        """Number of elements of a page."""
        self.num_pages = num_slots * _round_up_to_even(max_rank) if num_pages is None else num_pages
        shape = (self.num_pages * self.page_size,)
        if like.device.type == "cpu":
            # Use huge pages, because a step reads all of this memory once. 16 adapters of a 135M Llama take 156 MB.
            self._pages = HugePageArena().empty(shape, like.dtype)
        else:
            self._pages = like.new_empty(shape)
        max_slices = max(len(site.widths) for site in targets)
        self._host_entries = torch.zeros(len(targets), num_slots, max_slices, 4, dtype=torch.int64)
        self._entries = self._host_entries.to(like.device)
        self.modules = tuple(
            ModuleSlots(site, self._pages, self._entries[i], self._host_entries[i], site.max_rank or max_rank)
            for i, site in enumerate(targets)
        )
        """The views of all modules, in the order of `targets`."""
        self.eager_slots: set[int] = set()
        """Slots whose adapter needs operations that a CUDA graph cannot compute: it transforms the base product of a
        module, replaces a norm, or changes an absorbed module."""
        self._experts = _ExpertEntries(self.modules, self._pages)
        linears = [module for module in self.modules if not (module.target.num_experts or module.target.is_norm)]
        for module, next_module in zip(linears, (*linears[1:], *linears[:1]), strict=True):
            module.set_next_module(next_module)

    @property
    def num_bytes(self) -> int:
        """Size of all pages in bytes, without the table of offsets."""
        return self._pages.nbytes

    def count_pages(self, adapter: PackedAdapter) -> int:
        """Return how many pages an adapter needs. Without transforms, these are at most as many as its LoRA rank, which
        is padded to an even number."""
        return -(-adapter.num_elements // self.page_size)

    def pack(
        self,
        pairs: Sequence[Sequence[LoRAPair | None]],
        transforms: Sequence[Sequence[RowTransform | None]] | None = None,
    ) -> PackedAdapter:
        """Convert an adapter to the layout of a slot.

        For each module, `pairs` contains the matrices of its slices, and `transforms` the transforms.
        """
        entries = torch.zeros(self._host_entries[:, 0].shape, dtype=torch.int64)
        end, placements, copies = 0, [], list[tuple[int, RowTransform]]()
        for i, (module, slices) in enumerate(zip(self.modules, pairs, strict=True)):
            for j, pair in enumerate(slices):
                if pair is not None:
                    a, b = pair
                    rank, num_experts, width = a.shape[-2], module.target.num_experts, module.target.widths[j]
                    experts = (num_experts,) if num_experts else ()
                    assert rank <= module.max_rank and a.shape == (*experts, rank, module.target.in_features)
                    assert b.shape == (*experts, width, rank)
                    a_size, b_size = module.matrix_sizes(rank, width)
                    starts = end, end + max(1, num_experts) * a_size
                    end = starts[1] + max(1, num_experts) * b_size
                    entries[i, j, :3] = torch.tensor([*starts, rank])
                    placements.append((module, a, b, *starts))
                transform = None if transforms is None else transforms[i][j]
                if transform is not None:
                    end = max(end, ALIGNMENT)  # the offset 0 stands for no transform
                    entries[i, j, 3] = end
                    copies.append((end, transform))
                    end += _round_up_to_alignment(transform.numel())
        data = self._pages.new_zeros(end, device="cpu")
        for start, transform in copies:
            data[start : start + transform.numel()] = transform.flatten()
        for module, a, b, a_start, b_start in placements:
            a_size, b_size = module.matrix_sizes(a.shape[-2], b.shape[-2])
            a, b = (matrix.to(data.dtype).contiguous().view(-1, *matrix.shape[-2:]) for matrix in (a, b))
            for i in range(len(a)):
                _write_matrices(module, a[i], b[i], data[a_start + i * a_size :], data[b_start + i * b_size :])
        return PackedAdapter((data,), entries)

    def write(self, slot: int, adapter: PackedAdapter, first_page: int | None = None) -> None:
        """Write an adapter to a slot, whose pages begin at `first_page`. By default, these are the pages that the slot
        has if all slots have equally many. No operation may read the slot or the pages during this call.
        """
        if first_page is None:
            first_page = slot * (self.num_pages // self._host_entries.shape[1])
        end = first_page * self.page_size
        assert end + adapter.num_elements <= len(self._pages)
        offsets = adapter.entries != 0
        offsets[..., :2] = adapter.entries[..., 2:3] != 0
        offsets[..., 2] = False
        self._host_entries[:, slot] = adapter.entries + end * offsets
        for module, entries in zip(self.modules, adapter.entries.any(1).tolist(), strict=True):
            _, _, is_used, is_transformed = entries
            (module.active_slots.add if is_used or is_transformed else module.active_slots.discard)(slot)
            (module.transformed_slots.add if is_transformed else module.transformed_slots.discard)(slot)
        is_absorbed = torch.tensor([module.target.is_absorbed for module in self.modules])
        is_eager = adapter.entries[..., 3].any() or adapter.entries[is_absorbed, :, 2].any()
        (self.eager_slots.add if is_eager else self.eager_slots.discard)(slot)
        for part in adapter.chunks:
            start, end = end, end + part.numel()
            self._pages[start:end].copy_(part, non_blocking=True)
        if self._entries is not self._host_entries:
            self._entries[:, slot].copy_(self._host_entries[:, slot], non_blocking=True)
        self._experts.write(slot)


class _ExpertEntries:
    """Offsets of the matrices of all pairs (adapter slot, expert); see `ModuleSlots.by_expert`."""

    def __init__(self, modules: Sequence[ModuleSlots], pages: Tensor) -> None:
        self._modules = [module for module in modules if module.target.num_experts and not module.is_panel_packed]
        if not self._modules:
            return
        num_experts, num_slots = self._modules[0].target.num_experts, len(modules[0].host_entries)
        self._host_entries = torch.zeros(len(self._modules), num_slots, num_experts, 4, dtype=torch.int64)
        self._entries = self._host_entries.to(pages.device)
        for module, host_entries, entries in zip(self._modules, self._host_entries, self._entries, strict=True):
            tables = entries.view(-1, 1, 4), host_entries.view(-1, 1, 4)
            module.by_expert = ModuleSlots(replace(module.target, num_experts=0), pages, *tables, module.max_rank)

    def write(self, slot: int) -> None:
        """Update the offsets after an adapter was written to a slot."""
        if not self._modules:
            return
        for module, entries in zip(self._modules, self._host_entries[:, slot], strict=True):
            a_start, b_start, rank, _ = module.host_entries[slot, 0].tolist()
            sizes = torch.tensor(module.matrix_sizes(rank, module.target.widths[0]))
            entries[:, :2] = torch.tensor((a_start, b_start)) + torch.arange(len(entries))[:, None] * sizes
            entries[:, 2] = rank
        if self._entries is not self._host_entries:
            self._entries[:, slot].copy_(self._host_entries[:, slot], non_blocking=True)


def _write_matrices(module: ModuleSlots, a: Tensor, b: Tensor, a_dst: Tensor, b_dst: Tensor) -> None:
    rank, features = a.shape
    if module.is_panel_packed:
        cpu_native.get_library().quire_pack_adapter(
            a.data_ptr(), b.data_ptr(), a_dst.data_ptr(), b_dst.data_ptr(), rank, features, b.shape[0]
        )
        return
    a_dst[: a.numel()] = (a.t() if module.target.is_embedding else a).flatten()
    b_dst[: b.numel()] = b.t().flatten()


def _supports_panels(target: LoRATarget, pages: Tensor) -> bool:
    is_aligned = target.in_features % 2 == 0 and all(width % PANEL_COLUMNS == 0 for width in target.widths)
    return is_aligned and not target.is_embedding and cpu_native.supports(pages)


def _round_up_to_even(rank: int) -> int:
    return rank + rank % 2


def _round_up_to_alignment(num_elements: int) -> int:
    return -(-num_elements // ALIGNMENT) * ALIGNMENT
