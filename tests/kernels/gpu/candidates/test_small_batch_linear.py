# SPDX-License-Identifier: Apache-2.0
"""Products of few tokens in interpreted Triton, with norm, bias, gate and residual addition in the same kernel."""

import pytest
import torch
from support.requirements_of_machine import requires_interpreter

from quire_kernels import linear, pack_weight_int8, quantize_int8, rms_norm_linear

pytestmark = requires_interpreter

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2}
# Tokens, inputs, outputs. The sizes do not fill a tile.
SIZES = [(1, 300, 70), (8, 512, 32), (5, 40, 17), (16, 257, 48)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_inputs", "num_outputs"), SIZES)
def test_norm_before_the_product(num_tokens, num_inputs, num_outputs, gated, dtype):
    torch.manual_seed(1)
    # A strided view, as of a merged projection.
    x = 3 * torch.randn(num_tokens, num_inputs + 8, dtype=dtype)[:, :num_inputs]
    norm_weight, weight = (
        torch.randn(num_inputs, dtype=dtype),
        torch.randn(num_outputs * (1 + gated), num_inputs, dtype=dtype),
    )
    for bias in (None, torch.randn(len(weight), dtype=dtype)):
        arguments = x, norm_weight, 1e-3, weight / num_inputs**0.5, bias, gated
        found, expected = rms_norm_linear.get("cuda", "small")(*arguments), rms_norm_linear.reference(*arguments)
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_inputs", "num_outputs"), SIZES)
def test_product_is_added_to_the_residual_stream(num_tokens, num_inputs, num_outputs, dtype):
    torch.manual_seed(1)
    x, weight = torch.randn(num_tokens, num_inputs, dtype=dtype), torch.randn(num_outputs, num_inputs, dtype=dtype)
    weight /= num_inputs**0.5
    for residual in (None, torch.randn(num_tokens, num_outputs, dtype=dtype)):
        stream = None if residual is None else residual.clone()
        found, expected = (
            linear.get("cuda", "small")(x, weight, None, stream),
            linear.reference(x, weight, None, residual),
        )
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert stream is None or found is stream


def test_quantized_weights_are_left_to_their_kernels():
    """Of a checkpoint or quantized at load, also for few tokens."""
    x, weight = torch.randn(2, 64), pack_weight_int8(*quantize_int8(torch.randn(32, 64)), dtype=torch.float32)
    assert torch.equal(linear.get("cuda", "small")(x, weight, None), linear.reference(x, weight, None))
