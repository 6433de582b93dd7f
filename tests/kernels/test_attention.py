# SPDX-License-Identifier: Apache-2.0
"""Paged attention on ragged batches: the implementation equals the reference, the reference equals plain attention."""

from types import SimpleNamespace

import pytest
import torch
from support.attention_batches import RAGGED_SPANS, make_batch

from quire_kernels import attention, dispatch, paged_attention, reads_whole_blocks

SCALE = 0.15
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(42)


def _check(queries, cache, batch, tolerance=2e-6, **options):
    """Assert that the selected implementation equals the reference."""
    found = paged_attention(queries, cache, batch, SCALE, **options)
    expected = paged_attention.reference(queries, cache, batch, SCALE, **options)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("spans", RAGGED_SPANS.values(), ids=RAGGED_SPANS.keys())
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equals_reference(spans, dtype):
    queries, cache, batch = make_batch(spans, dtype=dtype)
    _check(queries, cache, batch, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (14, 2)], ids=str)
@pytest.mark.parametrize("block_size", [8, 32, 128])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_shapes(heads, block_size, head_dim):
    queries, cache, batch = make_batch(RAGGED_SPANS["mixed"], heads=heads, block_size=block_size, head_dim=head_dim)
    _check(queries, cache, batch)


# The last window is wider than every context but one.
@pytest.mark.parametrize("window", [1, 5, 16, 40, 299])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_windows_and_soft_caps(window, softcap, dtype):
    queries, cache, batch = make_batch(RAGGED_SPANS["mixed"], dtype=dtype)
    _check(queries, cache, batch, tolerance=TOLERANCE[dtype], window=window, softcap=softcap)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_sinks(window, softcap, dtype):
    queries, cache, batch = make_batch(RAGGED_SPANS["mixed"], dtype=dtype)
    sinks = torch.randn(queries.shape[1]).to(dtype)
    _check(queries, cache, batch, tolerance=TOLERANCE[dtype], window=window, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("spans", [[(700, 1)], [(700, 20)], [(700, 1), (690, 1)]], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0], ids=str)
def test_blocks_outside_the_window_are_not_read(spans, softcap):
    queries, cache, batch = make_batch(spans)
    expected = paged_attention.reference(queries, cache, batch, SCALE, 100, softcap)
    first = min(start for start, _ in spans) - 100 + 1
    # A block table is padded with its first block, which is then read and masked.
    cache[:, batch.block_tables[:, 1 : first // 16]] = float("nan")
    found = paged_attention(queries, cache, batch, SCALE, 100, softcap)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1)], ids=str)
@pytest.mark.parametrize("spans", RAGGED_SPANS.values(), ids=RAGGED_SPANS.keys())
@pytest.mark.parametrize("window", [None, 20])
def test_memory_past_the_context_is_not_read(spans, heads, window):
    queries, cache, batch = make_batch(spans, dtype=torch.bfloat16, heads=heads)
    if reads_whole_blocks(cache, heads[0]):
        pytest.skip("no compiled kernels here: blocks are cleared instead")
    expected = paged_attention(queries, cache, batch, SCALE, window)
    tail = torch.ones(cache.shape[1:3], dtype=torch.bool)
    for table, context in zip(batch.block_tables, batch.context_lengths.tolist(), strict=True):
        keys = torch.arange(context)
        tail[table[keys // cache.shape[2]], keys % cache.shape[2]] = False
    assert tail.any()
    cache[:, tail] = float("nan")
    assert torch.equal(paged_attention(queries, cache, batch, SCALE, window), expected)


def test_layers_of_different_windows_share_a_plan():
    queries, cache, batch = make_batch(RAGGED_SPANS["mixed"])
    for window in (None, 7, 30, None, 7):
        _check(queries, cache, batch, window=window)


@pytest.mark.parametrize("window", [None, 22, 4, 1])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, torch.tensor([-0.5, 0.5])], ids=["no sinks", "sinks"])
def test_reference_is_causal_attention(window, softcap, sinks):
    queries, cache, batch = make_batch([(20, 3)], heads=(2, 1), head_dim=8)
    found = paged_attention.reference(queries, cache, batch, SCALE, window, softcap, sinks)
    keys, values = cache[:, batch.block_tables[0]].flatten(1, 2)[:, :23, 0].double()
    for i in range(3):
        seen = slice(0 if window is None else max(0, 21 + i - window), 21 + i)
        scores = queries[i].double() @ keys[seen].T * SCALE
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None]))
        torch.testing.assert_close(found[i].double(), weights @ values[seen], rtol=1e-5, atol=1e-6)


def test_each_span_is_in_one_group():
    _, _, batch = make_batch(RAGGED_SPANS["mixed"])
    rows = torch.cat([torch.arange(90)[group.rows] for group in batch.groups])
    assert torch.equal(rows.sort().values, torch.arange(int(batch.query_starts[-1])))


def test_a_long_context_does_not_pad_short_ones():
    _, _, batch = make_batch([(3000, 1), *[(20 + i, 1) for i in range(30)]])
    gathered = sum(len(group.blocks) for group in batch.groups)
    assert gathered < 188 + 30 * 5


def test_gathers_are_bounded(monkeypatch):
    monkeypatch.setattr(attention, "GATHER_BYTES", 96 * 3 * 64 * 4)
    queries, cache, batch = make_batch([(30, 1)] * 7 + [(0, 20)] * 5)
    assert max(group.num_spans * group.num_keys for group in batch.groups) <= 96
    _check(queries, cache, batch)


@pytest.mark.parametrize("heads", [(9, 3), (14, 2), (4, 4), (3, 1)], ids=str)
@pytest.mark.parametrize("loudness", [1.0, 16.0], ids=["usual", "loud"])
def test_single_gemm_is_as_exact_as_fused_attention(heads, loudness, monkeypatch):
    monkeypatch.setattr(attention, "MIN_SINGLE_GEMM_KEYS", 0)
    queries, cache, batch = make_batch([(130, 1), (7, 1), (64, 1)], heads=heads, dtype=torch.bfloat16)
    queries *= loudness
    expected = paged_attention.reference(queries.double(), cache.double(), batch, SCALE)
    error = (paged_attention(queries, cache, batch, SCALE).double() - expected).norm() / expected.norm()
    monkeypatch.setattr(attention, "MAX_SINGLE_GEMM_HEADS", 0)
    assert error < 4e-3
    if heads[0] != heads[1]:
        fused = (paged_attention(queries, cache, batch, SCALE).double() - expected).norm() / expected.norm()
        assert error < 2 * fused


@pytest.mark.parametrize(
    ("overrides", "reads"),
    [
        ({}, False),
        ({"paged_attention": "fused"}, False),
        ({"paged_attention": "cudnn"}, True),
        ({"paged_attention": "torch"}, True),
        ({"": "torch"}, True),
    ],
)
def test_cleared_blocks_depend_on_the_implementation(overrides, reads, monkeypatch):
    """Clearing is a pass over all new blocks of all layers, in steps with prompts. The kernel's own tests have NaN in
    memory that no span has written."""
    monkeypatch.setattr(dispatch, "overrides", lambda: overrides)
    monkeypatch.setattr(paged_attention, "_preferred", {})
    cache = SimpleNamespace(device=torch.device("cuda"))
    assert reads_whole_blocks(cache, 32) == reads
