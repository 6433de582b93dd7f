# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: every implementation equals the reference, and the reference equals the formula."""

from dataclasses import replace

import pytest
import torch
from support.quantized_experts import SCHEMES, WEIGHT_ONLY, dequantize, make_dense, quantize
from support.requirements_of_machine import requires_native_kernels
from torch import Tensor

from quire_kernels import (
    AdapterSegment,
    ExpertAdapters,
    ExpertWeights,
    LoRASlots,
    LoRATarget,
    QuantizedWeight,
    Routing,
    SwiGLU,
    build_lora_batch,
    choose_experts,
    cpu_native,
    experts,
    fused_experts,
    pack_experts,
    quantize_experts,
)
from quire_kernels.linear import is_panel_packed

SWIGLU = SwiGLU(alpha=1.702, limit=1.5)


def make_experts(num_experts, hidden, inner, activation, dtype=torch.float32, biases=True):
    """Return random weights whose outputs are about 1. Experts with relu2 have no gate."""
    width = inner if activation == "relu2" else 2 * inner
    gate_up = torch.randn(num_experts, width, hidden) * hidden**-0.5 * 2
    down = torch.randn(num_experts, hidden, inner) * inner**-0.5
    both = [torch.randn(num_experts, n) if biases else None for n in (width, hidden)]
    tensors = [None if tensor is None else tensor.to(dtype) for tensor in (gate_up, down, *both)]
    return ExpertWeights(*tensors, activation, is_gated=activation != "relu2")


def make_inputs(num_tokens, hidden, num_experts, top_k, dtype=torch.float32):
    """Return inputs, and a choice of experts that leaves some without tokens when there are few."""
    x = torch.randn(num_tokens, hidden).to(dtype)
    logits = torch.randn(num_tokens, num_experts) + torch.arange(num_experts)
    return x, *choose_experts(logits, Routing(top_k))


@pytest.fixture(autouse=True)
def seed(monkeypatch) -> None:
    torch.manual_seed(42)
    # Test our GEMM also on processors where oneDNN's is used.
    monkeypatch.setattr(cpu_native, "has_fast_gemm", lambda: True)


def test_the_router_chooses_the_likeliest_experts():
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, -1.0, 4.0]]).bfloat16()
    ids, weights = choose_experts(logits, Routing(2, normalize=False))
    assert ids.tolist() == [[1, 2], [0, 2]]
    torch.testing.assert_close(weights, logits.float().softmax(-1).gather(1, ids))
    _, normalized = choose_experts(logits, Routing(2))
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


@pytest.mark.parametrize("activation", ["silu", "gelu", SWIGLU, "relu2"], ids=["silu", "gelu", "swiglu", "relu2"])
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
    wide = (None if tensor is None else tensor.double() for tensor in tensors)
    return ExpertWeights(*wide, weights.activation, weights.is_gated)


@requires_native_kernels
@pytest.mark.parametrize("activation", ["silu", SWIGLU, "relu2"], ids=["silu", "swiglu", "relu2"])
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
@pytest.mark.parametrize(
    ("scheme", "activation"),
    [*((scheme, activation) for scheme in SCHEMES for activation in ("silu", SWIGLU)), ("int4", "relu2")],
    ids=str,
)
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


RANKS = {0: (4, 4), 1: (17, 3), 2: (None, 1), 3: (2, None)}
"""LoRA ranks of gate_up and down in each slot; None: the adapter does not change the projection."""


def make_adapters(sizes: tuple[int, int, int], dtype, num_tokens: int):
    """Return adapters of some tokens, and the matrices of each slot for gate_up and down."""
    num_experts, hidden, inner = sizes
    shapes = (hidden, 2 * inner), (inner, hidden)
    targets = [LoRATarget(d_in, (d_out,), num_experts=num_experts) for d_in, d_out in shapes]
    # A linear before and after the experts: its matrices must not be read as theirs.
    linear = LoRATarget(hidden, (hidden,))
    slots = LoRASlots([linear, *targets, linear], len(RANKS), 18, torch.empty(0, dtype=dtype))
    matrices, last_page = {}, slots.num_pages
    for slot, ranks in RANKS.items():
        pairs = matrices[slot] = [
            None
            if rank is None
            else (
                (torch.randn(num_experts, rank, d_in) * d_in**-0.5).to(dtype),
                (torch.randn(num_experts, d_out, rank) * rank**-0.5).to(dtype),
            )
            for rank, (d_in, d_out) in zip(ranks, shapes, strict=True)
        ]
        other = torch.randn(3, hidden), torch.randn(hidden, 3)
        packed = slots.pack([[other], *([pair] for pair in pairs), [other]])
        last_page -= slots.count_pages(packed)
        slots.write(slot, packed, last_page)
    ends = torch.randint(0, num_tokens + 1, (6,)).sort().values.tolist()
    segments = [
        AdapterSegment(slot, start, end)
        for slot, start, end in zip((1, 0, 3, 2, 1), ends, ends[1:], strict=False)
        if start < end
    ]
    batch = build_lora_batch(segments, num_tokens, torch.device("cpu"))
    return ExpertAdapters(*slots.modules[1:3], batch), matrices


