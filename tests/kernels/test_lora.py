# SPDX-License-Identifier: Apache-2.0
"""Adapter deltas of mixed batches against the product written out token by token."""

import pytest
import torch

from quire_kernels import SlotRows, lora_expand, lora_shrink

WIDTHS = (12, 4, 4)
NUM_SLOTS, MAX_RANK, IN = 4, 16, 20


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(42)


def _slots(ranks):
    """Stacked slots whose dead rows and columns are NaN, and each slot's dense delta."""
    a = torch.full((NUM_SLOTS, len(WIDTHS) * MAX_RANK, IN), float("nan"))
    b = [torch.full((NUM_SLOTS, width, MAX_RANK), float("nan")) for width in WIDTHS]
    deltas = torch.zeros(NUM_SLOTS, sum(WIDTHS), IN, dtype=torch.float64)
    for slot, slice_ranks in enumerate(ranks):
        row = column = 0
        for i, (rank, width) in enumerate(zip(slice_ranks, WIDTHS, strict=True)):
            a[slot, row : row + rank] = torch.randn(rank, IN)
            b[i][slot, :, :rank] = torch.randn(width, rank)
            deltas[slot, column : column + width] = b[i][slot, :, :rank].double() @ a[slot, row : row + rank].double()
            row, column = row + rank, column + width
    return a, b, deltas


CASES = {
    "one slot, all tokens": [SlotRows(2, 0, 9)],
    "base tokens first": [SlotRows(0, 3, 5), SlotRows(1, 5, 6), SlotRows(3, 6, 9)],
    "one token": [SlotRows(1, 4, 5)],
}


@pytest.mark.parametrize("segments", CASES.values(), ids=CASES.keys())
def test_deltas(segments):
    ranks = [(16, 16, 16), (1, 1, 1), (8, 0, 3), (0, 0, 0)]
    a, b, deltas = _slots(ranks)
    x, base = torch.randn(9, IN), torch.randn(9, sum(WIDTHS))
    expected = base.double()
    for s in segments:
        for token in range(s.start, s.end):
            expected[token] += deltas[s.slot] @ x[token].double()
    out = base.clone()
    lora_expand(lora_shrink(x, a, ranks, segments), b, ranks, segments, out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_tokens_without_an_adapter_are_untouched():
    ranks = [(16, 16, 16)] * NUM_SLOTS
    a, b, _ = _slots(ranks)
    out = base = torch.randn(9, sum(WIDTHS))
    out = base.clone()
    segments = [SlotRows(0, 3, 7)]
    lora_expand(lora_shrink(torch.randn(9, IN), a, ranks, segments), b, ranks, segments, out)
    assert torch.equal(out[:3], base[:3])
    assert torch.equal(out[7:], base[7:])
    assert not torch.equal(out[3:7], base[3:7])
