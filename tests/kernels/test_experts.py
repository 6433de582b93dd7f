# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: every implementation equals the reference, and the reference equals the formula."""

from dataclasses import replace

import pytest
import torch
from support.quantized_experts import SCHEMES, WEIGHT_ONLY, dequantize, make_dense, quantize
from support.requirements_of_machine import requires_native_kernels
from torch import Tensor

from quire_kernels import (
    ExpertWeights,
    QuantizedWeight,
    SwiGLU,
    cpu_native,
    experts,
    fused_experts,
    pack_experts,
    quantize_experts,
    topk_softmax,
)
from quire_kernels.linear import is_panel_packed

SWIGLU = SwiGLU(alpha=1.702, limit=1.5)


def make_experts(num_experts, hidden, inner, activation, dtype=torch.float32, biases=True):
    """Return random weights whose outputs are about 1."""
    gate_up = torch.randn(num_experts, 2 * inner, hidden) * hidden**-0.5 * 2
    down = torch.randn(num_experts, hidden, inner) * inner**-0.5
    both = [torch.randn(num_experts, n) if biases else None for n in (2 * inner, hidden)]
    tensors = [None if tensor is None else tensor.to(dtype) for tensor in (gate_up, down, *both)]
    return ExpertWeights(*tensors, activation)


def make_inputs(num_tokens, hidden, num_experts, top_k, dtype=torch.float32):
    """Return inputs, and a choice of experts that leaves some without tokens when there are few."""
    x = torch.randn(num_tokens, hidden).to(dtype)
    logits = torch.randn(num_tokens, num_experts) + torch.arange(num_experts)
    return x, *topk_softmax(logits, top_k, True)


@pytest.fixture(autouse=True)
def seed(monkeypatch) -> None:
    torch.manual_seed(42)
    # Test our GEMM also on processors where oneDNN's is used.
    monkeypatch.setattr(cpu_native, "has_fast_gemm", lambda: True)


def test_the_router_chooses_the_likeliest_experts():
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, -1.0, 4.0]]).bfloat16()
    ids, weights = topk_softmax(logits, 2, False)
    assert ids.tolist() == [[1, 2], [0, 2]]
    torch.testing.assert_close(weights, logits.float().softmax(-1).gather(1, ids))
    _, normalized = topk_softmax(logits, 2, True)
    torch.testing.assert_close(normalized, logits.float().gather(1, ids).softmax(-1))


def test_the_reference_is_the_weighted_sum_of_gated_mlps():
    weights = make_experts(3, 4, 5, "silu")
    x, ids, shares = make_inputs(1, 4, 3, 2)
    expected = torch.zeros(4)
    for expert, share in zip(ids[0], shares[0], strict=True):
        gate, up = (weights.gate_up[expert] @ x[0] + weights.gate_up_bias[expert]).chunk(2)
        gated = gate * torch.sigmoid(gate) * up
        expected += share * (weights.down[expert] @ gated + weights.down_bias[expert])
    torch.testing.assert_close(fused_experts.reference(x, ids, shares, weights)[0], expected)


@pytest.mark.parametrize("activation", ["silu", "gelu", SWIGLU], ids=["silu", "gelu", "swiglu"])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (2, 3), (30, 2), (100, 6)])
def test_sorted_rows_equal_the_reference(num_tokens, top_k, activation):
    weights = make_experts(6, 20, 12, activation, biases=top_k > 1)
    inputs = make_inputs(num_tokens, 20, 6, top_k)
    expected = fused_experts.reference(*inputs, weights)
    torch.testing.assert_close(fused_experts(*inputs, weights), expected)
    residual = torch.randn_like(expected)
    added = fused_experts(*inputs, weights, residual.clone())
    torch.testing.assert_close(added, expected + residual)


def _double(weights: ExpertWeights) -> ExpertWeights:
    tensors: list[Tensor | None] = [weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias]
    return ExpertWeights(*(None if tensor is None else tensor.double() for tensor in tensors), weights.activation)


