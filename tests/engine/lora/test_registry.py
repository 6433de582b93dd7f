# SPDX-License-Identifier: Apache-2.0
"""Adapters: who is in a slot, in host memory or on disk, in every order of arrivals, ends, additions and removals."""

from pathlib import Path

import pytest

from quire_engine.lora.registry import AdapterRegistry
from quire_engine.lora.slot_table import RESERVE_AFTER_S
from quire_spec.errors import Internal, InvalidArgument, NotFound

PATH = Path("/adapters")


class Registry(AdapterRegistry):
    """A registry with one step's worth of calls as one call."""

    def run(self, digest: str, now: float = 0.0, new: bool = True) -> bool:
        """Start a sequence that arrived before, as a step does; slots are filled at once."""
        self.begin_step(now)
        ready = self.can_run(digest, now, is_new=new) or (bool(self.load()) and self.can_run(digest, now, is_new=new))
        if ready:
            self.on_start(digest)
        self.load()
        return ready

    def load(self) -> list[tuple[str, int]]:
        """Fill slots."""
        loads = self.slot_table.pop_loads()
        for load in loads:
            self.slot_table.on_loaded(load)
        return [(load.adapter_digest, load.adapter_slot) for load in loads]

    def end(self, digest: str) -> None:
        """End a running sequence."""
        self.on_stop(digest)
        self.remove_sequence(digest)

    def fetch(self) -> list[str]:
        """Answer every fetch."""
        fetches = self.pop_reads()
        for digest, path in fetches:
            assert self.add(digest, path)
        return [digest for digest, _ in fetches]


def registry(names: str, max_loras: int = 2, host_loras: int = 4, pinned: str = "") -> Registry:
    """With one adapter per letter."""
    made = Registry(max_loras, host_loras)
    for digest in names:
        made.add(digest, PATH / digest, digest in pinned)
    return made


def test_an_adapter_goes_to_host_memory_to_a_slot_and_back_to_disk() -> None:
    adapters = registry("abc", max_loras=1, host_loras=2)
    # c was added last and takes the place of a, which nobody has used.
    assert adapters.adapter_states() == {"a": "disk", "b": "host", "c": "host"}
    assert adapters.pop_evicted_copies() == ["a"]
    adapters.add_sequence("c")
    assert adapters.run("c")
    assert adapters.adapter_states()["c"] == "slot"
    adapters.add_sequence("a")
    assert adapters.fetch() == ["a"]
    assert adapters.adapter_states() == {"a": "host", "b": "disk", "c": "slot"}


def test_a_slot_is_loaded_once_and_goes_to_the_next_adapter_when_idle() -> None:
    adapters = registry("ab", max_loras=1)
    for digest in "aab":
        adapters.add_sequence(digest)
    adapters.begin_step(0.0)
    assert not adapters.can_run("a", 0.0, is_new=True)
    assert adapters.load() == [("a", 0)]
    assert adapters.can_run("a", 0.0, is_new=True)
    adapters.on_start("a")
    adapters.on_start("a")
    assert not adapters.run("b")
    adapters.end("a")
    assert not adapters.run("b")
    adapters.end("a")
    adapters.begin_step(0.0)
    assert not adapters.can_run("b", 0.0, is_new=True)
    assert adapters.load() == [("b", 0)]
    assert adapters.can_run("b", 0.0, is_new=True)
    adapters.on_start("b")
    assert adapters.slot_table.num_evictions == 1
    assert adapters.adapter_states() == {"a": "host", "b": "slot"}


def test_the_least_recently_used_idle_slot_is_given_up() -> None:
    adapters = registry("abc")
    for digest in "aba":
        adapters.add_sequence(digest)
        assert adapters.run(digest)
        adapters.end(digest)
    adapters.add_sequence("c")
    assert adapters.run("c")
    assert adapters.adapter_states() == {"a": "slot", "b": "host", "c": "slot"}


def test_unknown_and_removed_adapters_are_refused() -> None:
    adapters = registry("a")
    with pytest.raises(NotFound, match="'b' is not loaded"):
        adapters.add_sequence("b")
    adapters.add_sequence("a")
    adapters.remove("a")
    with pytest.raises(NotFound, match="'a' is not loaded"):
        adapters.add_sequence("a")
    assert adapters.adapter_states() == {}
    # The sequence that was there before still gets its adapter; with its end the copy goes.
    assert adapters.run("a")
    adapters.end("a")
    assert adapters.pop_evicted_copies() == ["a"]
    adapters.check_integrity({}, {})


