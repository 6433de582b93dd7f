# SPDX-License-Identifier: Apache-2.0
"""Placement of adapters in pages, compared with a search of all placements."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.lora.device_slots import DeviceAdapterSlots
from quire_engine.lora.peft.adapter import HostAdapter
from quire_engine.lora.slot_pages import choose_victims, find_pages
from quire_kernels import LoRASlots, LoRATarget
from quire_spec.errors import InvalidArgument

NUM_PAGES = 24
RANGES = st.lists(
    st.tuples(st.integers(0, NUM_PAGES), st.integers(0, NUM_PAGES)).map(lambda ends: range(min(ends), max(ends))),
    max_size=6,
)
"""Ranges of pages, also overlapping ones, as of a reservation and of the adapters that it drains."""


def free_pages(taken: list[range]) -> set[int]:
    return set(range(NUM_PAGES)).difference(*taken)


@given(taken=RANGES, needed=st.integers(1, NUM_PAGES))
def test_pages_are_the_beginning_of_the_smallest_gap_that_is_large_enough(taken: list[range], needed: int):
    free = free_pages(taken)
    starts = [p for p in range(NUM_PAGES - needed + 1) if free.issuperset(range(p, p + needed))]
    found = find_pages(taken, NUM_PAGES, needed)
    assert (found is None) == (not starts)
    if found is not None:
        assert len(found) == needed and found.start in starts and found.start - 1 not in free

        def gap(start: int) -> int:
            return next(p for p in range(start, NUM_PAGES + 1) if p not in free) - start

        begins = [p for p in starts if p - 1 not in free]
        assert (gap(found.start), found.start) == min((gap(p), p) for p in begins)


@given(taken=RANGES, needed=st.integers(1, NUM_PAGES), data=st.data())
def test_victims_are_enough_and_none_of_them_could_stay(taken: list[range], needed: int, data: st.DataObject):
    """The last used victim is as old as possible, and no smaller set of victims is enough."""
    adapters = [pages for i, pages in enumerate(taken) if not any(set(pages) & set(other) for other in taken[:i])]
    order = data.draw(st.permutations(range(len(adapters))))
    order = order[: data.draw(st.integers(0, len(order)))]

    def is_enough(victims) -> bool:
        kept = [pages for i, pages in enumerate(adapters) if i not in victims]
        return find_pages(kept, NUM_PAGES, needed) is not None

    victims = choose_victims(order, is_enough)
    enough = [set(some) for n in range(len(order) + 1) for some in combinations(order, n) if is_enough(some)]
    assert (victims is None) == (not enough)
    if victims is not None:
        assert set(victims) in enough and not any(some < set(victims) for some in enough)
        youngest = min(max(map(order.index, some), default=-1) for some in enough)
        assert max(map(order.index, victims), default=-1) == youngest


def test_nothing_is_needed_for_an_adapter_without_pages():
    assert find_pages([range(NUM_PAGES)], NUM_PAGES, 0) == range(NUM_PAGES, NUM_PAGES)
    assert choose_victims([], lambda victims: True) == []


def test_an_adapter_that_needs_more_pages_than_there_are_is_refused():
    """Its LoRA rank fits, but its magnitudes take a page more."""
    slots = LoRASlots([LoRATarget(64, (64,))], 2, 4, torch.empty(0), num_pages=4)
    device_slots = DeviceAdapterSlots([[(0, "q_proj")]], slots, torch.device("cpu"))
    pairs = {(0, "q_proj"): (torch.randn(4, 64), torch.randn(64, 4))}
    assert device_slots.count_pages(device_slots.pack(HostAdapter(4, pairs))) == 4
    error = "needs 5 pages of LoRA rank with its magnitudes, biases and norms, and all slots have 4; raise max_loaded"
    with pytest.raises(InvalidArgument, match=error):
        device_slots.pack(HostAdapter(4, pairs, {(0, "q_proj"): torch.randn(2, 64)}))
