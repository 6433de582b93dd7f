# SPDX-License-Identifier: Apache-2.0
"""Paged attention on ragged batches: the form that runs equals the reference, the reference equals plain attention."""

import pytest
import torch

from quire_kernels import attention, paged_attention, plan_attention

SCALE = 0.15
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(42)


def _case(spans, *, block_size=16, heads=(9, 3), head_dim=64, dtype=torch.float32):
    """Queries, a poisoned cache that holds each span's context in scattered blocks, and the plan."""
    tables = [-(-(start + length) // block_size) for start, length in spans]
    order = torch.randperm(sum(tables) + 3)
    # Memory that nobody wrote is NaN: reading it, even under a mask, shows.
    cache = torch.full((2, len(order), block_size, heads[1], head_dim), float("nan"), dtype=dtype)
    block_tables = torch.empty(len(spans), max(tables), dtype=torch.int64)
    at = 0
    for i, (count, (start, length)) in enumerate(zip(tables, spans, strict=True)):
        blocks = order[at : at + count]
        at += count
        block_tables[i] = blocks[0]
        block_tables[i, :count] = blocks
        content = torch.randn(2, count * block_size, heads[1], head_dim, dtype=dtype)
        # Past the context: finite, as the engine clears a block before its first use, but loud.
        content[:, start + length :] = 100.0
        cache[:, blocks] = content.view(2, count, block_size, heads[1], head_dim)
    queries = torch.randn(sum(length for _, length in spans), heads[0], head_dim, dtype=dtype)
    starts, lengths = [s for s, _ in spans], [n for _, n in spans]
    return queries, cache, plan_attention(starts, lengths, block_tables, cache, torch.device("cpu"))


def _check(queries, cache, batch, tolerance=2e-6, **options):
    """The form that runs equals the reference."""
    found = paged_attention(queries, cache, batch, SCALE, **options)
    expected = paged_attention.reference(queries, cache, batch, SCALE, **options)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


RAGGED = {
    "one token": [(0, 1)],
    "one decode": [(16, 1)],
    "decodes around a block": [(14, 1), (15, 1), (16, 1), (17, 1), (0, 1)],
    "decodes far apart": [(3, 1), (700, 1), (1500, 1), (31, 1)],
    "prompts": [(0, 5), (0, 16), (0, 33)],
    "equal prompts": [(0, 17), (0, 17), (0, 17)],
    "chunks": [(16, 16), (7, 30), (64, 2)],
    "equal chunks": [(32, 9), (32, 9)],
    "mixed": [(40, 1), (0, 33), (41, 1), (16, 20), (5, 1), (0, 33), (300, 1)],
}


@pytest.mark.parametrize("spans", RAGGED.values(), ids=RAGGED.keys())
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equals_reference(spans, dtype):
    queries, cache, batch = _case(spans, dtype=dtype)
    _check(queries, cache, batch, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (14, 2)], ids=str)
@pytest.mark.parametrize("block_size", [8, 32, 128])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_shapes(heads, block_size, head_dim):
    queries, cache, batch = _case(RAGGED["mixed"], heads=heads, block_size=block_size, head_dim=head_dim)
    _check(queries, cache, batch)


# The last one is wider than every context but one.
@pytest.mark.parametrize("window", [1, 5, 16, 40, 299])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_windows_and_soft_caps(window, softcap, dtype):
    queries, cache, batch = _case(RAGGED["mixed"], dtype=dtype)
    _check(queries, cache, batch, tolerance=TOLERANCE[dtype], window=window, softcap=softcap)


@pytest.mark.parametrize("spans", RAGGED.values(), ids=RAGGED.keys())
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1)], ids=str)
def test_soft_caps(spans, heads):
    queries, cache, batch = _case(spans, heads=heads)
    _check(4 * queries, cache, batch, softcap=3.0)


@pytest.mark.parametrize("spans", [[(700, 1)], [(700, 20)], [(700, 1), (690, 1)]], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0], ids=str)
def test_blocks_that_have_left_the_window_are_not_read(spans, softcap):
    queries, cache, batch = _case(spans)
    expected = paged_attention.reference(queries, cache, batch, SCALE, 100, softcap)
    first = min(start for start, _ in spans) - 100 + 1
    # A table is padded with its first block, which is then read to be masked.
    cache[:, batch.block_tables[:, 1 : first // 16]] = float("nan")
    found = paged_attention(queries, cache, batch, SCALE, 100, softcap)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


def test_layers_of_different_windows_share_a_plan():
    queries, cache, batch = _case(RAGGED["mixed"])
    for window in (None, 7, 30, None, 7):
        _check(queries, cache, batch, window=window)


@pytest.mark.parametrize("window", [None, 22, 4, 1])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_reference_is_causal_attention(window, softcap):
    queries, cache, batch = _case([(20, 3)], heads=(2, 1), head_dim=8)
    found = paged_attention.reference(queries, cache, batch, SCALE, window, softcap)
    keys, values = cache[:, batch.block_tables[0]].flatten(1, 2)[:, :23, 0].double()
    for i in range(3):
        seen = slice(0 if window is None else max(0, 21 + i - window), 21 + i)
        scores = queries[i].double() @ keys[seen].T * SCALE
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        torch.testing.assert_close(found[i].double(), scores.softmax(-1) @ values[seen], rtol=1e-5, atol=1e-6)


def test_each_span_is_in_one_group():
    _, _, batch = _case(RAGGED["mixed"])
    rows = torch.cat([torch.arange(90)[group.rows] for group in batch.groups])
    assert torch.equal(rows.sort().values, torch.arange(int(batch.query_starts[-1])))


def test_a_long_context_does_not_pad_short_ones():
    _, _, batch = _case([(3000, 1), *[(20 + i, 1) for i in range(30)]])
    gathered = sum(len(group.blocks) for group in batch.groups)
    assert gathered < 188 + 30 * 5


def test_gathers_are_bounded(monkeypatch):
    monkeypatch.setattr(attention, "GATHER_BYTES", 96 * 3 * 64 * 4)
    queries, cache, batch = _case([(30, 1)] * 7 + [(0, 20)] * 5)
    assert max(group.num_spans * group.num_keys for group in batch.groups) <= 96
    _check(queries, cache, batch)


@pytest.mark.parametrize("heads", [(9, 3), (14, 2), (4, 4), (3, 1)], ids=str)
@pytest.mark.parametrize("loudness", [1.0, 16.0], ids=["usual", "loud"])
def test_one_product_is_as_exact_as_fused_attention(heads, loudness, monkeypatch):
    monkeypatch.setattr(attention, "MIN_PRODUCT_KEYS", 0)
    queries, cache, batch = _case([(130, 1), (7, 1), (64, 1)], heads=heads, dtype=torch.bfloat16)
    queries *= loudness
    expected = paged_attention.reference(queries.double(), cache.double(), batch, SCALE)
    error = (paged_attention(queries, cache, batch, SCALE).double() - expected).norm() / expected.norm()
    monkeypatch.setattr(attention, "MAX_PRODUCT_HEADS", 0)
    assert error < 4e-3
    if heads[0] != heads[1]:
        fused = (paged_attention(queries, cache, batch, SCALE).double() - expected).norm() / expected.norm()
        assert error < 2 * fused
