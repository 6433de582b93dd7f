# SPDX-License-Identifier: Apache-2.0
"""LoRA deltas of mixed batches equal the product computed token by token, for every implementation."""

import pytest
import torch
from support.requirements_of_machine import requires_native_kernels

from quire_kernels import (
    AdapterSegment,
    LoRASlots,
    LoRATarget,
    adapted_linear,
    add_lora,
    add_lora_embedding,
    build_lora_batch,
    cpu_native,
    linear,
    lora_slots,
    pack_weight,
    quantize_weight,
)

CPU = torch.device("cpu")
NUM_SLOTS, MAX_RANK = 5, 24
RANKS = [(16, 16, 16), (1, 1, 1), (7, 0, 3), (0, 0, 0), (24, 17, 2)]
SITES = {
    "compiled": LoRATarget(20, (64, 32, 32)),
    "too narrow to be compiled": LoRATarget(20, (12, 4, 4)),
    "odd": LoRATarget(21, (64, 32, 32)),
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(42)


@pytest.fixture(autouse=True)
def no_amx(monkeypatch):
    """Use panels also on processors where oneDNN's GEMM is faster."""
    monkeypatch.setattr(cpu_native, "has_fast_gemm", lambda: True)


def _slots(site, dtype, ranks=RANKS):
    """Return filled slots of one module, which contained other adapters before, and each slot's dense delta.

    There are only as many pages as the adapters need, and the order of the pages is not that of the slots.
    """
    num_pages = sum(max(own) + max(own) % 2 for own in ranks)
    slots = LoRASlots([LoRATarget(6, (32,)), site], NUM_SLOTS, MAX_RANK, torch.empty(0, dtype=dtype), num_pages)
    deltas = torch.zeros(NUM_SLOTS, sum(site.widths), site.in_features, dtype=torch.float64)
    for slot in range(len(ranks)):
        before = [(torch.randn(MAX_RANK, site.in_features), torch.randn(w, MAX_RANK)) for w in site.widths]
        slots.write(slot, slots.pack([[None], before]), slot)
    first_page = 0
    for slot, own in reversed(list(enumerate(ranks))):
        pairs = [
            (torch.randn(rank, site.in_features).to(dtype) / 4, torch.randn(width, rank).to(dtype) / 4)
            for rank, width in zip(own, site.widths, strict=True)
        ]
        packed = slots.pack([[None], [pair if pair[0].shape[0] else None for pair in pairs]])
        assert slots.count_pages(packed) <= max(own) + max(own) % 2
        slots.write(slot, packed, first_page)
        first_page += slots.count_pages(packed)
        deltas[slot] = torch.cat([b.double() @ a.double() for a, b in pairs])
    return slots.modules[1], deltas


SEGMENTS = {
    "one slot, all tokens": (9, [AdapterSegment(2, 0, 9)]),
    "base tokens first": (9, [AdapterSegment(0, 3, 5), AdapterSegment(1, 5, 6), AdapterSegment(3, 6, 9)]),
    "one token": (9, [AdapterSegment(1, 4, 5)]),
    "every slot, across tiles": (61, [AdapterSegment(s, 5 + 11 * s, 16 + 11 * s) for s in (0, 1, 2, 3, 4)]),
    "prompts": (530, [AdapterSegment(0, 17, 260), AdapterSegment(4, 260, 530)]),
    "one token in all": (1, [AdapterSegment(4, 0, 1)]),
}


def _wanted(base, x, deltas, segments):
    expected = base.double().clone()
    for s in segments:
        for token in range(s.start, s.end):
            expected[token] += deltas[s.adapter_slot] @ x[token].double()
    return expected


# bf16 rounds A x, then the sum: two roundings of 2^-9 of values up to 16.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-2}


@pytest.mark.parametrize(("num_tokens", "segments"), SEGMENTS.values(), ids=SEGMENTS.keys())
@pytest.mark.parametrize("site", SITES.values(), ids=SITES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_deltas(num_tokens, segments, site, dtype, threads):
    torch.set_num_threads(threads)
    adapters, deltas = _slots(site, dtype)
    batch = build_lora_batch(segments, num_tokens, CPU)
    x, base = torch.randn(num_tokens, site.in_features).to(dtype), torch.randn(num_tokens, sum(site.widths)).to(dtype)
    expected, tolerance = _wanted(base, x, deltas, segments), TOLERANCE[dtype]
    for form in (add_lora, add_lora.reference):
        out = base.clone()
        form(out, x, adapters, batch)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.set_num_threads(1)


@pytest.mark.parametrize(("num_tokens", "segments"), SEGMENTS.values(), ids=SEGMENTS.keys())
@pytest.mark.parametrize("site", SITES.values(), ids=SITES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_and_deltas_together(num_tokens, segments, site, dtype):
    adapters, deltas = _slots(site, dtype)
    batch = build_lora_batch(segments, num_tokens, CPU)
    width = sum(site.widths)
    x, weight = (
        torch.randn(num_tokens, site.in_features).to(dtype),
        (torch.randn(width, site.in_features) / 4).to(dtype),
    )
    bias, residual = torch.randn(width).to(dtype), torch.randn(num_tokens, width).to(dtype)
    base = x.double() @ weight.double().t() + bias.double()
    tolerance = TOLERANCE[dtype]
    for w in (weight, pack_weight(weight)):
        out = adapted_linear(x, w, bias, None, adapters, batch)
        wanted = _wanted(base, x, deltas, segments)
        torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)
        stream = residual.clone()
        assert adapted_linear(x, w, bias, stream, adapters, batch) is stream
        torch.testing.assert_close(stream.double(), wanted + residual.double(), rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize(("num_tokens", "segments"), SEGMENTS.values(), ids=SEGMENTS.keys())
@pytest.mark.parametrize("site", SITES.values(), ids=SITES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_transform_the_base_product(num_tokens, segments, site, dtype):
    """Tokens without an adapter have the same bits as in a batch without adapters."""
    width, d_in = sum(site.widths), site.in_features
    slots = LoRASlots([LoRATarget(6, (32,)), site], NUM_SLOTS, MAX_RANK, torch.empty(0, dtype=dtype))
    deltas = torch.zeros(NUM_SLOTS, width, d_in).double()
    scales, addends = torch.zeros(2, NUM_SLOTS, width).double()
    for slot in range(NUM_SLOTS):
        pairs = [(torch.randn(3, d_in).to(dtype) / 4, torch.randn(w, 3).to(dtype) / 4) for w in site.widths]
        transforms = [None if i == 1 or slot == 1 else torch.randn(2, w).to(dtype) for i, w in enumerate(site.widths)]
        slots.write(slot, slots.pack([[None], pairs], [[None], transforms]))
        deltas[slot] = torch.cat([b.double() @ a.double() for a, b in pairs])
        rows = [torch.zeros(2, w) if t is None else t for t, w in zip(transforms, site.widths, strict=True)]
        scales[slot], addends[slot] = torch.cat([t.double() for t in rows], dim=1)
    adapters, batch = slots.modules[1], build_lora_batch(segments, num_tokens, CPU)
    assert adapters.transformed_slots == {0, 2, 3, 4}
    x, weight = torch.randn(num_tokens, d_in).to(dtype), (torch.randn(width, d_in) / 4).to(dtype)
    bias, residual = torch.randn(width).to(dtype), torch.randn(num_tokens, width).to(dtype)
    product = x.double() @ weight.double().t()
    for s in segments:
        product[s.start : s.end] += product[s.start : s.end] * scales[s.adapter_slot] + addends[s.adapter_slot]
    wanted = _wanted(product + bias.double(), x, deltas, segments)
    without = LoRASlots([site], NUM_SLOTS, MAX_RANK, torch.empty(0, dtype=dtype)).modules[0]
    for w in (weight, pack_weight(weight)):
        out = adapted_linear(x, w, bias, None, adapters, batch)
        torch.testing.assert_close(out.double(), wanted, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])
        base = adapted_linear(x, w, bias, None, without, build_lora_batch([], num_tokens, CPU))
        assert torch.equal(out[batch.adapter_slots < 0], base[batch.adapter_slots < 0])
        stream = residual.clone()
        assert adapted_linear(x, w, bias, stream, adapters, batch) is stream
        torch.testing.assert_close(
            stream.double(), wanted + residual.double(), rtol=TOLERANCE[dtype], atol=3 * TOLERANCE[dtype]
        )


@requires_native_kernels
@pytest.mark.parametrize("quantization", ["int8", "int8_weight_only", "int4", "fp8"])
@pytest.mark.parametrize("num_tokens", [1, 9, 61, 250])
def test_adapters_transform_the_product_of_a_quantized_weight(num_tokens, quantization):
    """The compiled kernels transform the unrounded product of each row. All other rows keep their bits."""
    site = LoRATarget(128, (64, 32, 32))
    slots = LoRASlots([LoRATarget(32, (32,)), site], 3, 16, torch.empty(0, dtype=torch.bfloat16))
    transforms = [[torch.randn(2, w) for w in site.widths], None, [None, torch.randn(2, 32), None]]
    for slot, each in enumerate(transforms):
        pair = torch.randn(4, 32), torch.randn(32, 4)
        slots.write(slot, slots.pack([[pair], [None] * 3], each and [[None], each]))
    weight = quantize_weight((torch.randn(128, 128) / 8).bfloat16(), quantization)
    x, bias = torch.randn(num_tokens, 128).bfloat16(), torch.randn(128).bfloat16()
    residual, of_rows = torch.randn(num_tokens, 128).bfloat16(), torch.randint(-1, 3, (num_tokens,)).tolist()
    of_rows[0] = 0
    segments = [AdapterSegment(slot, i, i + 1) for i, slot in enumerate(of_rows) if slot >= 0]
    adapters, batch = slots.modules[1], build_lora_batch(segments, num_tokens, CPU)
    scales, addends = torch.zeros(2, num_tokens, 128)
    for i, slot in enumerate(of_rows):
        rows = [torch.zeros(2, w) if t is None else t.bfloat16() for t, w in
                zip((slot >= 0 and transforms[slot]) or [None] * 3, site.widths, strict=True)]  # fmt: skip
        scales[i], addends[i] = torch.cat(rows, dim=1)
    product = linear(x, weight, None).float()
    for base in (None, residual):
        expected = product * (1 + scales) + addends + bias + (0 if base is None else base)
        out = adapted_linear(x, weight, bias, None if base is None else base.clone(), adapters, batch)
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
        same = linear(x, weight, bias, None if base is None else base.clone())
        kept = [i for i, slot in enumerate(of_rows) if slot in (-1, 1)]
        assert torch.equal(out[kept], same[kept]) and not torch.equal(out, same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_result_of_a_token_does_not_depend_on_its_neighbours(dtype):
    site = SITES["compiled"]
    adapters, _ = _slots(site, dtype)
    weight = pack_weight(torch.randn(128, 20).to(dtype))
    x = torch.randn(40, 20).to(dtype)
    segments = [AdapterSegment(0, 9, 20), AdapterSegment(4, 20, 33), AdapterSegment(1, 33, 40)]
    together = adapted_linear(x, weight, None, None, adapters, build_lora_batch(segments, 40, CPU))
    for s in segments:
        own = x[s.start : s.end]
        batch = build_lora_batch([AdapterSegment(s.adapter_slot, 0, len(own))], len(own), CPU)
        alone = adapted_linear(own, weight, None, None, adapters, batch)
        if dtype == torch.bfloat16 and adapters.is_panel_packed:
            assert torch.equal(alone, together[s.start : s.end])
        else:
            torch.testing.assert_close(alone, together[s.start : s.end], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_an_embedding(dtype):
    site = LoRATarget(50, (32,), is_embedding=True)
    adapters, deltas = _slots(site, dtype, [(16,), (1,), (0,), (7,), (24,)])
    segments = [AdapterSegment(0, 3, 5), AdapterSegment(2, 5, 6), AdapterSegment(4, 6, 9)]
    ids, base = torch.randint(50, (9,)), torch.randn(9, 32).to(dtype)
    expected = base.double().clone()
    for s in segments:
        expected[s.start : s.end] += deltas[s.adapter_slot].T[ids[s.start : s.end]]
    for form in (add_lora_embedding, add_lora_embedding.reference):
        out = base.clone()
        form(out, ids, adapters, build_lora_batch(segments, 9, CPU))
        torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_pinned_chunks_equal_the_adapter(monkeypatch):
    """All chunks except the last have a size that torch does not round up."""
    monkeypatch.setattr(lora_slots, "PINNED_BYTES", 256)
    # Without a GPU, memory cannot be pinned.
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    site = SITES["odd"]
    slots = LoRASlots([site], 2, MAX_RANK, torch.empty(0))
    packed = slots.pack([[(torch.randn(3, site.in_features), torch.randn(width, 3)) for width in site.widths]])
    pinned = packed.pin_memory()
    *sizes, last = (part.nbytes for part in pinned.chunks)
    assert len(sizes) > 1 and set(sizes) == {256} and 0 < last <= 256
    assert pinned.num_bytes == packed.num_bytes
    for slot, adapter in enumerate((packed, pinned)):
        slots.write(slot, adapter)
    num = packed.chunks[0].numel()
    first, second = slots._pages.view(2, -1)
    assert torch.equal(first[:num], second[:num])
    offsets = torch.tensor([len(first), len(first), 0, 0])
    assert torch.equal(slots._entries[:, 0] + offsets, slots._entries[:, 1])


@requires_native_kernels
def test_compiled_kernels_run():
    assert _slots(SITES["compiled"], torch.bfloat16)[0].is_panel_packed
    assert not _slots(SITES["odd"], torch.bfloat16)[0].is_panel_packed
