# SPDX-License-Identifier: Apache-2.0
"""The registry of adapters under any order of everything."""

from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire_engine.lora.registry import AdapterRegistry
from quire_engine.step.plan import SlotLoad
from quire_spec.errors import InvalidArgument, NotFound

PATH = Path("/adapters")


SIZES = {"a": 10, "b": 10, "c": 4, "d": 1, "e": 7, "f": 2}


class RegistryMachine(RuleBasedStateMachine):
    """Any order of everything; sequences are counted beside the registry, copies and slots as a runner has them."""

    @initialize(max_loras=st.integers(1, 3), more=st.integers(0, 2), spare=st.none() | st.integers(0, 30))
    def start(self, max_loras: int, more: int, spare: int | None) -> None:
        self.host_bytes = None if spare is None else max_loras * max(SIZES.values()) + spare
        self.adapters = AdapterRegistry(max_loras, max_loras + more, self.host_bytes)
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.asked: list[str] = []
        self.copies: set[str] = set()
        self.slots: dict[int, str] = {}
        self.loading: list[SlotLoad] = []
        self.now = 0.0

    def drop(self) -> None:
        for digest in self.adapters.pop_evicted_copies():
            self.copies.remove(digest)

    @rule(digest=st.sampled_from("abcdef"), pinned=st.booleans())
    def register(self, digest: str, pinned: bool) -> None:
        try:
            kept = self.adapters.add(digest, PATH / digest, pinned, SIZES[digest])
        except InvalidArgument:
            assert pinned
            return
        self.drop()
        self.copies |= {digest} if kept else set()

    @rule(digest=st.sampled_from("abcdef"))
    def remove(self, digest: str) -> None:
        self.adapters.remove(digest)
        self.drop()

    @rule(digest=st.sampled_from("abcdef"))
    def arrive(self, digest: str) -> None:
        known = digest in self.adapters.adapter_states()
        try:
            self.adapters.add_sequence(digest)
        except NotFound:
            assert not known
        else:
            self.waiting.append(digest)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.adapters.remove_sequence(self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1))))
        self.drop()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), preempt=st.booleans())
    def stop(self, data: st.DataObject, preempt: bool) -> None:
        digest = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.adapters.on_stop(digest)
        if preempt:
            self.waiting.insert(0, digest)
        else:
            self.adapters.remove_sequence(digest)
        self.drop()

    @rule(seconds=st.sampled_from([0.0, 0.4, 2.0]))
    def step(self, seconds: float) -> None:
        self.now += seconds
        self.adapters.begin_step(self.now)
        for digest in list(self.waiting):
            if self.adapters.can_run(digest, self.now, is_new=True):
                self.adapters.on_start(digest)
                self.waiting.remove(digest)
                self.running.append(digest)
        for load in self.adapters.slot_table.pop_loads():
            assert load.adapter_digest in self.copies
            # Two copies into one slot would mix.
            assert load.adapter_slot not in {other.adapter_slot for other in self.loading}
            self.slots.pop(load.adapter_slot, None)
            self.loading.append(load)
        for digest in self.running:
            assert self.slots[self.adapters.get_slot(digest)] == digest

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), done=st.booleans())
    def load(self, data: st.DataObject, done: bool) -> None:
        load = self.loading.pop(data.draw(st.integers(0, len(self.loading) - 1)))
        self.fill(load, done)

    def fill(self, load: SlotLoad, done: bool) -> None:
        if done:
            self.slots[load.adapter_slot] = load.adapter_digest
        self.adapters.slot_table.on_loaded(load, done)

    @rule(fail=st.booleans())
    def fetch(self, fail: bool) -> None:
        for digest, path in self.adapters.pop_reads():
            self.drop()
            self.asked.append(digest)
            assert digest not in self.copies and path == PATH / digest
        if self.asked:
            digest = self.asked.pop(0)
            if fail:
                self.adapters.on_read_failed(digest)
                for _ in range(self.waiting.count(digest)):
                    self.waiting.remove(digest)
                    self.adapters.remove_sequence(digest)
            elif self.adapters.add(digest, PATH / digest, None, SIZES[digest]):
                self.copies.add(digest)
            self.drop()

    @invariant()
    def is_whole(self) -> None:
        self.adapters.check_integrity(Counter(self.waiting + self.running), Counter(self.running))
        assert self.host_bytes is None or sum(SIZES[digest] for digest in self.copies) <= self.host_bytes
        assert {d for d, state in self.adapters.adapter_states().items() if state != "disk"} <= self.copies
        assert set(self.running) == set(self.adapters.running_adapters())

    def teardown(self) -> None:
        """Whatever happened, everyone who waits is served within a few slots' worth of time."""
        for _ in range(4 * len(self.waiting + self.running) + 4):
            for digest in self.running:
                self.adapters.on_stop(digest)
                self.adapters.remove_sequence(digest)
            self.running = []
            self.fetch(fail=False)
            while self.loading:
                self.fill(self.loading.pop(), True)
            self.step(1.0)
            self.is_whole()
        assert not self.waiting and not self.running


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=100, stateful_step_count=50)