@requires_native_kernels
@pytest.mark.parametrize("activation", ["silu", SWIGLU], ids=["silu", "swiglu"])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 2), (9, 1), (64, 2), (70, 4), (600, 3)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_compiled_experts_equal_the_reference(num_tokens, top_k, activation, num_threads, monkeypatch):
    # Several chunks, the last one smaller.
    monkeypatch.setattr(experts, "CHUNK_ROWS", 900)
    weights = make_experts(5, 96, 64, activation, torch.bfloat16, biases=top_k != 2)
    packed = pack_experts(weights)
    assert is_panel_packed(packed.gate_up)
    x, ids, shares = make_inputs(num_tokens, 96, 5, top_k, torch.bfloat16)
    expected = fused_experts.reference(x.double(), ids, shares.double(), _double(weights))
    torch.set_num_threads(num_threads)
    try:
        # Strided inputs.
        wide = torch.cat((x, x), dim=1)[:, :96]
        found = fused_experts(wide, ids, shares, packed)
        residual = torch.randn(num_tokens, 96).bfloat16()
        sums = residual.double() + expected
        assert fused_experts(x, ids, shares, packed, residual) is residual
    finally:
        torch.set_num_threads(1)
    # Gate and up, the gated features and the output of an expert are rounded to bfloat16.
    for result, wanted in ((found, expected), (residual, sums)):
        error = result.double() - wanted
        assert error.norm() < 2**-7 * wanted.norm() and error.abs().max() < 2**-5 * wanted.abs().max()


@requires_native_kernels
@pytest.mark.parametrize(("hidden", "inner", "activation"), [(48, 64, "silu"), (64, 48, "silu"), (64, 64, "gelu")])
def test_weights_without_a_compiled_kernel_stay_unpacked(hidden, inner, activation):
    weights = make_experts(2, hidden, inner, activation, torch.bfloat16)
    assert pack_experts(weights) is weights


@pytest.mark.parametrize("activation", ["silu", "gelu", SWIGLU], ids=["silu", "gelu", "swiglu"])
@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
def test_quantized_experts_equal_the_experts_that_they_stand_for(scheme, activation):
    quantized = quantize(make_dense(4, 160, 96, activation), scheme)
    assert (quantized.num_experts, quantized.intermediate_size) == (4, 96)
    inputs = make_inputs(30, 160, 4, 2)
    expected = fused_experts.reference(*inputs, dequantize(quantized))
    assert expected.std() > 0.1
    for implementation in (fused_experts, fused_experts.reference):
        torch.testing.assert_close(implementation(*inputs, quantized), expected)


@pytest.mark.parametrize(("quantization", "max_error"), [("int8", 0.02), ("int4", 0.15), ("fp8", 0.05)])
def test_experts_are_quantized_at_load(quantization, max_error):
    dense = make_dense(4, 160, 96, "silu")
    quantized = quantize_experts(dense, quantization)
    assert isinstance(quantized.gate_up, QuantizedWeight) and isinstance(quantized.down, QuantizedWeight)
    inputs = make_inputs(30, 160, 4, 2)
    expected = fused_experts(*inputs, dense)
    assert 0 < (fused_experts(*inputs, quantized) - expected).std() < max_error * expected.std()


@requires_native_kernels
@pytest.mark.parametrize("activation", ["silu", SWIGLU], ids=["silu", "swiglu"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 2), (9, 1), (70, 4), (600, 3)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_compiled_quantized_experts_equal_the_reference(
    num_tokens, top_k, scheme, activation, num_threads, monkeypatch
):
    monkeypatch.setattr(experts, "CHUNK_ROWS", 900)
    dense = make_dense(5, 96, 64, activation)
    biases = {name: getattr(dense, name).bfloat16() for name in ("gate_up_bias", "down_bias")}
    dense = replace(dense, **biases) if top_k != 2 else replace(dense, gate_up_bias=None, down_bias=None)
    packed, plain = quantize(dense, scheme, torch.bfloat16), quantize(dense, scheme)
    assert packed.gate_up.is_panel_packed and not plain.gate_up.is_panel_packed
    x, ids, shares = make_inputs(num_tokens, 96, 5, top_k, torch.bfloat16)
    expected = fused_experts.reference(x.double(), ids, shares.double(), _double(dequantize(plain)))
    torch.set_num_threads(num_threads)
    try:
        found = fused_experts(torch.cat((x, x), dim=1)[:, :96], ids, shares, packed)
        residual = torch.randn(num_tokens, 96).bfloat16()
        sums = residual.double() + expected
        assert fused_experts(x, ids, shares, packed, residual) is residual
    finally:
        torch.set_num_threads(1)
    # w8a8 also rounds the inputs of both products to 8 bits.
    bits = 5 if scheme == "w8a8" else 7
    for result, wanted in ((found, expected), (residual, sums)):
        error = result.double() - wanted
        assert error.norm() < 2**-bits * wanted.norm() and error.abs().max() < 2 ** (2 - bits) * wanted.abs().max()
