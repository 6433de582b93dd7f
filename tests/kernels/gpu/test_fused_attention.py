# SPDX-License-Identifier: Apache-2.0
"""Long prompts in PyTorch's fused attention and the rest in the interpreted kernel: the result equals the reference."""

import pytest
import torch
from support.attention_batches import make_batch
from support.requirements_of_machine import interpreted_kernel, requires_interpreter
from torch.nn.attention import SDPBackend

from quire_kernels import dispatch, paged_attention, prefill_attention, select_prefill_attention
from quire_kernels.gpu import fused_attention

pytestmark = requires_interpreter

SCALE = 0.15
MIXES = {
    "prompts alone": [(0, 33), (0, 40)],
    "beside decodes": [(40, 1), (0, 33), (41, 1), (300, 1)],
    "beside chunks and short prompts": [(0, 64), (16, 40), (0, 20), (5, 1), (0, 1), (0, 33)],
    "none that is long": [(40, 1), (0, 31), (16, 40)],
}


@pytest.fixture(autouse=True)
def short_prompts_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(42)
    monkeypatch.setattr(fused_attention, "MIN_TOKENS", 32)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the prompts that the fused attention computes, in order."""
    found: list[int] = []
    attend_itself = fused_attention._prefill_with_sdpa

    def noted(queries, cache, batch, opening, scale):
        found.append(opening.length)
        return attend_itself(queries, cache, batch, opening, scale)

    monkeypatch.setattr(fused_attention, "_prefill_with_sdpa", noted)
    return found


def _check(queries, cache, batch, tolerance=3e-6, **options):
    found = paged_attention.get("cuda", "fused")(queries, cache, batch, SCALE, **options)
    expected = paged_attention.reference(queries, cache, batch, SCALE, **options)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float16, 3e-3)], ids=str)
@pytest.mark.parametrize("spans", MIXES.values(), ids=MIXES.keys())
def test_equals_reference(spans, dtype, tolerance, alone):
    _check(*make_batch(spans, heads=(4, 2), dtype=dtype), tolerance)
    assert alone == [length for start, length in spans if start == 0 and length >= 32]


@pytest.mark.parametrize("block_size", [8, 128])
@pytest.mark.parametrize("length", [33, 64, 127])
def test_rounded_lengths(length, block_size, alone):
    _check(*make_batch([(0, length), (7, 1)], heads=(4, 2), block_size=block_size))
    assert alone == [length]


def test_memory_past_the_context_is_not_read(alone):
    queries, cache, batch = make_batch([(0, 33), (0, 64)], heads=(4, 2))
    cache[:, batch.block_tables[0, 2], 1:] = float("nan")
    _check(queries, cache, batch)
    assert alone == [33, 64]


def test_an_eight_bit_cache(alone):
    spans = MIXES["beside decodes"]
    _check(*make_batch(spans, heads=(4, 2), cache_dtype=torch.float8_e4m3fn))
    assert alone == [33]


def test_window_wider_than_the_prompts(alone):
    _check(*make_batch(MIXES["beside decodes"], heads=(4, 2)), window=33)
    assert alone == [33]


@pytest.mark.parametrize("options", [{"window": 20}, {"softcap": 2.0}], ids=str)
def test_unsupported_options_use_the_triton_kernel(options, alone):
    _check(*make_batch(MIXES["prompts alone"], heads=(4, 2)), **options)
    assert not alone


def test_triton_kernel_skips_long_prompts():
    """The Triton kernel is launched only for decoding spans if the fused attention computes the others."""
    queries, cache, batch = make_batch([(40, 1), (0, 33)], heads=(4, 2))
    apart = fused_attention.replace(batch, separate_prefill_min_tokens=32)
    assert (batch.max_query_len, apart.max_query_len) == (33, 1)
    queries[1:] = float("nan")
    found = interpreted_kernel(paged_attention)(queries, cache, apart, SCALE)
    expected = paged_attention.reference(queries, cache, batch, SCALE)
    torch.testing.assert_close(found[:1], expected[:1], rtol=3e-6, atol=3e-6)


def test_few_distinct_lengths():
    planned = {fused_attention.planned_length(length) for length in range(1025, 8193)}
    assert len(planned) == 24
    assert all(0 <= fused_attention.planned_length(n) - n <= n / 8 for n in range(1024, 8193))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU in place of a GPU of compute capability 9.0, without implementations that earlier tests selected."""
    monkeypatch.setattr(prefill_attention, "_is_preferred_on", lambda device: True)
    monkeypatch.setattr(paged_attention, "dispatch_table", {})
    monkeypatch.setattr(paged_attention, "_preferred", {})
    monkeypatch.setattr(dispatch, "overrides", dict)
    monkeypatch.setattr(fused_attention, "BACKENDS", (SDPBackend.MATH,))
    # The CPU's dispatch table gets the implementation of a GPU.
    monkeypatch.setitem(paged_attention._registry, "cpu", paged_attention._registry["cuda"])


def _select(max_tokens: int) -> str:
    select_prefill_attention((4, 2, 16), torch.float32, torch.device("cpu"), max_tokens)
    return paged_attention.preferred("cpu")


def test_long_prompts_are_preferred_after_a_rehearsal_of_all_their_lengths(hopper, monkeypatch):
    rehearsed, compute = [], fused_attention._causal_sdpa

    def recording_sdpa(q, keys, values, scale, backends):
        rehearsed.append((q.shape[0], keys.stride(), q.stride()))
        return compute(q, keys, values, scale, backends)

    monkeypatch.setattr(fused_attention, "_causal_sdpa", recording_sdpa)
    assert _select(31) == "own"
    assert _select(97) == "fused"
    known = set(rehearsed)
    assert len(known) == len(rehearsed)
    for length in (32, 33, 64, 95, 97):
        queries, cache, batch = make_batch([(0, length), (7, 1)], heads=(4, 2), head_dim=16)
        wide = torch.zeros(len(queries), 8, 16)
        wide[:, :4] = queries
        _check(wide[:, :4], cache, batch)
    assert set(rehearsed) == known


@pytest.mark.parametrize("error", [RuntimeError("No available kernel"), torch.OutOfMemoryError("out of memory")])
def test_without_cudnn_the_triton_kernel_computes_prompts(hopper, monkeypatch, caplog, error):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(fused_attention, "_causal_sdpa", fail)
    assert _select(64) == "own"
    assert f"using paged_attention=own: {error}" in caplog.text


def test_an_override_keeps_the_triton_kernel(hopper, monkeypatch):
    monkeypatch.setattr(dispatch, "overrides", lambda: {"paged_attention": "own"})
    assert _select(64) == "own"
