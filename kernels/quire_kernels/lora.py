# SPDX-License-Identifier: Apache-2.0
"""LoRA deltas of the adapters in the slots.

To compute a delta, the inputs are shrunk to the LoRA rank, and the result is expanded and added to the output of the
base linear.

If a linear has d inputs and D outputs, an adapter of LoRA rank r takes 2 r (d + D) operations for each token. In each
step, r (d + D) elements of the adapter are read, even if only a few tokens use it. An example: In a 135M Llama, an
adapter of rank 16 has 9.8 MB of matrices for all linears. If 64 sequences use 16 adapters, a step reads 156 MB for the
adapters and takes 0.62 GFLOP. The base model reads 269 MB and takes 17.2 GFLOP. On two Zen 5 cores, whose memory reads
30 GB/s, the 156 MB take 5.2 ms. vdpbf16ps reaches 466 GFLOP/s, so the 0.62 GFLOP take 1.3 ms. A step without adapters
takes 58 ms. The memory traffic therefore determines the cost of the adapters, unless it overlaps with the base GEMM
(see csrc/lora.cpp).
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire_kernels import cpu_native
from quire_kernels.dispatch import Op
from quire_kernels.host_device_copy import to_device_async
from quire_kernels.linear import LinearWeight, is_panel_packed, linear
from quire_kernels.lora_routing import TokenRouting, route_tokens
from quire_kernels.lora_slots import ModuleSlots
from quire_kernels.quantized_linear import QuantizedWeight, quantized_linear_native

TILE_ROWS = 8
"""Number of rows in a tile of the compiled kernels; csrc/tile.h has the same number."""


@dataclass(frozen=True, slots=True)
class AdapterSegment:
    """Tokens [start, end) of the batch use the adapter in `adapter_slot`."""

    adapter_slot: int
    start: int
    end: int


class _Rows(ctypes.Structure):
    """The C struct QuireLoraRows, which csrc/lora.cpp defines."""

    _fields_ = (("tiles", ctypes.c_void_p), ("num_tiles", ctypes.c_int64), ("slots", ctypes.c_void_p))


@dataclass(frozen=True, slots=True)
class LoRABatch:
    """The adapter slots that the tokens of a step use.

    `build_lora_batch` or `build_routed_lora_batch` builds the batch once in each step.
    """

    adapter_slots: Tensor
    """[num_tokens] int64, on the device: the adapter slot of each token, or -1 if the token uses no adapter."""
    segments: tuple[AdapterSegment, ...] = ()
    """The segments in ascending order; they do not overlap. Empty if the slots are known only on the device."""
    active_slots: frozenset[int] | None = None
    """Slots of the segments. None if the slots are known only on the device. In this case, no module can be skipped."""
    routing: TokenRouting | None = None
    """The tiles that CUDA kernels process. None on other devices."""
    tiles: Tensor | None = None
    """[num_tiles, 3] int64: the slot, the first token and the end of each tile. Only compiled CPU kernels use these
    tiles, which have at most 8 tokens.
    """
    native: _Rows | None = None
    """The C struct that is passed to compiled kernels. It points into `adapter_slots` and `tiles`."""

    def iter_slot_tokens(self) -> Iterator[tuple[int, slice | Tensor]]:
        """Yield each slot together with the tokens that use it. This waits for the device if the slots are known only
        on the device.
        """
        if self.active_slots is not None:
            yield from ((s.adapter_slot, slice(s.start, s.end)) for s in self.segments)
            return
        for slot in self.adapter_slots.unique().tolist():
            if slot >= 0:
                yield slot, (self.adapter_slots == slot).nonzero()[:, 0]


def build_lora_batch(segments: Sequence[AdapterSegment], num_tokens: int, device: torch.device) -> LoRABatch:
    """Build the batch from slots that are known on the host.

    `segments` must be in ascending order and must not overlap.
    """
    adapter_slots, active_slots = torch.full((num_tokens,), -1), frozenset(segment.adapter_slot for segment in segments)
    for s in segments:
        adapter_slots[s.start : s.end] = s.adapter_slot
    if device.type != "cpu":
        routing = TokenRouting.empty(num_tokens, max(active_slots, default=0) + 1, device)
        batch = build_routed_lora_batch(to_device_async(adapter_slots, device), routing)
        return replace(batch, segments=tuple(segments), active_slots=active_slots)
    tiles = [
        (s.adapter_slot, start, min(start + TILE_ROWS, s.end))
        for s in segments
        for start in range(s.start, s.end, TILE_ROWS)
    ]  # fmt: skip
    table = torch.tensor(tiles, dtype=torch.int64).view(-1, 3)
    rows = _Rows(table.data_ptr(), len(tiles), adapter_slots.data_ptr())
    return LoRABatch(adapter_slots, tuple(segments), active_slots, tiles=table, native=rows)


def build_routed_lora_batch(adapter_slots: Tensor, routing: TokenRouting) -> LoRABatch:
    """Build the batch without synchronizing, from slots that are known only on the device.

    Args:
        adapter_slots: [num_tokens] int64, in any order; -1 for tokens without an adapter.
        routing: receives the tiles; see `route_tokens`.
    """
    route_tokens(adapter_slots, routing)
    return LoRABatch(adapter_slots, routing=routing)


@Op
def add_lora(out: Tensor, x: Tensor, adapters: ModuleSlots, batch: LoRABatch) -> None:
    """For each slice of a merged linear, add B (A x).

    A and B are the matrices of the token's adapter. The scale of the adapter is already part of B.

    Args:
        out: [num_tokens, out_features of all slices], the base linear's output; written in place.
        x: [num_tokens, in_features], dtype of out.
        adapters: the linear's matrices, by slot.
        batch: the tokens' slots; tokens without an adapter stay unchanged.
    """
    for slot, rows in batch.iter_slot_tokens():
        column = 0
        for i, width in enumerate(adapters.target.widths):
            if pair := adapters.get_matrices(slot, i):
                a, b = pair
                _add_lora_product(out[:, column : column + width], rows, torch.mm(x[rows], a.t()), b)
            column += width


def _add_lora_product(out: Tensor, rows: slice | Tensor, left: Tensor, right: Tensor) -> None:
    part = out[rows].addmm_(left, right)
    if isinstance(rows, Tensor):  # indexing made a copy
        out[rows] = part


@add_lora.register("cpu")
def _add_lora_cpu(out: Tensor, x: Tensor, adapters: ModuleSlots, batch: LoRABatch) -> None:
    if adapters.is_panel_packed and out.is_contiguous() and batch.native is not None:
        _adapted_linear_native(out, x, None, None, True, adapters, batch)
    else:
        add_lora.reference(out, x, adapters, batch)


add_lora.register_lazy("cuda", "own", "quire_kernels.gpu.lora")


def add_adapters(
    x: Tensor,
    base_x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    adapters: ModuleSlots,
    batch: LoRABatch,
) -> Tensor:
    """Compute `adapted_linear` for a base weight that reads `base_x`, which has the features of x in another order.

    Tokens whose adapter does not transform the base product have the result that they have without such an adapter in
    the batch.
    """
    if adapters.is_panel_packed and isinstance(weight, QuantizedWeight) and weight.is_panel_packed and batch.native:
        addresses = adapters.address, ctypes.addressof(batch.native)
        out = quantized_linear_native(base_x, weight, bias, residual, addresses)
    elif adapters.transforms(batch):
        out = _transformed_linear(base_x, weight, bias, residual, adapters, batch)
    else:
        out = linear(base_x, weight, bias, residual)
    add_lora(out, x, adapters, batch)
    return out


def _transformed_linear(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    adapters: ModuleSlots,
    batch: LoRABatch,
) -> Tensor:
    """Compute `linear`, with the transforms of the tokens' adapters. The product of these tokens is computed twice."""
    # The host knows the rows, so the device is not waited for.
    segments = [segment for segment in batch.segments if segment.adapter_slot in adapters.transformed_slots]
    rows = to_device_async([row for segment in segments for row in range(segment.start, segment.end)], x.device)
    before = None if residual is None else residual[rows]
    out = linear(x, weight, bias, residual)
    offsets = adapters.entries[batch.adapter_slots[rows], :, 3]
    product, column = linear(x[rows], weight, None).float(), 0
    for i, width in enumerate(adapters.target.widths):
        starts = offsets[:, i, None]
        elements = starts + torch.arange(width, device=x.device)
        scale, addend = (adapters.pages[elements + first].float().where(starts != 0, 0) for first in (0, width))
        product[:, column : column + width].mul_(1 + scale).add_(addend)
        column += width
    for each in (bias, before):
        product += 0 if each is None else each
    out[rows] = product.to(out.dtype)
    return out


