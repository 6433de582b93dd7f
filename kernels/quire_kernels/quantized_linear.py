# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose weights have 4 or 8 bits.

There are these schemes, which have the same names as in vLLM:

- w4a16: integers of 4 bits. Each group of inputs has a scale, and can have a zero point. If a weight was quantized when
  it was loaded, the compiled kernel of a CPU also quantizes the inputs of each group to 8 bits.
- mxfp4: 4-bit floating point (E2M1). Each group of inputs has a scale, which is a power of 2.
- nvfp4: 4-bit floating point (E2M1). Each group of inputs has a scale, which is any number.
- codebook: codes of 4 bits. A table contains the value of each code, and each group of inputs has a scale. NF4 is an
  example.
- fp8: float8_e4m3fn. Either each row or each block of 128 x 128 numbers has a scale.
- w8a16: integers of 8 bits. Each row or each group of inputs has a scale.
- w8a8: integers of 8 bits. Each row has a scale. The inputs of a token are also quantized to 8 bits, in groups of 64.

If a compiled CPU kernel reads a weight, the weight is stored in panels. Otherwise, it is stored row by row. The
reference implementation reads weights that are stored row by row. It works on every device and in every dtype, so that
a quantized model runs everywhere.
"""

import ctypes
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_kernels import cpu_native
from quire_kernels.dispatch import Op
from quire_kernels.huge_pages import HugePageArena
from quire_kernels.quantization import (
    e2m1_codebook,
    expand_groups,
    fp8_codebook,
    int4_codebook,
    int8_codebook,
    quantize_activations,
    to_sign_and_magnitude,
)

Scheme: TypeAlias = Literal["w8a8", "w8a16", "w4a16", "mxfp4", "nvfp4", "codebook", "fp8"]
FOUR_BIT_SCHEMES: tuple[Scheme, ...] = ("w4a16", "mxfp4", "nvfp4", "codebook")

PANEL_COLUMNS = 32
"""Number of output columns in a panel; csrc/tile.h calls it kColumns."""
_INPUTS_MULTIPLE = 16
MIN_CAPABILITY_FOR_FP8 = (8, 9)
"""Lowest compute capability (major, minor) at which a GPU has instructions for float8_e4m3fn."""
FP8_BLOCK = 128
"""A block that has its own scale is a square with this number of rows and columns."""


class _Weight(ctypes.Structure):
    """The C struct QuireWeight, which csrc/ops.h defines."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("bits", "group", "scale_bytes", "zero_bytes", "int8_inputs")),
    )


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [out_features, in_features] of a linear layer. The `pack_weight_*` functions build it."""

    scheme: Scheme
    shape: tuple[int, int]
    values: Tensor
    """If the weight is in panels, these are the bytes of the panels.

    Otherwise, these are the codes. 8-bit codes have the shape [out_features, in_features] and the dtype int8 or
    float8_e4m3fn. 4-bit codes have the shape [out_features, in_features / 2] and the dtype uint8, because each byte
    contains the codes of two inputs. The code of the first input is in the lower bits.
    """
    group_size: int
    """Number of inputs that share a scale."""
    scales: Tensor | None = None
    """[out_features, groups] float32, or float8_e8m0fnu for mxfp4. If the panels contain the scales, this is None."""
    zeros: Tensor | None = None
    """Zero points of 4-bit codes: [out_features, groups] uint8. None if the panels contain the zero points, or if all
    of them are 8.
    """
    mins: Tensor | None = None
    """Numbers that are subtracted after the multiplication by the scales: [out_features, groups] float32. None if the
    panels contain them, or if they are 0. A weight has zero points or these numbers, but not both."""
    codebook: Tensor | None = None
    """The value of each code. In panels, it is rounded to bfloat16; None for w8a8. If the weight is not in panels, this
    is None for all schemes except codebook, and on the CPU."""
    struct: _Weight | None = None
    """The C struct that is passed to compiled kernels. It points to the tensors of this weight. None for w8a8, and for
    weights that are not in panels.
    """

    @property
    def is_panel_packed(self) -> bool:
        """Whether the weight is in panels, which only compiled kernels can read."""
        return self.scales is None

    @property
    def num_bytes(self) -> int:
        """Size of the codes, scales and zero points in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors() if tensor is not None)

    @property
    def address(self) -> int:
        """Address that is passed to compiled kernels.

        For w8a8, it is the address of the panels. For the other schemes, it is the address of the C struct.
        """
        assert self.is_panel_packed
        return self.values.data_ptr() if self.struct is None else ctypes.addressof(self.struct)

    def part(self, index: int, num_parts: int) -> Self:
        """Return part `index` of a weight that consists of several weights.

        The weight must not be in panels. Its `num_parts` parts have equal shapes and are stored one after the other.
        """
        assert self.scales is not None
        parts = [None if tensor is None else tensor.tensor_split(num_parts)[index] for tensor in self._tensors()]
        values, scales, zeros, mins = parts
        assert values is not None
        return replace(self, shape=(len(values), self.shape[1]), values=values, scales=scales, zeros=zeros, mins=mins)

    def dequantize(self) -> Tensor:
        """Return the weight as float32 [out_features, in_features]."""
        assert self.scales is not None
        weight = self._scaled()
        return weight if self.mins is None else weight - expand_groups(self.mins, self.group_size, self.shape[1])

    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self.values, self.scales, self.zeros, self.mins

    def _scaled(self) -> Tensor:
        assert self.scales is not None
        scales = expand_groups(self.scales.float(), self.group_size, self.shape[1])
        if self.scheme not in FOUR_BIT_SCHEMES:
            return self.values.float() * scales
        codes = torch.stack((self.values & 15, self.values >> 4), 2).flatten(1)
        codebook = self.codebook
        if codebook is None:
            codebook = int4_codebook() if self.scheme == "w4a16" else e2m1_codebook()
        values = codebook.to(codes.device).float()[codes.long()]
        if self.zeros is not None:
            values -= expand_groups(self.zeros, self.group_size, self.shape[1]).float() - 8
        return values * scales


