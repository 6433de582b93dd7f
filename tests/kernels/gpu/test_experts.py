# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts in interpreted Triton: equals the reference for sizes that do not fill a tile."""

from dataclasses import replace

import pytest
import torch
from support.quantized_experts import WEIGHT_ONLY, make_dense, quantize
from support.requirements_of_machine import interpreted_kernel, requires_interpreter

from quire_kernels import (
    ExpertAdapters,
    ExpertWeights,
    LoRASlots,
    LoRATarget,
    Routing,
    SwiGLU,
    add_lora,
    choose_experts,
    fused_experts,
    route_tokens,
)
from quire_kernels.lora import LoRABatch

pytestmark = requires_interpreter


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "sizes", "activation"),
    [
        (1, 2, (4, 64, 64), "silu"),
        (5, 1, (3, 40, 72), "gelu_new"),
        (23, 3, (5, 72, 40), SwiGLU(1.702, 1.5)),
        # Tiles of 64 rows; a token more than two of them hold.
        (129, 2, (2, 24, 136), "silu"),
    ],
    ids=["decode", "gelu", "swiglu", "prompt"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_fused_experts(num_tokens, top_k, sizes, activation, dtype, monkeypatch):
    torch.manual_seed(42)
    num_experts, hidden, inner = sizes
    tensors = [torch.randn(num_experts, 2 * inner, hidden) * hidden**-0.5]
    tensors += [torch.randn(num_experts, hidden, inner) * inner**-0.5]
    tensors += [torch.randn(num_experts, 2 * inner), torch.randn(num_experts, hidden)]
    biases = top_k > 1
    experts = ExpertWeights(*(t.to(dtype) if i < 2 or biases else None for i, t in enumerate(tensors)), activation)
    x = torch.randn(num_tokens, 2 * hidden).to(dtype)[:, :hidden]
    # The last expert has no tokens, unless each token has all.
    logits = torch.randn(num_tokens, num_experts)
    logits[:, -1] -= 100
    inputs = x, *choose_experts(logits, Routing(top_k)), experts
    monkeypatch.setitem(route_tokens.dispatch_table, "cpu", interpreted_kernel(route_tokens))
    expected, tolerance = fused_experts.reference(*inputs), 1e-5 if dtype is torch.float32 else 8e-3
    found = interpreted_kernel(fused_experts)(*inputs)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    residual = torch.randn_like(expected)
    added = interpreted_kernel(fused_experts)(*inputs, residual.clone())
    torch.testing.assert_close(added, residual + found, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("num_tokens", "top_k", "activation"), [(1, 2, "silu"), (70, 2, SwiGLU(1.702, 1.5))])
@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_quantized_experts(num_tokens, top_k, activation, scheme, dtype, monkeypatch):
    """The sizes fill no tile, and blocks of 128 x 128 end within an expert."""
    torch.manual_seed(42)
    experts = quantize(make_dense(3, 160, 96, activation), scheme)
    biases = (b.to(dtype) for b in (experts.gate_up_bias, experts.down_bias))
    experts = replace(experts, **dict(zip(("gate_up_bias", "down_bias"), biases, strict=True)))
    x, routed = torch.randn(num_tokens, 160).to(dtype), choose_experts(torch.randn(num_tokens, 3), Routing(top_k))
    monkeypatch.setitem(route_tokens.dispatch_table, "cpu", interpreted_kernel(route_tokens))
    expected, tolerance = fused_experts.reference(x, *routed, experts), 1e-5 if dtype is torch.float32 else 8e-3
    found = interpreted_kernel(fused_experts)(x, *routed, experts)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


RANKS = {0: (16, 3), 1: (None, 24), 2: (1, None), 3: (8, 8)}
"""LoRA ranks of gate_up and down in each slot."""


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "sizes", "activation"),
    [
        (1, 2, (4, 64, 64), "silu"),
        (5, 1, (3, 40, 72), "gelu_new"),
        (23, 3, (5, 72, 40), SwiGLU(1.702, 1.5)),
        (129, 2, (2, 24, 136), "silu"),
    ],
    ids=["decode", "gelu", "swiglu", "prompt"],
)
@pytest.mark.parametrize("scheme", [None, "int4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_adapters_of_experts(num_tokens, top_k, sizes, activation, scheme, dtype, monkeypatch):
    torch.manual_seed(42)
    # Groups of int4 have 32 inputs.
    num_experts, hidden, inner = (*sizes[:1], 160, 96) if scheme == "int4" else sizes
    dense = make_dense(num_experts, hidden, inner, activation)
    if scheme is None:
        experts = replace(dense, gate_up=dense.gate_up.to(dtype), down=dense.down.to(dtype))
    else:
        experts = quantize(dense, scheme)
    biases = (b.to(dtype) for b in (experts.gate_up_bias, experts.down_bias))
    experts = replace(experts, **dict(zip(("gate_up_bias", "down_bias"), biases, strict=True)))
    shapes = (hidden, 2 * inner), (inner, hidden)
    targets = [LoRATarget(d_in, (d_out,), num_experts=num_experts) for d_in, d_out in shapes]
    slots = LoRASlots([LoRATarget(6, (3,)), *targets], 4, 24, torch.empty(0, dtype=dtype))
    for slot, ranks in RANKS.items():
        pairs = [
            rank and (torch.randn(num_experts, rank, d_in) * d_in**-0.5, torch.randn(num_experts, d_out, rank) / 4)
            for rank, (d_in, d_out) in zip(ranks, shapes, strict=True)
        ]
        slots.write(slot, slots.pack([[None], *([pair] for pair in pairs)]))
    of_tokens = torch.randint(-1, 4, (num_tokens,)) if num_tokens > 1 else torch.tensor([0])
    adapters = ExpertAdapters(*slots.modules[1:], LoRABatch(of_tokens))
    x, routed = (
        torch.randn(num_tokens, hidden).to(dtype),
        choose_experts(torch.randn(num_tokens, num_experts), Routing(top_k)),
    )
    for op in (route_tokens, add_lora):
        monkeypatch.setitem(op.dispatch_table, "cpu", interpreted_kernel(op))
    expected = fused_experts.reference(x, *routed, experts, None, adapters)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    found = interpreted_kernel(fused_experts)(x, *routed, experts, None, adapters)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    base = fused_experts.reference(x, *routed, experts)
    torch.testing.assert_close(found[of_tokens < 0], base[of_tokens < 0], rtol=tolerance, atol=tolerance)
    assert (found - base)[of_tokens >= 0].abs().amax(1).min() > 0.01
    residual = torch.randn_like(expected)
    added = interpreted_kernel(fused_experts)(x, *routed, experts, residual.clone(), adapters)
    torch.testing.assert_close(added, residual + expected, rtol=tolerance, atol=tolerance)