@Op
def adapted_linear(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    adapters: ModuleSlots,
    batch: LoRABatch,
) -> Tensor:
    """Compute `linear`, and add the LoRA deltas of the batch's adapters. See `linear` and `add_lora`.

    Returns:
        [num_tokens, out_features], dtype of x; or the updated `residual`.
    """
    return add_adapters(x, x, weight, bias, residual, adapters, batch)


adapted_linear.register("cuda")(adapted_linear.reference)


@adapted_linear.register("cpu")
def _adapted_linear_cpu(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    adapters: ModuleSlots,
    batch: LoRABatch,
) -> Tensor:
    if not (adapters.is_panel_packed and is_panel_packed(weight) and batch.native is not None):
        return adapted_linear.reference(x, weight, bias, residual, adapters, batch)
    out = x.new_empty(x.shape[0], weight.shape[0] * weight.shape[2]) if residual is None else residual
    _adapted_linear_native(out, x, weight, bias, residual is not None, adapters, batch)
    return out


def _adapted_linear_native(
    out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    accumulate: bool,
    adapters: ModuleSlots,
    batch: LoRABatch,
) -> None:
    num_tokens, in_features = x.shape
    # The compiled kernel does not check its arguments.
    assert x.dtype == out.dtype == adapters.pages.dtype and x.stride(1) == 1 and out.is_contiguous()
    assert in_features == adapters.target.in_features and out.shape == (num_tokens, sum(adapters.target.widths))
    assert batch.native is not None and len(batch.adapter_slots) == num_tokens
    cpu_native.get_library().quire_adapted_linear(
        x.data_ptr(),
        x.stride(0),
        None if weight is None else weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_tokens,
        out.shape[1],
        in_features,
        accumulate,
        adapters.address,
        ctypes.addressof(batch.native),
    )