def test_an_adapter_added_again_while_it_goes_stays() -> None:
    adapters = registry("a")
    adapters.add_sequence("a")
    adapters.remove("a")
    assert adapters.add("a", PATH / "new", False)
    adapters.remove_sequence("a")
    assert adapters.adapter_states() == {"a": "host"}


def test_a_copy_that_arrives_after_the_removal_is_not_kept() -> None:
    adapters = registry("ab", max_loras=1, host_loras=1)
    adapters.add_sequence("a")
    assert [digest for digest, _ in adapters.pop_reads()] == ["a"]
    adapters.remove("a")
    adapters.remove_sequence("a")
    assert not adapters.add("a", PATH / "a")
    adapters.check_integrity({}, {})
    assert "a" not in adapters.adapter_states()


def test_pinned_adapters_get_their_slot_first_and_keep_it() -> None:
    adapters = registry("abc", pinned="a")
    adapters.begin_step(0.0)
    assert adapters.load() == [("a", 0)]
    for digest in "bc":
        adapters.add_sequence(digest)
    assert adapters.run("b")
    assert not adapters.run("c")
    adapters.end("b")
    assert adapters.run("c")
    assert adapters.adapter_states() == {"a": "slot", "b": "host", "c": "slot"}


def test_more_pins_than_slots_are_refused() -> None:
    adapters = registry("ab", pinned="ab")
    with pytest.raises(InvalidArgument, match="'c': cannot be pinned, all 2 slots are"):
        adapters.add("c", PATH / "c", True)
    assert "c" not in adapters.adapter_states()
    # Pinning again, and pinning after an unpin, is fine.
    adapters.add("a", PATH / "a", False)
    adapters.add("c", PATH / "c", True)


def test_when_every_slot_is_pinned_an_idle_one_yields() -> None:
    adapters = registry("abc", max_loras=2, host_loras=2, pinned="ab")
    adapters.add_sequence("a")
    assert adapters.run("a")
    adapters.add_sequence("c")
    assert adapters.fetch() == ["c"]
    assert adapters.run("c")
    assert adapters.adapter_states() == {"a": "slot", "b": "disk", "c": "slot"}
    adapters.end("c")
    # b is read again at once, as it is pinned, and takes its slot back.
    assert adapters.fetch() == ["b"]
    adapters.begin_step(0.0)
    assert adapters.adapter_states() == {"a": "slot", "b": "slot", "c": "disk"}


def test_who_waits_too_long_gets_the_slot_of_the_adapter_that_started_least_recently() -> None:
    adapters = registry("abc", max_loras=2)
    for digest in "abcab":
        adapters.add_sequence(digest)
    assert adapters.run("b") and adapters.run("a") and not adapters.run("c", now=0.0)
    almost, late = RESERVE_AFTER_S * 0.99, RESERVE_AFTER_S
    assert adapters.run("b", now=almost) and adapters.run("a", now=almost)
    adapters.add_sequence("a")
    adapters.add_sequence("b")
    # b's last start is longest ago: its slot drains. A preempted sequence of b may come back, a new one not.
    assert not adapters.run("b", now=late) and adapters.run("a", now=late)
    adapters.on_stop("b")
    assert adapters.run("b", now=late, new=False)
    adapters.end("b")
    adapters.end("b")
    assert not adapters.run("b", now=late)
    assert adapters.run("c", now=late)
    assert adapters.adapter_states() == {"a": "slot", "b": "host", "c": "slot"}


def test_a_reservation_ends_with_the_sequences_it_was_for() -> None:
    adapters = registry("abc", max_loras=1)
    for digest in "abac":
        adapters.add_sequence(digest)
    assert adapters.run("a") and not adapters.run("b") and not adapters.run("c", now=0.5)
    assert not adapters.run("a", now=RESERVE_AFTER_S)
    adapters.remove_sequence("b")
    assert adapters.run("a", now=RESERVE_AFTER_S)
    adapters.add_sequence("a")
    assert not adapters.run("a", now=RESERVE_AFTER_S + 0.5)


def test_a_slot_reserved_for_an_adapter_that_cannot_be_read_yet_serves_others() -> None:
    adapters = registry("ab", max_loras=1, host_loras=1)
    adapters.add_sequence("b")
    adapters.add_sequence("a")
    assert adapters.adapter_states() == {"a": "disk", "b": "host"}
    # b's sequence does not get its turn while a waits; the only host copy is b's, and b has waited longer.
    assert not adapters.run("a", now=0.0)
    assert adapters.pop_reads() == []
    assert adapters.run("b", now=2 * RESERVE_AFTER_S)
    adapters.end("b")
    assert adapters.fetch() == ["a"]
    adapters.add_sequence("b")
    assert not adapters.run("b", now=2 * RESERVE_AFTER_S)
    assert adapters.run("a", now=2 * RESERVE_AFTER_S)


