# SPDX-License-Identifier: Apache-2.0
"""Quantization of weights, which converts real numbers to codes of 4 or 8 bits and back. Plain torch, any device."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
GROUP_SIZE = 32
"""Number of inputs that share a scale.

It applies to weights that are quantized to 4 bits when they are loaded. In all common models, the number of input
features is a multiple of this number, even after the weights are split into tensor-parallel shards.
"""
ACTIVATION_GROUP = 64
"""Size of a group in the scheme w8a8: this many inputs of a token share a scale. It must be equal to kGroup in
csrc/int8.cpp."""
_TINY = torch.finfo(torch.float32).tiny
_HALF = torch.finfo(torch.float16)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row of a weight [out_features, in_features] to 8 bits, symmetrically around zero.

    Returns:
        [out_features, in_features] int8 in [-127, 127], and the scales [out_features] float32.
    """
    values = weight.float()
    scales = values.abs().amax(1) / 127
    return (values / scales.clamp_min(_TINY)[:, None]).round().to(torch.int8), scales


def quantize_activations(x: Tensor) -> Tensor:
    """Round activations [num_tokens, in_features] in the same way as the scheme w8a8.

    Each group of 64 inputs of a token is rounded to 8 bits, symmetrically around zero.

    Returns:
        [num_tokens, in_features] float32: the rounded values, not their codes.
    """
    width = x.shape[1]
    groups = F.pad(x.float(), (0, -width % ACTIVATION_GROUP)).unflatten(1, (-1, ACTIVATION_GROUP))
    scales = groups.abs().amax(2, keepdim=True) / 127
    return ((groups / scales.clamp_min(_TINY)).round() * scales).flatten(1)[:, :width]


def quantize_int4(weight: Tensor, group_size: int = GROUP_SIZE) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize each group of a weight [out_features, in_features] to 4 bits, with a zero point.

    Before that, the scales are rounded to float16, so that a scale needs only two bytes. If a scale is outside the
    range of float16, the scales are not rounded.

    Returns:
        [out_features, in_features] uint8 in [0, 15]; scales [out_features, in_features / group_size] float32; zero
        points of the same shape, uint8 in [0, 15]. The value of a code q is scale * (q - zero).
    """
    groups = weight.float().unflatten(1, (-1, group_size))
    low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    scales = (high - low) / 15
    # A weight on the meta device has no values that could be compared.
    if weight.is_meta or not ((scales > 0) & ((scales < _HALF.tiny) | (scales > _HALF.max))).any():
        scales = scales.half().float()
    divisors = scales.clamp_min(_TINY)
    zeros = (-low / divisors).round().clamp(0, 15)
    codes = ((groups / divisors[..., None]).round() + zeros[..., None]).clamp(0, 15)
    return codes.flatten(1).to(torch.uint8), scales, zeros.to(torch.uint8)


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row of a weight [out_features, in_features] to float8_e4m3fn.

    Returns:
        [out_features, in_features] float8_e4m3fn, and the scales [out_features] float32.
    """
    values = weight.float()
    scales = values.abs().amax(1) / FP8_MAX
    return (values / scales.clamp_min(_TINY)[:, None]).to(FP8), scales


def expand_groups(scales: Tensor, group_size: int, in_features: int) -> Tensor:
    """Repeat the value of each group for every input of the group.

    This converts [out_features, groups] to [out_features, in_features]. The last group can be smaller.
    """
    return scales.repeat_interleave(group_size, 1)[:, :in_features]


@functools.cache
def int4_codebook() -> Tensor:
    """Return the values that the 16 integer codes have with a zero point of 8: [16] bfloat16."""
    return torch.arange(-8, 8, dtype=torch.bfloat16)


@functools.cache
def e2m1_codebook() -> Tensor:
    """Return the values of the 16 codes of MXFP4 and NVFP4: [16] bfloat16. The highest bit of a code is the sign."""
    magnitudes = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.bfloat16)
    return torch.cat((magnitudes, -magnitudes))


@functools.cache
def int8_codebook() -> Tensor:
    """Return the magnitudes of 8-bit integer codes: [128] bfloat16. A code has 7 bits for the magnitude and a bit for
    the sign.
    """
    return torch.arange(128, dtype=torch.bfloat16)


@functools.cache
def fp8_codebook() -> Tensor:
    """Return the magnitudes of float8_e4m3fn codes: [128] bfloat16. All of them are exact.

    A code has 7 bits for the magnitude and a bit for the sign.
    """
    return torch.arange(128, dtype=torch.uint8).view(FP8).to(torch.bfloat16)


def to_sign_and_magnitude(values: Tensor) -> Tensor:
    """Convert int8 values in [-127, 127] to the codes that `int8_codebook` describes.

    A code consists of a sign bit and 7 bits of magnitude. The result is uint8 and has the same shape.
    """
    return values.abs().to(torch.uint8) | (values < 0).to(torch.uint8) << 7
