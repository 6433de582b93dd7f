# SPDX-License-Identifier: Apache-2.0
"""Linear layers and embeddings. On a CPU, a linear's weight is packed once for the processor's GEMM."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_kernels import cpu_native
from quire_kernels.dispatch import Op
from quire_kernels.huge_pages import HugePageArena

# Elements of the smallest float32 weight that is packed. torch uses oneDNN for bf16 only; oneDNN takes 11 us instead of
# 2 us for 64 x 192 and 1 token, and compiles a GEMM for every number of tokens (0.2 ms and up, once).
MIN_PACKED = 1 << 16
# Columns of a panel in csrc/linear.cpp.
PANEL_COLUMNS = 32


@Op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """Return x W^T + b, or add it to a residual stream.

    Args:
        x: [num_tokens, in_features].
        weight: [out_features, in_features], dtype of x, or the result of `pack_weight` or `pack_weight_int8`.
        bias: [out_features] or None.
        residual: [num_tokens, out_features], contiguous, dtype of x; updated in place and returned.

    Returns:
        [num_tokens, out_features], dtype of x.
    """
    out = F.linear(x, weight, bias)
    return out if residual is None else residual.add_(out)


@linear.register("cuda")
def _linear_cuda(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """Let the GEMM accumulate into the residual stream: saves a launch and 3 * num_tokens * out_features elements of
    memory traffic."""
    if residual is None or bias is not None:
        return linear.reference(x, weight, bias, residual)
    return residual.addmm_(x, weight.t())


@linear.register("cpu")
def _linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    if weight.is_mkldnn:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out if residual is None else residual.add_(out)
    is_int8 = is_int8_packed(weight)
    if not is_int8 and not is_panel_packed(weight):
        return linear.reference(x, weight, bias, residual)
    num_tokens, in_features = x.shape
    out_features = weight.shape[0] * PANEL_COLUMNS
    # The compiled kernel does not check its arguments.
    assert x.dtype == torch.bfloat16 and x.stride(1) == 1
    assert weight.shape[1] == (_int8_panel_bytes(in_features) if is_int8 else in_features // 2)
    assert residual is None or (residual.is_contiguous() and residual.shape == (num_tokens, out_features))
    out = x.new_empty(num_tokens, out_features) if residual is None else residual
    library = cpu_native.get_library()
    (library.quire_linear_int8 if is_int8 else library.quire_linear)(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_tokens,
        out_features,
        in_features,
        residual is not None,
    )
    return out


@Op
def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """Return the rows of a table.

    Args:
        token_ids: [num_tokens] int64.
        table: [vocab_size, hidden_size], or the result of `pack_weight`.

    Returns:
        [num_tokens, hidden_size], dtype of the table.
    """
    return F.embedding(token_ids, table)


@embedding.register("cpu")
def _embedding_cpu(token_ids: Tensor, table: Tensor) -> Tensor:
    if not is_panel_packed(table):
        return F.embedding(token_ids, table)
    width = 2 * table.shape[1]
    out = table.new_empty(len(token_ids), width)
    cpu_native.get_library().quire_unpack_rows(
        table.data_ptr(), token_ids.data_ptr(), out.data_ptr(), len(token_ids), width
    )
    return out


def pack_weight(weight: Tensor, arena: HugePageArena | None = None) -> Tensor:
    """Return a weight [out_features, in_features] in the fastest layout for this processor, or unchanged if there is
    none. The result is valid for `linear` only, and for `embedding` if `supports_embedding`. Panels are allocated from
    `arena`.

    Compiled kernels use panels: [out_features / 32, in_features / 2, 32, 2]. 576 x 3072 and 64 tokens, bf16, two Zen 5
    cores: 0.51 ms, 95 % of the peak of vdpbf16ps, against 0.61 ms in oneDNN's layout, which is the next choice. A plain
    weight is reordered by oneDNN in every call: 0.11 ms instead of 0.05 ms for 1 token. torch.compile freezes weights
    with the same oneDNN operators; they have no public name.
    """
    out_features, in_features = weight.shape
    if (
        cpu_native.supports(weight)
        and cpu_native.has_fast_gemm()
        and weight.is_contiguous()
        and out_features % PANEL_COLUMNS == in_features % 2 == 0
    ):
        panels = (arena or HugePageArena()).empty(
            (out_features // PANEL_COLUMNS, in_features // 2, PANEL_COLUMNS, 2), weight.dtype
        )
        cpu_native.get_library().quire_pack(weight.data_ptr(), panels.data_ptr(), out_features, in_features)
        return panels
    if weight.dtype == torch.float32 and weight.numel() < MIN_PACKED:
        return weight
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return weight
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    if weight.dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row of a weight [out_features, in_features] symmetrically to 8 bits.

    Returns:
        [out_features, in_features] int8 in [-127, 127], and the scales [out_features] float32.
    """
    values = weight.float()
    scales = values.abs().amax(1) / 127
    return (values / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8), scales


def has_int8_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether this machine has an int8 kernel for activations of this dtype on this device."""
    return cpu_native.supports(torch.empty(1, dtype=dtype, device=device))


def supports_int8(weight: Tensor) -> bool:
    """Return whether `pack_weight_int8` accepts a weight [out_features, in_features] on this machine."""
    out_features, in_features = weight.shape
    return cpu_native.supports(weight) and out_features % PANEL_COLUMNS == in_features % 16 == 0


def pack_weight_int8(values: Tensor, scales: Tensor, arena: HugePageArena | None = None) -> Tensor:
    """Return the panels of an int8 weight for `linear`, which then quantizes each token to 8 bits as well.

    Args:
        values: [out_features, in_features] int8, contiguous.
        scales: [out_features] float32; row i stands for scales[i] * values[i].
        arena: allocates the result.

    Returns:
        [out_features / 32, 32 * in_features + 256] int8; see csrc/int8.cpp. 1.9 times as fast as bf16 for 1 token and
        for 64 (tests/bench/ops.py, Zen 5). torch.ops.aten._weight_int8pack_mm is slower than bf16 for both.
    """
    out_features, in_features = values.shape
    assert values.is_contiguous() and scales.is_contiguous() and scales.dtype == torch.float32
    shape = (out_features // PANEL_COLUMNS, _int8_panel_bytes(in_features))
    panels = (arena or HugePageArena()).empty(shape, torch.int8)
    library = cpu_native.get_library()
    library.quire_pack_int8(values.data_ptr(), scales.data_ptr(), panels.data_ptr(), out_features, in_features)
    return panels


def _int8_panel_bytes(in_features: int) -> int:
    return PANEL_COLUMNS * (in_features + 8)


def supports_embedding(packed: Tensor) -> bool:
    """Return whether `embedding` reads this layout, so that a tied table is stored once."""
    return not packed.is_mkldnn and not is_int8_packed(packed)


def is_int8_packed(weight: Tensor) -> bool:
    """Return whether `pack_weight_int8` returned this."""
    return weight.dtype == torch.int8


def is_panel_packed(weight: Tensor) -> bool:
    """Return whether `pack_weight` returned panels."""
    return weight.dim() == 4
