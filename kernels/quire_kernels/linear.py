# SPDX-License-Identifier: Apache-2.0
"""Linear layers and embeddings. On a CPU, the weight of a linear layer is packed once into the layout that the
processor's GEMM reads fastest.
"""

from collections.abc import Callable
from typing import TypeAlias, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_kernels import cpu_native
from quire_kernels.dispatch import Op
from quire_kernels.huge_pages import HugePageArena
from quire_kernels.quantization import quantize_fp8, quantize_int4, quantize_int8
from quire_kernels.quantized_linear import (
    PANEL_COLUMNS,
    QuantizedWeight,
    has_kernel_for_shape,
    pack_weight_fp8,
    pack_weight_int4,
    pack_weight_int8,
    quantized_linear,
)

# A float32 weight is packed only if it has at least this many elements. If it is not packed, torch does not use oneDNN,
# which is slower for small weights. With 64 x 192 elements and 1 token, oneDNN takes 11 us instead of 2 us. It also
# compiles a GEMM for every new number of tokens, which takes 0.2 ms or more.
MIN_PACKED = 1 << 16
_QUANTIZED_ROWS = 1 << 13

LinearWeight: TypeAlias = Tensor | QuantizedWeight


@Op
def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """Return x W^T + b. If `residual` is given, add the result to it.

    Args:
        x: [num_tokens, in_features].
        weight: [out_features, in_features], dtype of x; or the result of `pack_weight` or of a `pack_weight_*`.
        bias: [out_features] or None.
        residual: [num_tokens, out_features], contiguous, dtype of x; updated in place and returned.

    Returns:
        [num_tokens, out_features], dtype of x.
    """
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x, weight, bias, residual)
    out = F.linear(x, weight, bias)
    return out if residual is None else residual.add_(out)


@linear.register("cuda")
def _linear_cuda(x: Tensor, weight: LinearWeight, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """Let the GEMM add its result to the residual stream. This saves a launch and 3 * num_tokens * out_features
    elements of memory traffic.
    """
    if residual is None or bias is not None or isinstance(weight, QuantizedWeight):
        return linear.reference(x, weight, bias, residual)
    return residual.addmm_(x, weight.t())


@linear.register("cpu")
def _linear_cpu(x: Tensor, weight: LinearWeight, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x, weight, bias, residual)
    if weight.is_mkldnn:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out if residual is None else residual.add_(out)
    if not is_panel_packed(weight):
        return linear.reference(x, weight, bias, residual)
    num_tokens, in_features = x.shape
    out_features = weight.shape[0] * PANEL_COLUMNS
    # The compiled kernel does not check its arguments.
    assert x.dtype == torch.bfloat16 and x.stride(1) == 1
    assert weight.shape[1] == in_features // 2
    assert residual is None or (residual.is_contiguous() and residual.shape == (num_tokens, out_features))
    out = x.new_empty(num_tokens, out_features) if residual is None else residual
    cpu_native.get_library().quire_linear(
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
    """Convert a weight [out_features, in_features] to the layout that is fastest on this processor.

    If no special layout is faster, the weight is returned unchanged. The result can be used by `linear`, and also by
    `embedding` if `supports_embedding` returns True. The memory of panels comes from `arena`.

    The compiled kernels use panels, whose shape is [out_features / 32, in_features / 2, 32, 2]. On two Zen 5 cores, the
    product of 64 tokens with a bf16 weight of 576 x 3072 then takes 0.51 ms, which is 95 % of the peak of vdpbf16ps. If
    panels cannot be used, the weight gets oneDNN's layout, with which the product takes 0.61 ms. If a weight is not
    packed, oneDNN reorders it in every call. A call for 1 token then takes 0.11 ms instead of 0.05 ms. The oneDNN
    operators used here have no public names; torch.compile uses the same ones to freeze weights.
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


def pad_outputs(weight: Tensor) -> Tensor:
    """Return a weight [out_features, in_features] with as many rows of 0 at its end as the panels of compiled kernels
    need. If the machine has no such kernels, return the weight unchanged."""
    if not (cpu_native.supports(weight) and cpu_native.has_fast_gemm()):
        return weight
    return F.pad(weight, (0, 0, 0, -len(weight) % PANEL_COLUMNS))


def quantize_weight(weight: Tensor, quantization: str, arena: HugePageArena | None = None) -> LinearWeight:
    """Quantize a weight [out_features, in_features] and return it for `linear`.

    If the machine has kernels for quantized weights, but none that accepts the shape of this weight, the weight is not
    quantized.

    Args:
        weight: floating-point, contiguous.
        quantization: int8 (w8a8), int8_weight_only, int4 or fp8; see quantized_linear.py.
        arena: allocates panels.
    """
    dtype = weight.dtype
    if weight.device.type == "cpu" and cpu_native.supports(weight) and not has_kernel_for_shape(*weight.shape):
        return pack_weight(weight, arena)
    if quantization == "int4":
        codes, scales, zeros = _quantize_rows(quantize_int4, weight)
        return pack_weight_int4(codes, scales, zeros, arena, dtype=dtype, int8_activations=True)
    if quantization == "fp8":
        values, scales = _quantize_rows(quantize_fp8, weight)
        return pack_weight_fp8(values, scales, arena, dtype=dtype)
    values, scales = _quantize_rows(quantize_int8, weight)
    return pack_weight_int8(values, scales, arena, dtype=dtype, weight_only=quantization == "int8_weight_only")


def _quantize_rows(quantize: Callable[[Tensor], tuple[Tensor, ...]], weight: Tensor) -> tuple[Tensor, ...]:
    """Quantize a limited number of rows at a time. Float32 copies of all experts of a layer would take gigabytes."""
    parts = [quantize(rows) for rows in weight.split(_QUANTIZED_ROWS)]
    if len(parts) == 1:
        return parts[0]
    # torch.cat has no kernel for 8-bit floating point.
    columns = [
        [part.view(torch.uint8) if part.itemsize == 1 else part for part in column]
        for column in zip(*parts, strict=True)
    ]
    return tuple(torch.cat(column).view(part.dtype) for column, part in zip(columns, parts[0], strict=True))


def supports_embedding(packed: LinearWeight) -> TypeGuard[Tensor]:
    """Return whether `embedding` can read this layout. If it can, a tied embedding is stored only once."""
    return not isinstance(packed, QuantizedWeight) and not packed.is_mkldnn


def is_panel_packed(weight: LinearWeight) -> TypeGuard[Tensor]:
    """Return whether `pack_weight` returned panels."""
    return not isinstance(weight, QuantizedWeight) and weight.dim() == 4


def weight_bytes(weight: LinearWeight) -> int:
    """Return the size of a weight in bytes, for any layout."""
    if isinstance(weight, QuantizedWeight):
        return weight.num_bytes
    return weight.numel() * weight.element_size()
