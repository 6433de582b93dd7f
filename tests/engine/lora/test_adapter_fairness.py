# SPDX-License-Identifier: Apache-2.0
"""No adapter waits longer than the bound that slots.py states, whatever the others ask for. The clock is simulated."""

import math
import random
from collections import defaultdict, deque
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from quire_engine.lora.registry import AdapterRegistry
from quire_engine.lora.slot_table import RESERVE_AFTER_S

STEP_S = 0.05
LOAD_S = 0.2
READ_S = 0.3
LONGEST_S = 2.0


class Traffic:
    """Sequences of adapters on a registry: as a scheduler runs them, with all the blocks and seats in the world."""

    def __init__(self, draw: random.Random, num_adapters: int, num_slots: int, more_copies: int) -> None:
        self.draw = draw
        self.registry = AdapterRegistry(num_slots, num_slots + more_copies)
        self.names = [f"d{i}" for i in range(num_adapters)]
        for name in self.names:
            self.registry.add(name, Path(name), False)
        self.now = 0.0
        self.waiting: deque[tuple[str, float]] = deque()
        """In order of arrival, as in a line."""
        self.ends: defaultdict[str, list[float]] = defaultdict(list)
        self.due: list[tuple[float, object]] = []
        self.longest_wait = 0.0

    def arrive(self, name: str) -> None:
        self.registry.add_sequence(name)
        self.waiting.append((name, self.now))

    def step(self) -> None:
        """Everything that one step of an engine does with adapters."""
        self.now += STEP_S
        for name, ends in self.ends.items():
            for end in [end for end in ends if end <= self.now]:
                ends.remove(end)
                self.registry.on_stop(name)
                self.registry.remove_sequence(name)
        for when, what in [due for due in self.due if due[0] <= self.now]:
            self.due.remove((when, what))
            if isinstance(what, str):
                self.registry.add(what, Path(what))
            else:
                self.registry.slot_table.on_loaded(what)  # type: ignore[arg-type]
        # Before a step, as the engine's owners do: what has just ended may make room for a copy.
        self.due += [(self.now + READ_S, name) for name, _ in self.registry.pop_reads()]
        self.registry.begin_step(self.now)
        for name, since in list(self.waiting):
            if self.registry.can_run(name, self.now, is_new=True):
                self.registry.on_start(name)
                self.waiting.remove((name, since))
                self.ends[name].append(self.now + self.draw.choice([0.1, 0.5, LONGEST_S]))
                self.longest_wait = max(self.longest_wait, self.now - since)
        self.due += [(self.now + LOAD_S, load) for load in self.registry.slot_table.pop_loads()]


def bound(num_adapters: int, num_slots: int) -> float:
    """Seconds that an adapter waits at most: until it is late, then for the drains of those before it and its own; one
    more if its own slot was taken for one of them."""
    drain = LONGEST_S + LOAD_S + READ_S + 3 * STEP_S
    return RESERVE_AFTER_S + (math.ceil(num_adapters / max(1, num_slots // 2)) + 1) * drain


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    num_slots=st.integers(1, 6),
    num_adapters=st.integers(2, 24),
    more_copies=st.integers(0, 30),
    skew=st.sampled_from([0.0, 1.0, 3.0]),
)
def test_the_wait_for_a_slot_is_bounded(seed: int, num_slots: int, num_adapters: int, more_copies: int, skew: float):
    draw = random.Random(seed)
    traffic = Traffic(draw, num_adapters, num_slots, more_copies)
    weights = [1 / (rank + 1) ** skew for rank in range(num_adapters)]
    for _ in range(600):
        for name in draw.choices(traffic.names, weights, k=draw.choice([0, 1, 2])):
            # A few at a time of each, so that the line is of adapters and not of one adapter's requests.
            if sum(other == name for other, _ in traffic.waiting) < 3:
                traffic.arrive(name)
        traffic.step()
    for _ in range(math.ceil(bound(num_adapters, num_slots) / STEP_S) + 1):
        traffic.step()
    assert not traffic.waiting, "whoever waited when the last request came has been served within the bound"
    assert traffic.longest_wait <= bound(num_adapters, num_slots)


def test_a_rare_adapter_among_busy_ones_waits_for_a_second_and_one_drain():
    traffic = Traffic(random.Random(3), 9, 8, 8)
    waits = []
    for tick in range(2000):
        for name in traffic.names[:8]:
            if not any(other == name for other, _ in traffic.waiting):
                traffic.arrive(name)
        if tick % 200 == 100:
            traffic.arrive("d8")
            arrived = traffic.now
        traffic.step()
        if tick % 200 > 100 and not any(name == "d8" for name, _ in traffic.waiting) and arrived:
            waits.append(traffic.now - arrived)
            arrived = 0.0
    assert len(waits) == 10
    # Eight adapters never leave their slots by themselves; what they would do to a rare one without a reservation.
    assert max(waits) <= RESERVE_AFTER_S + LONGEST_S + LOAD_S + 3 * STEP_S
