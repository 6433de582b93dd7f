# SPDX-License-Identifier: Apache-2.0
"""Adapter deltas in the kernel language, interpreted: they equal their reference on sizes that fill no tile."""

import pytest
import torch
from support.interpreter import own

from quire_kernels import LoraSlots, Site, SlotRows, add_lora, plan_adapters

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 8e-3}
SITES = {
    "q, k and v": (Site(40, (70, 33, 33)), [(16, 16, 16), (1, 0, 7), (0, 0, 0), (24, 17, 2)]),
    "one slice, several planes": (Site(1100, (65,)), [(16,), (3,), (0,), (24,)]),
    "gate and up": (Site(64, (64, 64)), [(8, 8), (5, 24), (0, 2), (16, 0)]),
}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("site", "ranks"), SITES.values(), ids=SITES.keys())
def test_deltas(site, ranks, dtype):
    torch.manual_seed(42)
    slots = LoraSlots([Site(6, (3,)), site], 4, 24, torch.empty(0, dtype=dtype))
    for slot, each in enumerate(ranks):
        pairs = [
            (torch.randn(r, site.in_features) / site.in_features**0.5, torch.randn(w, r) / 4) if r else None
            for r, w in zip(each, site.widths, strict=True)
        ]
        slots.write(slot, slots.pack([[None], pairs]))
    segments = [SlotRows(0, 3, 12), SlotRows(1, 12, 13), SlotRows(2, 13, 15), SlotRows(3, 15, 35)]
    batch, module = plan_adapters(segments, 35, CPU), slots.modules[1]
    x, base = torch.randn(35, site.in_features).to(dtype), torch.randn(35, sum(site.widths)).to(dtype)
    found, expected = base.clone(), base.clone()
    own(add_lora)(found, x, module, batch)
    add_lora.reference(expected, x, module, batch)
    assert torch.equal(found[:3], base[:3])
    assert not torch.equal(found[3:], base[3:])
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    again = base.clone()
    own(add_lora)(again, x, module, batch)
    assert torch.equal(again, found)
