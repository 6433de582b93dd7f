# SPDX-License-Identifier: Apache-2.0
"""The adapter registry stays consistent under any order of events."""

from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire_engine.lora.adapter_info import AdapterInfo
from quire_engine.lora.adapter_source import WeightedFolder
from quire_engine.lora.registry import AdapterRegistry
from quire_engine.step.plan import SlotLoad
from quire_spec.errors import InvalidArgument, NotFound

PATH = Path("/adapters")


SIZES = {"a": 10, "b": 10, "c": 4, "d": 1, "e": 7, "f": 2}
"""Bytes in host memory, and pages in slots."""
SUMS = ("c+d", "d+f", "f+c", "d")
"""The last one is an adapter with another weight than 1."""


def size(digest: str) -> int:
    return sum(SIZES[part] for part in digest.removesuffix("*").split("+"))


def info(digest: str) -> AdapterInfo:
    return AdapterInfo(size(digest), size(digest), num_pages=size(digest))


def source(digest: str) -> Path | tuple[WeightedFolder, ...]:
    if digest in SIZES:
        return PATH / digest
    return tuple(WeightedFolder(PATH / part, 0.5) for part in digest.removesuffix("*").split("+"))


class RegistryMachine(RuleBasedStateMachine):
    """Any order of events. The test counts sequences itself, and tracks copies, slots and pages as a runner does."""

    @initialize(
        max_loras=st.integers(1, 4),
        num_extra_copies=st.integers(0, 2),
        spare_bytes=st.none() | st.integers(0, 30),
        num_pages=st.integers(max(SIZES.values()), 4 * max(SIZES.values())),
    )
    def start(self, max_loras: int, num_extra_copies: int, spare_bytes: int | None, num_pages: int) -> None:
        self.host_bytes = None if spare_bytes is None else num_pages + spare_bytes
        self.registry = AdapterRegistry(max_loras, max_loras + num_extra_copies, self.host_bytes, num_pages=num_pages)
        self.page_owners: list[str | None] = [None] * num_pages
        self.first_pages: dict[str, int] = {}
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.reads: list[str] = []
        self.copies: set[str] = set()
        self.slots: dict[int, str] = {}
        self.loading: list[SlotLoad] = []
        self.now = 0.0
        self.reported: dict[str, str] = {}
        """The state of each adapter, from the reported changes."""

    def discard_evicted(self) -> None:
        for digest in self.registry.pop_evicted_copies():
            self.copies.remove(digest)

    @rule(digest=st.sampled_from("abcdef"), pinned=st.booleans())
    def register(self, digest: str, pinned: bool) -> None:
        try:
            keep_copy = self.registry.add(digest, PATH / digest, pinned, info(digest))
        except InvalidArgument:
            assert pinned
            return
        self.discard_evicted()
        self.copies |= {digest} if keep_copy else set()

    @rule(digest=st.sampled_from("abcdef"))
    def remove(self, digest: str) -> None:
        self.registry.remove(digest)
        self.discard_evicted()

    @rule(digest=st.sampled_from("abcdef"))
    def arrive(self, digest: str) -> None:
        is_registered = digest in self.registry.adapter_states()
        try:
            self.registry.add_sequence(digest)
        except NotFound:
            assert not is_registered
        else:
            self.waiting.append(digest)

    @rule(digest=st.sampled_from(SUMS))
    def arrive_with_a_sum(self, digest: str) -> None:
        parts = [(part, 0.5) for part in digest.split("+")]
        are_registered = {part for part, _ in parts} <= self.registry.adapter_states().keys()
        digest = f"{digest}*"
        try:
            self.registry.add_sequence(digest, parts)
        except NotFound:
            assert not are_registered
        else:
            assert are_registered
            self.waiting.append(digest)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.registry.remove_sequence(self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1))))
        self.discard_evicted()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), preempt=st.booleans())
    def stop(self, data: st.DataObject, preempt: bool) -> None:
        digest = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.registry.on_stop(digest)
        if preempt:
            self.waiting.insert(0, digest)
        else:
            self.registry.remove_sequence(digest)
        self.discard_evicted()

    @rule(seconds=st.sampled_from([0.0, 0.4, 2.0]))
    def step(self, seconds: float) -> None:
        self.now += seconds
        self.registry.begin_step(self.now)
        for digest in list(self.waiting):
            if self.registry.can_run(digest, self.now, is_new=True):
                self.registry.on_start(digest)
                self.waiting.remove(digest)
                self.running.append(digest)
        for slot_load in self.registry.slot_table.pop_loads():
            assert slot_load.adapter_digest in self.copies
            # Two concurrent copies into one slot would corrupt it.
            assert slot_load.adapter_slot not in {other.adapter_slot for other in self.loading}
            assert set(self.pages(slot_load)).isdisjoint(page for other in self.loading for page in self.pages(other))
            self.slots.pop(slot_load.adapter_slot, None)
            for page in self.pages(slot_load):
                self.page_owners[page] = None
            self.loading.append(slot_load)
        for digest in self.running:
            assert self.slots[self.registry.get_slot(digest)] == digest
            first = self.first_pages[digest]
            assert self.page_owners[first : first + size(digest)] == [digest] * size(digest)

    def pages(self, slot_load: SlotLoad) -> range:
        return range(slot_load.first_page, slot_load.first_page + size(slot_load.adapter_digest))

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), succeeded=st.booleans())
    def load(self, data: st.DataObject, succeeded: bool) -> None:
        slot_load = self.loading.pop(data.draw(st.integers(0, len(self.loading) - 1)))
        self.fill(slot_load, succeeded)

    def fill(self, slot_load: SlotLoad, succeeded: bool) -> None:
        if succeeded:
            self.slots[slot_load.adapter_slot] = slot_load.adapter_digest
            self.first_pages[slot_load.adapter_digest] = slot_load.first_page
            for page in self.pages(slot_load):
                self.page_owners[page] = slot_load.adapter_digest
        self.registry.slot_table.on_loaded(slot_load, succeeded)

    @rule(read_fails=st.booleans())
    def read(self, read_fails: bool) -> None:
        for digest, path in self.registry.pop_reads():
            self.discard_evicted()
            self.reads.append(digest)
            assert digest not in self.copies and path == source(digest)
        if self.reads:
            digest = self.reads.pop(0)
            if read_fails:
                self.registry.on_read_failed(digest)
                for _ in range(self.waiting.count(digest)):
                    self.waiting.remove(digest)
                    self.registry.remove_sequence(digest)
            elif self.registry.add(digest, source(digest), None, info(digest)):
                self.copies.add(digest)
            self.discard_evicted()

    @invariant()
    def state_is_consistent(self) -> None:
        self.registry.check_integrity(Counter(self.waiting + self.running), Counter(self.running))
        assert self.host_bytes is None or sum(map(size, self.copies)) <= self.host_bytes
        for change in self.registry.pop_changes():
            assert change.pinned == (change.digest in self.registry.slot_table.slot_pinned_adapters)
            # A sum can be registered and unregistered between two calls.
            self.reported[change.digest] = change.state
            if change.state == "removed":
                del self.reported[change.digest]
        assert self.reported == self.registry.adapter_states()
        assert {d for d, state in self.registry.adapter_states().items() if state != "disk"} <= self.copies
        assert set(self.running) == set(self.registry.running_adapters())

    def teardown(self) -> None:
        """Every waiting sequence must run within a few steps."""
        for _ in range(4 * len(self.waiting + self.running) + 4):
            for digest in self.running:
                self.registry.on_stop(digest)
                self.registry.remove_sequence(digest)
            self.running = []
            self.read(read_fails=False)
            while self.loading:
                self.fill(self.loading.pop(), True)
            self.step(1.0)
            self.state_is_consistent()
        assert not self.waiting and not self.running


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=100, stateful_step_count=50)