def test_a_needed_copy_makes_room_for_one_that_is_needed_longer() -> None:
    adapters = registry("abc", max_loras=1, host_loras=2)
    adapters.add_sequence("a")
    for digest in "bc":
        adapters.add_sequence(digest)
    assert adapters.fetch() == ["a"]
    assert adapters.adapter_states() == {"a": "host", "b": "host", "c": "disk"}
    assert adapters.pop_reads() == []
    assert adapters.run("a")
    adapters.end("a")
    assert adapters.fetch() == ["c"]


def test_pinned_copies_are_read_after_needed_ones() -> None:
    adapters = registry("abc", max_loras=2, host_loras=2)
    for digest in "bc":
        adapters.add_sequence(digest)
    # a is pinned again while both copies are waited for: it has to wait, and holds up nobody behind it.
    assert not adapters.add("a", PATH / "a", True)
    assert adapters.pop_reads() == []
    assert not adapters.add("d", PATH / "d", False)
    adapters.add_sequence("d")
    assert adapters.run("b")
    adapters.end("b")
    assert adapters.fetch() == ["d"]
    adapters.check_integrity({"c": 1, "d": 1}, {})
    # Unpinned, nobody wants it.
    adapters.add("a", PATH / "a", False)
    adapters.remove_sequence("d")
    assert adapters.pop_reads() == []
    adapters.check_integrity({"c": 1}, {})


def test_fetches_go_out_once_in_order_and_within_host_memory() -> None:
    adapters = registry("abcdef", max_loras=1, host_loras=2)
    assert adapters.adapter_states() == {"a": "disk", "b": "disk", "c": "disk", "d": "disk", "e": "host", "f": "host"}
    for digest in "edcbad":
        adapters.add_sequence(digest)
    # e is waited for and stays; f makes room for one.
    assert adapters.pop_reads() == [("d", PATH / "d")]
    assert adapters.pop_reads() == []
    assert adapters.add("d", PATH / "d")
    assert adapters.run("e") and not adapters.run("d")
    adapters.end("e")
    assert adapters.run("d")
    assert [digest for digest, _ in adapters.pop_reads()] == ["c"]
    adapters.on_read_failed("c")
    adapters.remove_sequence("c")
    assert [digest for digest, _ in adapters.pop_reads()] == ["b"]


def test_a_slot_that_is_being_filled_is_nobodys_until_it_is_done() -> None:
    adapters = registry("ab", max_loras=1)
    adapters.add_sequence("a")
    adapters.add_sequence("b")
    adapters.begin_step(0.0)
    assert not adapters.can_run("a", 0.0, is_new=True)
    (load,) = adapters.slot_table.pop_loads()
    assert not adapters.can_run("b", 0.0, is_new=True) and not adapters.can_run("a", 0.0, is_new=True)
    # Its sequence is over before the copy is made: the copy is not, and what it writes is not to meet another one's.
    adapters.remove("a")
    adapters.remove_sequence("a")
    adapters.begin_step(0.0)
    assert not adapters.can_run("b", 0.0, is_new=True) and adapters.load() == []
    adapters.check_integrity({"b": 1}, {})
    adapters.slot_table.on_loaded(load)
    assert adapters.run("b")
    assert adapters.adapter_states() == {"b": "slot"}


def test_a_slot_that_was_filled_for_a_sequence_waits_for_it() -> None:
    adapters = registry("ab", max_loras=1)
    adapters.add_sequence("a")
    adapters.begin_step(0.0)
    assert not adapters.can_run("a", 0.0, is_new=True) and adapters.load() == [("a", 0)]
    adapters.add_sequence("b")
    # b is asked for first, and a's sequence has not run yet: were its slot given away, both could go on for ever.
    adapters.begin_step(0.0)
    assert not adapters.can_run("b", 0.0, is_new=True) and adapters.load() == []
    adapters.remove_sequence("a")
    adapters.begin_step(0.0)
    assert not adapters.can_run("b", 0.0, is_new=True) and adapters.load() == [("b", 0)]