def adapted_sum(x, ids, shares, weights, adapters, matrices):
    """The formula, with the weights W + B A of each token and expert."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, slot in enumerate(adapters.batch.adapter_slots.tolist()):
        for expert, share in zip(ids[token].tolist(), shares[token].tolist(), strict=True):
            gate_up, down = weights.gate_up[expert].double(), weights.down[expert].double()
            for weight, pair in zip((gate_up, down), matrices.get(slot, ()), strict=False):
                if pair is not None:
                    weight += pair[1][expert].double() @ pair[0][expert].double()
            both = (gate_up @ x[token].double())[None]
            both = both if weights.gate_up_bias is None else both + weights.gate_up_bias[expert].double()
            y = down @ weights.activate(both)[0]
            y = y if weights.down_bias is None else y + weights.down_bias[expert].double()
            out[token] += share * y
    return out


@pytest.mark.parametrize("activation", ["silu", SWIGLU], ids=["silu", "swiglu"])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (12, 2), (40, 3)])
def test_adapters_change_the_weights_of_experts(num_tokens, top_k, activation):
    weights = make_experts(5, 20, 12, activation)
    inputs = make_inputs(num_tokens, 20, 5, top_k)
    adapters, matrices = make_adapters((5, 20, 12), torch.float32, num_tokens)
    expected = adapted_sum(*inputs, weights, adapters, matrices).float()
    torch.testing.assert_close(
        fused_experts.reference(*inputs, weights, None, adapters), expected, rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(fused_experts(*inputs, weights, None, adapters), expected, rtol=1e-4, atol=1e-4)


@requires_native_kernels
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("activation", ["silu", SWIGLU], ids=["silu", "swiglu"])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 2), (9, 1), (70, 3), (600, 2)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_compiled_experts_with_adapters_equal_the_formula(
    num_tokens, top_k, activation, scheme, num_threads, monkeypatch
):
    monkeypatch.setattr(experts, "CHUNK_ROWS", 900)
    dense = make_experts(5, 96, 64, activation, torch.bfloat16, biases=top_k != 2)
    if scheme is None:
        weights, packed = dense, pack_experts(dense)
        assert is_panel_packed(packed.gate_up)
    else:
        dense = replace(dense, gate_up=dense.gate_up.float(), down=dense.down.float())
        weights, packed = dequantize(quantize(dense, scheme)), quantize(dense, scheme, torch.bfloat16)
        assert packed.gate_up.is_panel_packed
    x, ids, shares = make_inputs(num_tokens, 96, 5, top_k, torch.bfloat16)
    adapters, matrices = make_adapters((5, 96, 64), torch.bfloat16, num_tokens)
    expected = adapted_sum(x, ids, shares, weights, adapters, matrices)
    slots, token = adapters.batch.adapter_slots.tolist(), num_tokens // 2
    alone = build_lora_batch([AdapterSegment(slots[token], 0, 1)] if slots[token] >= 0 else [], 1, torch.device("cpu"))
    torch.set_num_threads(num_threads)
    try:
        found = fused_experts(x, ids, shares, packed, None, adapters)
        base = fused_experts(x, ids, shares, packed)
        one = (tensor[token : token + 1] for tensor in (x, ids, shares))
        found_alone = fused_experts(*one, packed, None, replace(adapters, batch=alone))
        residual = torch.randn(num_tokens, 96).bfloat16()
        sums = residual.double() + expected
        assert fused_experts(x, ids, shares, packed, residual, adapters) is residual
    finally:
        torch.set_num_threads(1)
    bits = 5 if scheme == "w8a8" else 6
    for result, wanted in ((found, expected), (residual, sums)):
        error = result.double() - wanted
        assert error.norm() < 2**-bits * wanted.norm() and error.abs().max() < 2 ** (2 - bits) * wanted.abs().max()
    is_adapted = adapters.batch.adapter_slots >= 0
    assert torch.equal(found[~is_adapted], base[~is_adapted]) and torch.equal(found_alone[0], found[token])
    if is_adapted.any():
        assert (found - base)[is_adapted].double().norm() > 0.1 * expected[is_adapted].norm()