@Op
def add_lora_embedding(out: Tensor, token_ids: Tensor, adapters: ModuleSlots, batch: LoRABatch) -> None:
    """Add B A[token] to the token's row of the embedding. A and B are the matrices of the token's adapter.

    Args:
        out: [num_tokens, embedding_size], written in place.
        token_ids: [num_tokens] int64.
        adapters: the embedding's matrices, by slot.
        batch: the tokens' slots; tokens without an adapter stay unchanged.
    """
    for slot, rows in batch.iter_slot_tokens():
        if pair := adapters.get_matrices(slot, 0):
            a, b = pair
            _add_lora_product(out, rows, a[token_ids[rows]], b)


@add_lora_embedding.register("cpu")
def _add_lora_embedding_cpu(out: Tensor, token_ids: Tensor, adapters: ModuleSlots, batch: LoRABatch) -> None:
    pages, entries = adapters.pages, adapters.entries
    is_supported = cpu_native.supports(out, pages) and out.is_contiguous() and token_ids.is_contiguous()
    if not is_supported or batch.native is None:
        add_lora_embedding.reference(out, token_ids, adapters, batch)
        return
    # The compiled kernel does not check its arguments.
    assert token_ids.dtype == torch.int64 and len(token_ids) == len(out) == len(batch.adapter_slots)
    assert adapters.target.widths == (out.shape[1],)
    cpu_native.get_library().quire_lora_embedding(
        out.data_ptr(),
        token_ids.data_ptr(),
        pages.data_ptr(),
        entries.data_ptr(),
        entries.shape[1],
        batch.adapter_slots.data_ptr(),
        *out.shape,
    )


add_lora_embedding.register_lazy("cuda", "own", "quire_kernels.gpu.lora")
