# SPDX-License-Identifier: Apache-2.0
"""Experts with random weights, quantized in every scheme that has kernels."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quire_kernels import (
    ExpertActivation,
    ExpertWeights,
    QuantizedWeight,
    pack_weight_codebook,
    pack_weight_fp4,
    pack_weight_fp8,
    pack_weight_int4,
    pack_weight_int8,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)


def _mxfp4(weight: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    codes = torch.randint(0, 16, weight.shape, dtype=torch.uint8)
    exponents = torch.randint(120, 124, (len(weight), weight.shape[1] // 32), dtype=torch.uint8)
    return pack_weight_fp4(codes, exponents.view(torch.float8_e8m0fnu), dtype=dtype)


def _int4(weight: Tensor, dtype: torch.dtype, has_zeros: bool) -> QuantizedWeight:
    codes, scales, zeros = quantize_int4(weight)
    return pack_weight_int4(codes, scales, zeros if has_zeros else None, dtype=dtype)


def _fp8_blocks(weight: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    scales = torch.rand(len(weight), -(-weight.shape[1] // 128)) / 448
    return pack_weight_fp8(quantize_fp8(weight)[0], scales, dtype=dtype)


def _codebook(weight: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    codes, scales, _ = quantize_int4(weight)
    return pack_weight_codebook(codes, scales, torch.arange(16.0), dtype=dtype, mins=scales * 7.5)


WEIGHT_ONLY: dict[str, Callable[[Tensor, torch.dtype], QuantizedWeight]] = {
    "mxfp4": _mxfp4,
    "int4": lambda weight, dtype: _int4(weight, dtype, True),
    "int4 without zero points": lambda weight, dtype: _int4(weight, dtype, False),
    "codebook and minima": _codebook,
    "int8": lambda weight, dtype: pack_weight_int8(*quantize_int8(weight), dtype=dtype, weight_only=True),
    "fp8": lambda weight, dtype: pack_weight_fp8(*quantize_fp8(weight), dtype=dtype),
    "fp8, blocks": _fp8_blocks,
}
"""Functions of a weight [out_features, in_features] and the dtype of the activations; float32: the layout of a GPU."""
SCHEMES = WEIGHT_ONLY | {"w8a8": lambda weight, dtype: pack_weight_int8(*quantize_int8(weight), dtype=dtype)}


def make_dense(num_experts: int, hidden: int, inner: int, activation: ExpertActivation) -> ExpertWeights:
    """Return float32 weights whose outputs are about 1, with biases. Experts with relu2 have no gate."""
    is_gated = activation != "relu2"
    width = 2 * inner if is_gated else inner
    gate_up = torch.randn(num_experts, width, hidden) * hidden**-0.5
    down = torch.randn(num_experts, hidden, inner) * inner**-0.5
    biases = torch.randn(num_experts, width), torch.randn(num_experts, hidden)
    return ExpertWeights(gate_up, down, *biases, activation, is_gated)


def quantize(experts: ExpertWeights, scheme: str, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    """Return the experts with weights in a scheme, and biases as they are. Codes of mxfp4 are random."""
    seed = torch.random.get_rng_state()
    gate_up, down = (SCHEMES[scheme](weight.flatten(0, 1), dtype) for weight in (experts.gate_up, experts.down))
    torch.random.set_rng_state(seed)
    return replace(experts, gate_up=gate_up, down=down)


def dequantize(experts: ExpertWeights) -> ExpertWeights:
    """Return the experts with the float32 weights that quantized ones stand for."""
    num_experts = experts.num_experts
    weights = (weight.dequantize().unflatten(0, (num_experts, -1)) for weight in (experts.gate_up, experts.down))
    return replace(experts, **dict(zip(("gate_up", "down"), weights, strict=True)))
