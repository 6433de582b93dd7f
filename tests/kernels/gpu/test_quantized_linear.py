# SPDX-License-Identifier: Apache-2.0
"""Weights of 4 and 8 bits in interpreted Triton: equal to the reference, also on sizes that do not fill a tile."""

from collections.abc import Callable

import pytest
import torch
from support.requirements_of_machine import interpreted_kernel, requires_interpreter
from torch import Tensor

from quire_kernels import (
    QuantizedWeight,
    pack_weight_codebook,
    pack_weight_fp4,
    pack_weight_fp8,
    pack_weight_int4,
    pack_weight_int8,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantized_linear,
)

pytestmark = requires_interpreter


def _int4(weight: Tensor, group_size: int, has_zeros: bool = True) -> QuantizedWeight:
    codes, scales, zeros = quantize_int4(weight, group_size)
    return pack_weight_int4(codes, scales, zeros if has_zeros else None, dtype=torch.float32)


def _fp8_blocks(weight: Tensor) -> QuantizedWeight:
    scales = torch.rand(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)) / 448
    return pack_weight_fp8(quantize_fp8(weight)[0], scales, dtype=torch.float32)


def _codes4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return random codes of 4 bits, and the scales of groups of 16."""
    rows, columns = weight.shape
    return torch.randint(0, 16, (rows, columns), dtype=torch.uint8), torch.rand(rows, columns // 16) / 8


SCHEMES: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int4, groups of 32": lambda weight: _int4(weight, 32),
    "int4, one group": lambda weight: _int4(weight, weight.shape[1]),
    "int4 without zero points": lambda weight: _int4(weight, 32, False),
    "int8": lambda weight: pack_weight_int8(*quantize_int8(weight), dtype=torch.float32, weight_only=True),
    "fp8": lambda weight: pack_weight_fp8(*quantize_fp8(weight), dtype=torch.float32),
    "fp8, blocks": _fp8_blocks,
    "codebook and minima": lambda weight: pack_weight_codebook(
        *_codes4(weight), torch.arange(16.0), mins=_codes4(weight)[1], dtype=torch.float32
    ),
    "int8 and minima": lambda weight: pack_weight_int8(
        quantize_int8(weight)[0],
        _codes4(weight)[1] / 16,
        dtype=torch.float32,
        weight_only=True,
        mins=_codes4(weight)[1],
    ),
    "nvfp4": lambda weight: pack_weight_fp4(*_codes4(weight), dtype=torch.float32),
    "codebook": lambda weight: pack_weight_codebook(*_codes4(weight), torch.randn(16), dtype=torch.float32),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("num_tokens", [1, 15, 17, 260])
def test_quantized_linear(num_tokens: int, scheme: str, dtype: torch.dtype) -> None:
    torch.manual_seed(num_tokens)
    layer = SCHEMES[scheme](torch.randn(90, 224) / 8)
    x, bias, residual = torch.randn(num_tokens, 224, dtype=dtype), torch.randn(90, dtype=dtype), None
    wanted = quantized_linear.reference(x.float(), layer, bias.float())
    kernel, tolerance = interpreted_kernel(quantized_linear), 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(kernel(x, layer, bias).float(), wanted, rtol=tolerance, atol=tolerance)
    residual = torch.randn(num_tokens, 90, dtype=dtype)
    expected = wanted + residual.float()
    assert kernel(x, layer, bias, residual) is residual
    torch.testing.assert_close(residual.float(), expected, rtol=tolerance, atol=tolerance)
