# SPDX-License-Identifier: Apache-2.0
"""Routing and LoRA deltas in interpreted Triton: they equal their references on sizes that do not fill a tile, with
tokens in any order."""

import dataclasses

import pytest
import torch
from support.requirements_of_machine import interpreted_kernel, requires_interpreter

from quire_kernels import (
    AdapterSegment,
    LoRASlots,
    LoRATarget,
    TokenRouting,
    add_lora,
    add_lora_embedding,
    build_lora_batch,
    lora,
    route_tokens,
)
from quire_kernels.lora import LoRABatch

pytestmark = requires_interpreter

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 8e-3}
SITES = {
    "q, k and v": (LoRATarget(40, (70, 33, 33)), [(16, 16, 16), (1, 0, 7), (0, 0, 0), (24, 17, 2)]),
    "one slice, several planes": (LoRATarget(1100, (135,)), [(16,), (3,), (0,), (24,)]),
    "gate and up": (LoRATarget(64, (64, 64)), [(8, 8), (5, 24), (0, 2), (16, 0)]),
    "the largest and the smallest rank": (LoRATarget(64, (40,)), [(512,), (1,), (320,), (16,)]),
    "ranks above what is multiplied at once": (LoRATarget(64, (40,)), [(70,), (64,), (130,), (16,)]),
}
SLOTS = torch.tensor([-1] * 3 + [0] * 9 + [1] + [2] * 2 + [3] * 20)


def _shuffled():
    """Return tokens of all slots, in any order."""
    return SLOTS[torch.randperm(len(SLOTS))]


def _batch(slots):
    """Build a batch as on a GPU: the host does not know the slots."""
    routing = TokenRouting.empty(len(slots), 4, CPU)
    interpreted_kernel(route_tokens)(slots, routing)
    return LoRABatch(slots, routing=routing)


def _filled(sites, index, ranks, dtype):
    max_rank = max(24, *map(max, ranks))
    slots = LoRASlots(sites, 4, max_rank, torch.empty(0, dtype=dtype))
    site, last_page = sites[index], slots.num_pages
    for slot, each in enumerate(ranks):
        pairs = [[None] for _ in sites]
        pairs[index] = [
            (torch.randn(r, site.in_features) / site.in_features**0.5, torch.randn(w, r) / 4) if r else None
            for r, w in zip(each, site.widths, strict=True)
        ]
        packed = slots.pack(pairs)
        last_page -= slots.count_pages(packed)
        slots.write(slot, packed, last_page)
    return slots.modules[index]


@pytest.mark.parametrize(("num_tokens", "num_slots"), [(1, 1), (1, 4), (16, 1), (17, 4), (300, 4), (1100, 70)])
def test_routing(num_tokens, num_slots):
    """More tokens and slots than one iteration of a program; slots without tokens; tokens without a slot."""
    slots = torch.randint(-1, num_slots, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
    slots[slots == 2] = -1
    found, expected = (TokenRouting.empty(num_tokens, num_slots, CPU) for _ in range(2))
    for routing in (found, expected):
        routing.tile_slots.fill_(-7)
        routing.tile_rows.fill_(-7)
    interpreted_kernel(route_tokens)(slots, found)
    route_tokens.reference(slots, expected)
    used = expected.tile_slots >= 0
    assert torch.equal(found.slot_counts, expected.slot_counts)
    assert torch.equal(found.tile_slots, expected.tile_slots)
    assert torch.equal(found.tile_rows[used], expected.tile_rows[used])
    # The reference, token by token.
    wanted = {slot: (slots == slot).nonzero()[:, 0].tolist() for slot in range(num_slots)}
    for slot, tokens in wanted.items():
        rows = expected.tile_rows[expected.tile_slots == slot].flatten()
        assert rows.tolist() == tokens + [-1] * (-len(tokens) % 16)
    assert expected.tile_slots[used].tolist() == sorted(expected.tile_slots[used].tolist())


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("site", "ranks"), SITES.values(), ids=SITES.keys())
def test_deltas(site, ranks, dtype):
    torch.manual_seed(42)
    module, slots = _filled([LoRATarget(6, (3,)), site], 1, ranks, dtype), _shuffled()
    batch, num_tokens = _batch(slots), len(slots)
    x, base = (torch.randn(num_tokens, n).to(dtype) for n in (site.in_features, sum(site.widths)))
    found, expected = base.clone(), base.clone()
    interpreted_kernel(add_lora)(found, x, module, batch)
    add_lora.reference(expected, x, module, batch)
    assert torch.equal(found[slots < 0], base[slots < 0])
    assert not torch.equal(found[slots == 0], base[slots == 0])
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    again = base.clone()
    interpreted_kernel(add_lora)(again, x, module, batch)
    assert torch.equal(again, found)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_rows_of_an_embedding(dtype):
    torch.manual_seed(42)
    module = _filled([LoRATarget(50, (33,), is_embedding=True)], 0, [(16,), (1,), (0,), (24,)], dtype)
    slots = _shuffled()
    ids, base = torch.randint(50, (len(slots),)), torch.randn(len(slots), 33).to(dtype)
    found, expected = base.clone(), base.clone()
    interpreted_kernel(add_lora_embedding)(found, ids, module, _batch(slots))
    add_lora_embedding.reference(expected, ids, module, _batch(slots))
    assert not torch.equal(found, base)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_reference_accepts_tokens_in_any_order():
    """With slots that only the device knows, the result equals that of the same tokens in sorted order."""
    torch.manual_seed(42)
    module = _filled([LoRATarget(40, (70, 33, 33))], 0, SITES["q, k and v"][1], torch.float32)
    segments = [AdapterSegment(s, int((s > SLOTS).sum()), int((s >= SLOTS).sum())) for s in range(4)]
    x, base, order = torch.randn(35, 40), torch.randn(35, 136), torch.randperm(35)
    expected, found = base.clone(), base[order]
    add_lora.reference(expected, x, module, build_lora_batch(segments, 35, CPU))
    add_lora.reference(found, x[order], module, dataclasses.replace(_batch(SLOTS[order]), routing=None))
    torch.testing.assert_close(found, expected[order])


def test_step_planned_for_a_gpu(monkeypatch):
    """The host's part without the copy to the device: tiles for the kernels, segments for other implementations."""
    torch.manual_seed(42)
    monkeypatch.setattr(lora, "to_device_async", lambda tensor, device: tensor)
    empty = TokenRouting.empty
    monkeypatch.setattr(TokenRouting, "empty", lambda num_tokens, num_slots, device: empty(num_tokens, num_slots, CPU))
    monkeypatch.setitem(route_tokens.dispatch_table, "cpu", interpreted_kernel(route_tokens))
    module = _filled([LoRATarget(40, (70, 33, 33))], 0, SITES["q, k and v"][1], torch.float32)
    segments = [AdapterSegment(3, 2, 20), AdapterSegment(0, 20, 22), AdapterSegment(3, 30, 35)]
    batch = build_lora_batch(segments, 35, torch.device("cuda"))
    assert batch.active_slots == {0, 3}
    x, base = torch.randn(35, 40), torch.randn(35, 136)
    found, expected = base.clone(), base.clone()
    interpreted_kernel(add_lora)(found, x, module, batch)
    add_lora.reference(expected, x, module, build_lora_batch(segments, 35, CPU))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found[2:22], base[2:22])
