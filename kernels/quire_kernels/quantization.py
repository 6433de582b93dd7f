# SPDX-License-Identifier: Apache-2.0
"""Quantization of weights: the arithmetic between real numbers and codes of 4 or 8 bits. Plain torch, any device."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
GROUP_SIZE = 32
"""Number of inputs that share a scale if a weight is quantized to 4 bits at load. The input features of all common
models and of their tensor-parallel shards are multiples of this number.
"""
ACTIVATION_GROUP = 64
"""Number of inputs of a token that share a scale in w8a8; equal to kGroup of csrc/int8.cpp."""
_TINY = torch.finfo(torch.float32).tiny
_HALF = torch.finfo(torch.float16)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row of a weight [out_features, in_features] symmetrically to 8 bits.

    Returns:
        [out_features, in_features] int8 in [-127, 127], and the scales [out_features] float32.
    """
    values = weight.float()
    scales = values.abs().amax(1) / 127
    return (values / scales.clamp_min(_TINY)[:, None]).round().to(torch.int8), scales


def quantize_activations(x: Tensor) -> Tensor:
    """Round activations [num_tokens, in_features] as w8a8 does: each group of 64 inputs of a token is rounded
    symmetrically to 8 bits.

    Returns:
        [num_tokens, in_features] float32: the rounded values, not their codes.
    """
    width = x.shape[1]
    groups = F.pad(x.float(), (0, -width % ACTIVATION_GROUP)).unflatten(1, (-1, ACTIVATION_GROUP))
    scales = groups.abs().amax(2, keepdim=True) / 127
    return ((groups / scales.clamp_min(_TINY)).round() * scales).flatten(1)[:, :width]


def quantize_int4(weight: Tensor, group_size: int = GROUP_SIZE) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize each group of a weight [out_features, in_features] to 4 bits, with a zero point.

    Scales are first rounded to float16, so that they need only two bytes; this is omitted if a scale is outside the
    range of float16.

    Returns:
        [out_features, in_features] uint8 in [0, 15]; scales [out_features, in_features / group_size] float32; zero
        points of the same shape, uint8 in [0, 15]. The value of a code q is scale * (q - zero).
    """
    groups = weight.float().unflatten(1, (-1, group_size))
    low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    scales = (high - low) / 15
    # A weight without memory has no values.
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
    """Repeat the value of each group for each input of the group: [out_features, groups] becomes [out_features,
    in_features]. The last group can be smaller."""
    return scales.repeat_interleave(group_size, 1)[:, :in_features]


@functools.cache
def int4_codebook() -> Tensor:
    """Return the values of the 16 codes of an integer weight with zero point 8: [16] bfloat16."""
    return torch.arange(-8, 8, dtype=torch.bfloat16)


@functools.cache
def e2m1_codebook() -> Tensor:
    """Return the values of the 16 codes of MXFP4, whose highest bit is the sign: [16] bfloat16."""
    magnitudes = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.bfloat16)
    return torch.cat((magnitudes, -magnitudes))


@functools.cache
def int8_codebook() -> Tensor:
    """Return the magnitudes of integer codes, which have 7 bits and a sign: [128] bfloat16."""
    return torch.arange(128, dtype=torch.bfloat16)


@functools.cache
def fp8_codebook() -> Tensor:
    """Return the magnitudes of float8_e4m3fn codes, which have 7 bits and a sign: [128] bfloat16; all are exact."""
    return torch.arange(128, dtype=torch.uint8).view(FP8).to(torch.bfloat16)


def to_sign_and_magnitude(values: Tensor) -> Tensor:
    """Convert int8 values in [-127, 127] to codes for `int8_codebook`, which have a sign and 7 bits; the result is
    uint8 of the same shape."""
    return values.abs().to(torch.uint8) | (values < 0).to(torch.uint8) << 7
