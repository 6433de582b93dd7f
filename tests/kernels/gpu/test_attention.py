# SPDX-License-Identifier: Apache-2.0
"""Attention in interpreted Triton: it equals the reference on ragged batches, for any split of the work."""

import pytest
import torch
from support.attention_batches import RAGGED_SPANS, make_batch
from support.requirements_of_machine import interpreted_kernel, requires_interpreter

from quire_kernels import paged_attention
from quire_kernels.gpu import attention as gpu

pytestmark = requires_interpreter

SCALE = 0.15
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(42)


def _check(queries, cache, batch, **options):
    found = interpreted_kernel(paged_attention)(queries, cache, batch, SCALE, **options)
    expected = paged_attention.reference(queries, cache, batch, SCALE, **options)
    tolerance = TOLERANCE[queries.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("spans", RAGGED_SPANS.values(), ids=RAGGED_SPANS.keys())
def test_equals_reference(spans):
    _check(*make_batch(spans))


@pytest.mark.parametrize("options", [{}, {"window": 40}], ids=str)
def test_table_columns_beyond_a_context_are_not_read(options):
    """`prepare_inputs` leaves them as they are, and such an address would be outside of all memory."""
    queries, cache, batch = make_batch(RAGGED_SPANS["mixed"], heads=(4, 2))
    expected = paged_attention.reference(queries, cache, batch, SCALE, **options)
    num_blocks = -(-batch.context_lengths // cache.shape[2])
    batch.block_tables[torch.arange(batch.block_tables.shape[1]) >= num_blocks[:, None]] = 1 << 40
    found = interpreted_kernel(paged_attention)(queries, cache, batch, SCALE, **options)
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=3e-6)


def test_float16():
    _check(*make_batch(RAGGED_SPANS["mixed"], dtype=torch.float16))


@pytest.mark.parametrize("head_dim", [16, 80, 96, 128, 256])
def test_head_sizes(head_dim):
    _check(*make_batch([(40, 1), (3, 30), (70, 1)], head_dim=head_dim, heads=(4, 2)))


@pytest.mark.parametrize(("heads", "dims"), [((5, 1), (20, 12)), ((48, 1), (40, 32)), ((64, 1), (80, 64))], ids=str)
def test_values_that_are_parts_of_keys(heads, dims, monkeypatch):
    """As in latent attention. A tile has 5, 24 and 32 of the heads."""
    monkeypatch.setattr(gpu, "num_workers", lambda *_: 40)
    monkeypatch.setattr(gpu, "MIN_SHARE", 1)
    head_dim, value_dim = dims
    queries, cache, batch = make_batch([(700, 1), (3, 30), (70, 1), (130, 2)], head_dim=head_dim, heads=heads)
    _check(queries, cache[:1].expand(2, -1, -1, -1, -1), batch, value_dim=value_dim)


@pytest.mark.parametrize("block_size", [8, 32, 128])
def test_block_sizes(block_size):
    _check(*make_batch([(130, 1), (100, 30), (7, 1)], block_size=block_size, heads=(4, 2)))


@pytest.mark.parametrize("heads", [(3, 3), (8, 1), (14, 2), (20, 1)], ids=str)
def test_groups_of_heads(heads):
    """Seven heads leave rows of a tile empty; twenty need a larger tile."""
    _check(*make_batch([(40, 1), (3, 30), (30, 2)], heads=heads))


@pytest.mark.parametrize("window", [1, 5, 40, 299])
def test_windows(window):
    _check(*make_batch(RAGGED_SPANS["mixed"], heads=(4, 2)), window=window)


@pytest.mark.parametrize("window", [None, 40])
def test_soft_caps(window):
    queries, cache, batch = make_batch(RAGGED_SPANS["mixed"], heads=(4, 2))
    _check(4 * queries, cache, batch, window=window, softcap=2.0)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("workers", [1, 40])
def test_sinks(workers, window, monkeypatch):
    """Of parts of a pair, only the first counts the sink."""
    monkeypatch.setattr(gpu, "num_workers", lambda *_: workers)
    queries, cache, batch = make_batch(RAGGED_SPANS["mixed"], heads=(4, 2))
    _check(queries, cache, batch, window=window, sinks=2 * torch.randn(4))


@pytest.mark.parametrize("workers", [1, 40])
def test_any_number_of_workers(workers, monkeypatch):
    """One worker splits no pair; forty split most, some into more parts than are merged at once."""
    monkeypatch.setattr(gpu, "num_workers", lambda *_: workers)
    monkeypatch.setattr(gpu, "MIN_SHARE", 1)
    _check(*make_batch([(300, 1), (3, 1), (700, 1), (64, 1), (63, 2)], heads=(4, 2), head_dim=32))


def test_short_spans_of_several_tokens():
    """Spans of a few tokens are short spans: four heads of four tokens fit into a tile of sixteen rows."""
    queries, cache, batch = make_batch([(100, 4), (13, 3), (700, 1), (0, 2)], heads=(8, 2))
    assert batch.max_query_len <= 16 // 4
    _check(queries, cache, batch)


def test_queries_may_be_a_view():
    queries, cache, batch = make_batch(RAGGED_SPANS["mixed"], heads=(4, 2))
    wide = torch.full((queries.shape[0], 8, 64), float("nan"))
    wide[:, :4] = queries
    _check(wide[:, :4], cache, batch)


def test_blocks_outside_the_window_are_not_read():
    queries, cache, batch = make_batch([(700, 1), (690, 20)], heads=(4, 2))
    expected = paged_attention.reference(queries, cache, batch, SCALE, 100)
    cache[:, batch.block_tables[:, : (690 - 100 + 1) // 64 * 4]] = float("nan")
    found = interpreted_kernel(paged_attention)(queries, cache, batch, SCALE, 100)
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=3e-6)


def test_memory_past_the_context_is_not_read():
    """This kernel does not require cleared blocks."""
    queries, cache, batch = make_batch([(20, 1), (3, 30)], heads=(4, 2))
    expected = paged_attention.reference(queries, cache, batch, SCALE)
    for table, context in zip(batch.block_tables, batch.context_lengths, strict=True):
        cache[:, table[(context - 1) // 16], (context - 1) % 16 + 1 :] = float("nan")
    found = interpreted_kernel(paged_attention)(queries, cache, batch, SCALE)
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=3e-6)


def test_layers_of_different_windows_share_a_batch():
    queries, cache, batch = make_batch([(40, 1), (9, 1)], heads=(4, 2))
    for window in (None, 7):
        _check(queries, cache, batch, window=window)
    assert len(batch.work_plans) == 2


def test_work_plan():
    _, _, batch = make_batch([(127, 1), (0, 300), (128, 1), (500, 2)])
    work = gpu._get_work_plan(batch, window=0, max_short=4, short_keys=64, long_tokens=42)
    assert work.tolist() == [[0, 2, 2, 5, 13], [0, 0, 8, 8, 8]]
    windowed = gpu._get_work_plan(batch, window=100, max_short=4, short_keys=64, long_tokens=42)
    # Keys from 28, 29 and 401 on: of 128, 129 and 502 keys, the first 0, 0 and 6 tiles are outside the window.
    assert windowed[0].tolist() == [0, 2, 2, 5, 7]


def test_eight_bit_cache():
    queries, cache, batch = make_batch(RAGGED_SPANS["mixed"], heads=(4, 2), cache_dtype=torch.float8_e4m3fn)
    _check(queries, cache, batch)