def test_a_slot_that_is_reserved_while_it_is_filled_runs_the_one_that_it_was_filled_for() -> None:
    adapters = registry("cab", max_loras=1, host_loras=2)
    assert adapters.adapter_states() == {"a": "host", "b": "host", "c": "disk"}
    for digest in "caa":
        adapters.add_sequence(digest)
    # The slot is reserved for c, which has waited longest. But c is not in memory yet, so a may have it.
    assert not adapters.run("c", now=0.0)
    adapters.begin_step(RESERVE_AFTER_S)
    assert not adapters.can_run("a", RESERVE_AFTER_S, is_new=True)
    (load,) = adapters.slot_table.pop_loads()
    # Before a is in it, c could use it.
    assert adapters.fetch() == ["c"]
    adapters.slot_table.on_loaded(load)
    assert not adapters.run("c", now=RESERVE_AFTER_S)
    assert adapters.run("a", now=RESERVE_AFTER_S)
    assert not adapters.run("a", now=RESERVE_AFTER_S)
    adapters.end("a")
    assert adapters.run("c", now=RESERVE_AFTER_S)
    adapters.check_integrity({"a": 1, "c": 1}, {"c": 1})


def test_a_copy_that_failed_leaves_the_slot_empty() -> None:
    adapters = registry("a")
    adapters.add_sequence("a")
    adapters.begin_step(0.0)
    assert not adapters.can_run("a", 0.0, is_new=True)
    (load,) = adapters.slot_table.pop_loads()
    adapters.slot_table.on_loaded(load, succeeded=False)
    assert adapters.adapter_states() == {"a": "host"}
    adapters.check_integrity({"a": 1}, {})
    adapters.remove_sequence("a")
    adapters.check_integrity({}, {})


def test_half_of_the_slots_are_reserved_at_a_time_for_who_has_waited_longest() -> None:
    adapters = registry("abcdwxyz", max_loras=4, host_loras=8)
    for digest in "abcdwxyz":
        adapters.add_sequence(digest)
        adapters.run(digest, now=ord(digest) / 1000)
    assert adapters.running_adapters() == list("abcd")
    late = 2 * RESERVE_AFTER_S
    for digest in "abcd":
        adapters.add_sequence(digest)
    # a and b drain for w and x; c and d go on.
    assert [adapters.run(digest, now=late) for digest in "abcd"] == [False, False, True, True]
    for digest in "ab":
        adapters.end(digest)
    # z comes first in line and takes neither.
    assert [adapters.run(digest, now=late) for digest in "zwx"] == [False, True, True]
    # Then it is the turn of y and z, and of the slots that have gone longest without a start.
    for digest in "cdw":
        adapters.add_sequence(digest)
    assert [adapters.run(digest, now=late) for digest in "cdw"] == [False, False, True]


def test_host_memory_is_bounded_in_bytes_too() -> None:
    adapters = Registry(1, 99, max_host_bytes=20)
    for digest, num_bytes in {"a": 10, "b": 4, "c": 4, "d": 2}.items():
        assert adapters.add(digest, PATH / digest, False, num_bytes)
    assert adapters.host_bytes == 20
    # One that is larger than the one used last makes as many go as it takes, the least recently used first.
    assert adapters.add("e", PATH / "e", False, 9)
    assert adapters.pop_evicted_copies() == ["a"] and adapters.host_bytes == 19
    # What is being read has its room already.
    adapters.add_sequence("a")
    assert adapters.pop_reads() == [("a", PATH / "a")]
    assert adapters.pop_evicted_copies() == ["b", "c", "d"]
    assert adapters.adapter_states() == {"a": "disk", "b": "disk", "c": "disk", "d": "disk", "e": "host"}
    assert adapters.add("a", PATH / "a", None, 10) and adapters.host_bytes == 19
    adapters.check_integrity({"a": 1}, {})


def test_nothing_is_given_up_where_it_would_not_make_enough_room() -> None:
    adapters = Registry(1, 99, max_host_bytes=20)
    for digest, num_bytes in {"a": 9, "b": 9, "c": 2}.items():
        adapters.add(digest, PATH / digest, False, num_bytes)
    for digest in "ab":
        adapters.add_sequence(digest)
    assert not adapters.add("d", PATH / "d", False, 9)
    assert adapters.pop_evicted_copies() == []
    adapters.check_integrity({"a": 1, "b": 1}, {})


def test_check_integrity_sees_damage() -> None:
    adapters = registry("ab")
    adapters.add_sequence("a")
    adapters.check_integrity({"a": 1}, {})
    with pytest.raises(Internal, match=r"open sequences differ.*2 adapters, 2 in host memory of 4"):
        adapters.check_integrity({"a": 2}, {})
    adapters._on_host.remove("a")
    with pytest.raises(Internal, match="an adapter that is waited for is not read"):
        adapters.check_integrity({"a": 1}, {})