@Op
def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """Return x W^T + b. If `residual` is given, add the result to it. See `linear`.

    Args:
        x: [num_tokens, in_features]; bfloat16 if the weight is in panels.
        weight: on the device of x.
        bias: [out_features] or None.
        residual: [num_tokens, out_features], contiguous, dtype of x; updated in place and returned.

    Returns:
        [num_tokens, out_features], dtype of x.
    """
    if weight.scheme == "w8a8":
        assert weight.scales is not None
        product = quantize_activations(x) @ weight.values.float().t() * weight.scales[:, 0]
        out = product.to(x.dtype) if bias is None else (product + bias).to(x.dtype)
    else:
        out = F.linear(x, weight.dequantize().to(x.dtype), bias)
    return out if residual is None else residual.add_(out)


@quantized_linear.register("cpu")
def _quantized_linear_cpu(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    if not weight.is_panel_packed:
        return quantized_linear.reference(x, weight, bias, residual)
    return quantized_linear_native(x, weight, bias, residual)


def quantized_linear_native(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    adapters: tuple[int, int] | None = None,
) -> Tensor:
    """Compute `quantized_linear` with a compiled kernel. `weight` must be in panels.

    `adapters` are the addresses of the C structs QuireLoraLinear and QuireLoraRows. The adapters can transform the
    products of their rows, and the kernel prefetches what `add_lora` then reads. None: there are no adapters.
    """
    num_tokens, (out_features, in_features) = len(x), weight.shape
    # The compiled kernels do not check their arguments.
    assert x.dtype == torch.bfloat16 and x.stride(1) == 1 and x.shape[1] == in_features
    assert residual is None or (residual.is_contiguous() and residual.shape == (num_tokens, out_features))
    out = x.new_empty(num_tokens, out_features) if residual is None else residual
    library = cpu_native.get_library()
    (library.quire_linear_int8 if weight.struct is None else library.quire_linear_codes)(
        x.data_ptr(),
        x.stride(0),
        weight.address,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_tokens,
        out_features,
        in_features,
        residual is not None,
        *(adapters or (None, None)),
    )
    return out


quantized_linear.register_lazy("cuda", "own", "quire_kernels.gpu.quantized_linear")


def pack_weight_int8(
    values: Tensor,
    scales: Tensor,
    arena: HugePageArena | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    weight_only: bool = False,
    mins: Tensor | None = None,
) -> QuantizedWeight:
    """Return an int8 weight for `linear`.

    The compiled kernel was measured for w8a8 on one Zen 5 core with 8 layers of a 135M Llama. It is 1.7 times as fast
    as bf16 for 1 token, and 1.6 times as fast for 64 tokens. In both cases, torch.ops.aten._weight_int8pack_mm is
    slower than bf16.

    Args:
        values: [out_features, in_features] int8 in [-127, 127], contiguous.
        scales: [out_features] or [out_features, groups] float32; row i of the weight is scales[i] * values[i]. w8a8 has
            one group. All groups have the same number of inputs.
        arena: allocates panels.
        dtype: dtype of the activations.
        weight_only: True selects the scheme w8a16, False selects w8a8.
        mins: see QuantizedWeight; only with w8a16.
    """
    out_features, in_features = values.shape
    scales = scales.reshape(out_features, -1).float().contiguous()
    group_size = _group_size(values, scales) if scales.shape[1] > 1 else in_features
    if not _has_kernel(values, dtype):
        scheme: Scheme = "w8a16" if weight_only else "w8a8"
        return QuantizedWeight(scheme, (out_features, in_features), values, group_size, scales, mins=mins)
    if weight_only:
        codes = to_sign_and_magnitude(values)
        return _pack_codes("w8a16", codes, scales, mins, group_size, int8_codebook(), arena)
    assert values.is_contiguous()
    shape = (out_features // PANEL_COLUMNS, PANEL_COLUMNS * (in_features + 4))
    panels = (arena or HugePageArena()).empty(shape, torch.uint8)
    library = cpu_native.get_library()
    library.quire_pack_int8(values.data_ptr(), scales.data_ptr(), panels.data_ptr(), out_features, in_features)
    return QuantizedWeight("w8a8", (out_features, in_features), panels, in_features)


def pack_weight_int4(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    arena: HugePageArena | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    int8_activations: bool = False,
) -> QuantizedWeight:
    """Return a 4-bit weight for `linear`.

    The compiled kernel was measured on one Zen 5 core with 8 layers of a 135M Llama. It is 2.2 times as fast as bf16
    for 1 token, and 0.83 times as fast for 64 tokens. torch.ops.aten._weight_int4pack_mm_for_cpu takes 1.5 times as
    long as the compiled kernel for 1 token, and 2.4 times as long for 64 tokens.

    Args:
        values: [out_features, in_features] uint8 in [0, 15].
        scales: [out_features, groups] float32. Each group has in_features / groups inputs.
        zeros: zero points, [out_features, groups] uint8 in [0, 15]; None: all are 8. The value of a code q is scale *
            (q - zero).
        arena: allocates panels.
        dtype: dtype of the activations.
        int8_activations: whether the compiled kernel quantizes the activations of each group to 8 bits.
    """
    group_size, scales = _group_size(values, scales), scales.float().contiguous()
    if _has_kernel(values, dtype) and group_size % 4 == 0:
        int8_inputs = int8_activations and group_size % 16 == 0
        return _pack_codes("w4a16", values, scales, zeros, group_size, int4_codebook(), arena, int8_inputs)
    return QuantizedWeight("w4a16", tuple(values.shape), _pack_pairs(values), group_size, scales, zeros)


def pack_weight_fp4(
    values: Tensor, scales: Tensor, arena: HugePageArena | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> QuantizedWeight:
    """Return an MXFP4 or NVFP4 weight for `linear`. Its codes are 4-bit floating-point numbers.

    Args:
        values: [out_features, in_features] uint8, indices of `e2m1_codebook`.
        scales: [out_features, groups]. The scales of MXFP4 are float8_e8m0fnu, and those of NVFP4 are float32. All
            groups have the same number of inputs, which is a multiple of 4.
        arena: allocates panels.
        dtype: dtype of the activations.
    """
    scheme: Scheme = "mxfp4" if scales.dtype == torch.float8_e8m0fnu else "nvfp4"
    group_size, scales = _group_size(values, scales), scales.contiguous()
    if _has_kernel(values, dtype):
        return _pack_codes(scheme, values, scales.float(), None, group_size, e2m1_codebook(), arena)
    return QuantizedWeight(scheme, tuple(values.shape), _pack_pairs(values), group_size, scales)


def pack_weight_codebook(
    values: Tensor,
    scales: Tensor,
    codebook: Tensor,
    arena: HugePageArena | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    mins: Tensor | None = None,
) -> QuantizedWeight:
    """Return a 4-bit weight for `linear`. The compiled kernel rounds the values of the codes to bfloat16.

    Args:
        values: [out_features, in_features] uint8, indices of `codebook`.
        scales: [out_features, groups] float32. All groups have the same number of inputs, which is a multiple of 4.
        codebook: value of each code, [16] float32.
        arena: allocates panels.
        dtype: dtype of the activations.
        mins: see QuantizedWeight.
    """
    group_size, scales = _group_size(values, scales), scales.float().contiguous()
    if _has_kernel(values, dtype):
        return _pack_codes("codebook", values, scales, mins, group_size, codebook.bfloat16(), arena)
    packed = _pack_pairs(values)
    return QuantizedWeight("codebook", tuple(values.shape), packed, group_size, scales, mins=mins, codebook=codebook)


def _group_size(values: Tensor, scales: Tensor) -> int:
    (in_features, num_groups) = values.shape[1], scales.shape[1]
    assert in_features % num_groups == in_features % 2 == 0
    return in_features // num_groups


def _pack_pairs(values: Tensor) -> Tensor:
    return values[:, ::2] | values[:, 1::2] << 4


def pack_weight_fp8(
    values: Tensor,
    scales: Tensor,
    arena: HugePageArena | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    group_size: int = FP8_BLOCK,
) -> QuantizedWeight:
    """Return an 8-bit floating-point weight for `linear`.

    The compiled kernel was measured on one Zen 5 core with 8 layers of a 135M Llama. It is 1.5 times as fast as bf16
    for 1 token, and 0.94 times as fast for 64 tokens.

    Args:
        values: [out_features, in_features] float8_e4m3fn, contiguous.
        scales: float32. The shape determines what a scale applies to. If there is only one element, it applies to the
            whole weight. With [out_features] or [out_features, 1], there is a scale for each row. With [out_features,
            in_features / group_size], there is a scale for each group of a row. With [out_features / 128, in_features /
            128], there is a scale for each block of 128 x 128 elements. The quotients in these shapes are rounded up.
        arena: allocates panels.
        dtype: dtype of the activations.
        group_size: number of inputs that share a scale, if a row has several scales.
    """
    out_features, in_features = values.shape
    scales = scales.float()
    if scales.numel() == 1:
        scales, group_size = scales.reshape(1, 1).expand(out_features, 1), in_features
    elif scales.shape in ((out_features,), (out_features, 1)):
        scales, group_size = scales.reshape(out_features, 1), in_features
    else:
        if scales.shape[0] != out_features:
            scales = scales.repeat_interleave(FP8_BLOCK, 0)[:out_features]
        assert scales.shape == (out_features, -(-in_features // group_size))
    scales = scales.contiguous()
    if _has_kernel(values, dtype):
        return _pack_codes("fp8", values.view(torch.uint8), scales, None, group_size, fp8_codebook(), arena)
    return QuantizedWeight("fp8", (out_features, in_features), values, group_size, scales)


def supports_int4(in_features: int, group_size: int) -> bool:
    """Return whether `quantize_int4` and `pack_weight_int4` accept this number of inputs. It must be divisible into
    whole groups.
    """
    return in_features % group_size == in_features % 2 == 0


def has_quantized_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether this device has kernels that multiply quantized weights by activations of this dtype."""
    if device.type == "cuda":
        return len(quantized_linear.implementations("cuda")) > 1
    return cpu_native.supports(torch.empty(1, dtype=dtype, device=device))


def converts_fp8(device: torch.device) -> bool:
    """Return whether kernels can read float8_e4m3fn on this device. A GPU must have instructions for it."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= MIN_CAPABILITY_FOR_FP8


def has_kernel_for_shape(out_features: int, in_features: int) -> bool:
    """Return whether the compiled CPU kernels of all schemes accept a weight of this shape."""
    return out_features % PANEL_COLUMNS == in_features % _INPUTS_MULTIPLE == 0


def _has_kernel(values: Tensor, dtype: torch.dtype) -> bool:
    is_on_cpu = values.device.type == "cpu" and cpu_native.supports(torch.empty(1, dtype=dtype))
    return is_on_cpu and has_kernel_for_shape(*values.shape)


def _pack_codes(
    scheme: Scheme,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    codebook: Tensor,
    arena: HugePageArena | None,
    int8_inputs: bool = False,
) -> QuantizedWeight:
    """Pack codes into the panels that csrc/codes.cpp reads. Scales are stored as float16 if that does not change their
    values. `zeros` are zero points (uint8), or the numbers `mins` of QuantizedWeight (float32).
    """
    (out_features, in_features), bits = codes.shape, 4 if scheme in FOUR_BIT_SCHEMES else 8
    halves = scales.half()
    stored_scales = halves if torch.equal(halves.float(), scales) else scales
    zero_bytes = 0 if zeros is None else zeros.itemsize
    group_bytes = PANEL_COLUMNS * (stored_scales.itemsize + zero_bytes)
    panel_bytes = PANEL_COLUMNS * in_features * bits // 8 + scales.shape[1] * group_bytes
    panels = (arena or HugePageArena()).empty((out_features // PANEL_COLUMNS, panel_bytes), torch.uint8)
    addresses = panels.data_ptr(), codebook.data_ptr()
    struct = _Weight(*addresses, bits, group_size, stored_scales.itemsize, zero_bytes, int8_inputs)
    codes, zeros = codes.contiguous(), None if zeros is None else zeros.contiguous()
    cpu_native.get_library().quire_pack_codes(
        codes.data_ptr(),
        stored_scales.data_ptr(),
        None if zeros is None else zeros.data_ptr(),
        ctypes.addressof(struct),
        out_features,
        in_features,
    )
    return QuantizedWeight(scheme, (out_features, in_features), panels, group_size, codebook=codebook, struct=struct)
