# SPDX-License-Identifier: Apache-2.0
"""Adapter deltas of mixed batches against the product written out token by token."""

import pytest
import torch

from quire_kernels import SlotRows, add_lora, lora, plan_adapters

WIDTHS = (12, 4, 4)
NUM_SLOTS, MAX_RANK, IN = 4, 16, 20
RANKS = [(16, 16, 16), (1, 1, 1), (8, 0, 3), (0, 0, 0)]
NUM_TOKENS = 9
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(42)


def _slots(dtype):
    """Stacked slots, 0 past the ranks, and each slot's dense delta."""
    a = torch.zeros(len(WIDTHS), NUM_SLOTS, MAX_RANK, IN, dtype=dtype)
    b = [torch.zeros(NUM_SLOTS, MAX_RANK, width, dtype=dtype) for width in WIDTHS]
    deltas = torch.zeros(NUM_SLOTS, sum(WIDTHS), IN, dtype=torch.float64)
    for slot, ranks in enumerate(RANKS):
        for i, rank in enumerate(ranks):
            a[i, slot, :rank] = torch.randn(rank, IN) / 4
            b[i][slot, :rank] = torch.randn(rank, WIDTHS[i]) / 4
        dense = [b[i][slot].double().T @ a[i, slot].double() for i in range(len(WIDTHS))]
        deltas[slot] = torch.cat(dense)
    return a, b, deltas


SEGMENTS = {
    "one slot, all tokens": [SlotRows(2, 0, 9)],
    "base tokens first": [SlotRows(0, 3, 5), SlotRows(1, 5, 6), SlotRows(3, 6, 9)],
    "one token": [SlotRows(1, 4, 5)],
}


@pytest.fixture(params=["pair by pair", "all slots at once"])
def form(request, monkeypatch):
    monkeypatch.setattr(lora, "PAIR_LAUNCH_FLOPS", 0 if request.param == "pair by pair" else 1e12)


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deltas(segments, dtype, form):
    a, b, deltas = _slots(dtype)
    x, base = torch.randn(NUM_TOKENS, IN, dtype=dtype), torch.randn(NUM_TOKENS, sum(WIDTHS), dtype=dtype)
    expected = base.double()
    for s in segments:
        for token in range(s.start, s.end):
            expected[token] += deltas[s.slot] @ x[token].double()
    out = base.clone()
    add_lora(out, x, a, b, RANKS, plan_adapters(segments, NUM_TOKENS, NUM_SLOTS, CPU))
    # bf16 rounds A x, then the sum: two roundings of 2^-9 of values up to 8.
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_without_an_adapter_are_untouched(dtype, form):
    a, b, _ = _slots(dtype)
    base = torch.randn(NUM_TOKENS, sum(WIDTHS), dtype=dtype)
    out = base.clone()
    batch = plan_adapters([SlotRows(0, 3, 7)], NUM_TOKENS, NUM_SLOTS, CPU)
    add_lora(out, torch.randn(NUM_TOKENS, IN, dtype=dtype), a, b, RANKS, batch)
    assert torch.equal(out[:3], base[:3])
    assert torch.equal(out[7:], base[7:])
    assert not torch.equal(out[3:7], base[3:7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_overflowing_adapter_harms_its_own_tokens_only(dtype, form):
    a, b, _ = _slots(dtype)
    a[:, 0] = 3e38
    out = torch.randn(NUM_TOKENS, sum(WIDTHS), dtype=dtype)
    batch = plan_adapters([SlotRows(0, 0, 2), SlotRows(1, 2, 9)], NUM_TOKENS, NUM_SLOTS, CPU)
    add_lora(out, torch.rand(NUM_TOKENS, IN, dtype=dtype) + 1, a, b, RANKS, batch)
    assert not out[:2].isfinite().all()
    assert out[2:].isfinite().all()
