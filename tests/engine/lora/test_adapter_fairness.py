# SPDX-License-Identifier: Apache-2.0
"""No adapter waits longer than the bound of slot_table, for any load of other adapters. The clock is simulated."""

import math
import random
from collections import defaultdict, deque
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire_engine.lora.adapter_info import AdapterInfo
from quire_engine.lora.registry import AdapterRegistry
from quire_engine.lora.slot_table import RESERVE_AFTER_S

STEP_S = 0.05
LOAD_S = 0.2
READ_S = 0.3
LONGEST_S = 2.0


class Traffic:
    """Runs sequences with a registry as a scheduler does, with unlimited KV blocks and batch size."""

    def __init__(
        self, rng: random.Random, num_adapters: int, num_slots: int, num_extra_copies: int, num_pages: int = 0
    ) -> None:
        """With `num_pages`, each adapter needs a random number of them."""
        self.rng = rng
        self.registry = AdapterRegistry(num_slots, num_slots + num_extra_copies, num_pages=num_pages)
        self.infos = {
            f"d{i}": AdapterInfo(num_pages=rng.choice([1, 4, 8, num_pages]) if num_pages else 0)
            for i in range(num_adapters)
        }
        self.names = list(self.infos)
        for name in self.names:
            self.registry.add(name, Path(name), False, self.infos[name])
        self.now = 0.0
        self.waiting: deque[tuple[str, float]] = deque()
        """(name, arrival time) in order of arrival."""
        self.ends: defaultdict[str, list[float]] = defaultdict(list)
        self.due: list[tuple[float, object]] = []
        self.longest_wait = 0.0

    def arrive(self, name: str) -> None:
        self.registry.add_sequence(name)
        self.waiting.append((name, self.now))

    def step(self) -> None:
        """Call the registry as one step of an engine does."""
        self.now += STEP_S
        for name, ends in self.ends.items():
            for end in [end for end in ends if end <= self.now]:
                ends.remove(end)
                self.registry.on_stop(name)
                self.registry.remove_sequence(name)
        for due_time, task in [entry for entry in self.due if entry[0] <= self.now]:
            self.due.remove((due_time, task))
            if isinstance(task, str):
                self.registry.add(task, Path(task), None, self.infos[task])
            else:
                self.registry.slot_table.on_loaded(task)  # type: ignore[arg-type]
        # Before the step, as in the engine loop: a finished sequence may allow the eviction of a copy.
        self.due += [(self.now + READ_S, name) for name, _ in self.registry.pop_reads()]
        self.registry.begin_step(self.now)
        for name, since in list(self.waiting):
            if self.registry.can_run(name, self.now, is_new=True):
                self.registry.on_start(name)
                self.waiting.remove((name, since))
                self.ends[name].append(self.now + self.rng.choice([0.1, 0.5, LONGEST_S]))
                self.longest_wait = max(self.longest_wait, self.now - since)
        self.due += [(self.now + LOAD_S, load) for load in self.registry.slot_table.pop_loads()]


def bound(num_adapters: int, num_slots: int) -> float:
    """Return the maximum wait in seconds: RESERVE_AFTER_S, then the drains for earlier adapters and its own.

    One more drain, if its own slot was evicted for one of them.
    """
    drain = LONGEST_S + LOAD_S + READ_S + 3 * STEP_S
    return RESERVE_AFTER_S + (math.ceil(num_adapters / max(1, num_slots // 2)) + 1) * drain


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    num_slots=st.integers(1, 6),
    num_adapters=st.integers(2, 24),
    num_extra_copies=st.integers(0, 30),
    skew=st.sampled_from([0.0, 1.0, 3.0]),
)
# Slots were reserved in another order than host copies were granted: 57 s, where the bound is 41 s.
@example(seed=168095560, num_slots=1, num_adapters=14, num_extra_copies=0, skew=0.0)
def test_wait_for_a_slot_is_bounded(seed: int, num_slots: int, num_adapters: int, num_extra_copies: int, skew: float):
    check_waits(Traffic(random.Random(seed), num_adapters, num_slots, num_extra_copies), skew, num_slots)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    num_slots=st.integers(1, 12),
    num_adapters=st.integers(2, 24),
    num_extra_copies=st.integers(0, 30),
    num_pages=st.integers(8, 48),
    skew=st.sampled_from([0.0, 1.0, 3.0]),
)
def test_wait_for_pages_is_bounded(
    seed: int, num_slots: int, num_adapters: int, num_extra_copies: int, num_pages: int, skew: float
):
    """Some adapters need all pages, and drain all others. Pages for at least one adapter can be reserved at a time."""
    rng = random.Random(seed)
    check_waits(Traffic(rng, num_adapters, num_slots, num_extra_copies, num_pages), skew, num_slots=1)


def check_waits(traffic: Traffic, skew: float, num_slots: int) -> None:
    """Check the longest wait of a random load."""
    rng, num_adapters = traffic.rng, len(traffic.names)
    weights = [1 / (i + 1) ** skew for i in range(num_adapters)]
    for _ in range(600):
        for name in rng.choices(traffic.names, weights, k=rng.choice([0, 1, 2])):
            # At most three waiting sequences per adapter, so that adapters compete and not sequences of one adapter.
            if sum(other == name for other, _ in traffic.waiting) < 3:
                traffic.arrive(name)
        traffic.step()
    for _ in range(math.ceil(bound(num_adapters, num_slots) / STEP_S) + 1):
        traffic.step()
    assert not traffic.waiting, "a sequence waited longer than the bound"
    assert traffic.longest_wait <= bound(num_adapters, num_slots)
