# SPDX-License-Identifier: Apache-2.0
"""The registry moves adapters between disk, host memory and slots, for scripted arrivals and removals."""

from pathlib import Path

import pytest

from quire_engine.lora.adapter_info import AdapterInfo, combined_info
from quire_engine.lora.registry import AdapterRegistry
from quire_engine.lora.slot_table import RESERVE_AFTER_S
from quire_spec.errors import Internal, InvalidArgument, NotFound

PATH = Path("/adapters")


class Registry(AdapterRegistry):
    """A registry whose methods make all calls of one step."""

    def run(self, digest: str, now: float = 0.0, is_new: bool = True) -> bool:
        """Start a sequence that arrived before, as a step does. Slots are filled immediately."""
        self.begin_step(now)
        can_run = self.can_run(digest, now, is_new=is_new) or (
            bool(self.load()) and self.can_run(digest, now, is_new=is_new)
        )
        if can_run:
            self.on_start(digest)
        self.load()
        return can_run

    def load(self) -> list[tuple[str, int]]:
        """Fill all assigned slots."""
        slot_loads = self.slot_table.pop_loads()
        for slot_load in slot_loads:
            self.slot_table.on_loaded(slot_load)
        return [(slot_load.adapter_digest, slot_load.adapter_slot) for slot_load in slot_loads]

    def end(self, digest: str) -> None:
        """End a running sequence."""
        self.on_stop(digest)
        self.remove_sequence(digest)

    def read(self) -> list[str]:
        """Read every requested adapter."""
        reads = self.pop_reads()
        for digest, path in reads:
            assert self.add(digest, path)
        return [digest for digest, _ in reads]


def make_registry(digests: str, max_loras: int = 2, host_loras: int = 4, pinned: str = "") -> Registry:
    """Return a registry with one adapter per letter of `digests`."""
    registry = Registry(max_loras, host_loras)
    for digest in digests:
        registry.add(digest, PATH / digest, digest in pinned)
    return registry


def test_adapter_moves_to_host_memory_to_a_slot_and_back_to_disk() -> None:
    registry = make_registry("abc", max_loras=1, host_loras=2)
    # c was added last and evicts a, which has not been used.
    assert registry.adapter_states() == {"a": "disk", "b": "host", "c": "host"}
    assert registry.pop_evicted_copies() == ["a"]
    registry.add_sequence("c")
    assert registry.run("c")
    assert registry.adapter_states()["c"] == "slot"
    registry.add_sequence("a")
    assert registry.read() == ["a"]
    assert registry.adapter_states() == {"a": "host", "b": "disk", "c": "slot"}


def test_least_recently_used_idle_slot_is_evicted() -> None:
    registry = make_registry("abc")
    for digest in "aba":
        registry.add_sequence(digest)
        assert registry.run(digest)
        registry.end(digest)
    registry.add_sequence("c")
    assert registry.run("c")
    assert registry.adapter_states() == {"a": "slot", "b": "host", "c": "slot"}


def test_rejects_unknown_and_removed_adapters() -> None:
    registry = make_registry("a")
    with pytest.raises(NotFound, match="'b' is not loaded"):
        registry.add_sequence("b")
    registry.add_sequence("a")
    registry.remove("a")
    with pytest.raises(NotFound, match="'a' is not loaded"):
        registry.add_sequence("a")
    assert registry.adapter_states() == {}
    # The earlier sequence still gets its adapter. The host copy is dropped when it finishes.
    assert registry.run("a")
    registry.end("a")
    assert registry.pop_evicted_copies() == ["a"]
    registry.check_integrity({}, {})


def test_adapter_added_again_during_removal_stays() -> None:
    registry = make_registry("a")
    registry.add_sequence("a")
    registry.remove("a")
    assert registry.add("a", PATH / "new", False)
    registry.remove_sequence("a")
    assert registry.adapter_states() == {"a": "host"}


def test_pinned_adapters_get_their_slot_first_and_keep_it() -> None:
    registry = make_registry("abc", pinned="a")
    registry.begin_step(0.0)
    assert registry.load() == [("a", 0)]
    for digest in "bc":
        registry.add_sequence(digest)
    assert registry.run("b")
    assert not registry.run("c")
    registry.end("b")
    assert registry.run("c")
    assert registry.adapter_states() == {"a": "slot", "b": "host", "c": "slot"}


def test_rejects_more_pins_than_slots() -> None:
    registry = make_registry("ab", pinned="ab")
    with pytest.raises(InvalidArgument, match=r"'c' cannot be pinned: all 2 slots are pinned"):
        registry.add("c", PATH / "c", True)
    assert "c" not in registry.adapter_states()
    # Pinning again is allowed, and so is pinning after another adapter was unpinned.
    registry.add("a", PATH / "a", False)
    registry.add("c", PATH / "c", True)


def test_idle_pinned_adapter_yields_if_all_slots_are_pinned() -> None:
    registry = make_registry("abc", max_loras=2, host_loras=2, pinned="ab")
    registry.add_sequence("a")
    assert registry.run("a")
    registry.add_sequence("c")
    assert registry.read() == ["c"]
    assert registry.run("c")
    assert registry.adapter_states() == {"a": "slot", "b": "disk", "c": "slot"}
    registry.end("c")
    # b is pinned, so it is read again at once and gets its slot back.
    assert registry.read() == ["b"]
    registry.begin_step(0.0)
    assert registry.adapter_states() == {"a": "slot", "b": "slot", "c": "disk"}


def test_overdue_adapter_gets_the_slot_with_the_oldest_last_start() -> None:
    registry = make_registry("abc", max_loras=2)
    for digest in "abcab":
        registry.add_sequence(digest)
    assert registry.run("b") and registry.run("a") and not registry.run("c", now=0.0)
    almost, late = RESERVE_AFTER_S * 0.99, RESERVE_AFTER_S
    assert registry.run("b", now=almost) and registry.run("a", now=almost)
    registry.add_sequence("a")
    registry.add_sequence("b")
    # b has the oldest last start, so its slot drains. A preempted sequence of b can resume, a new one cannot start.
    assert not registry.run("b", now=late) and registry.run("a", now=late)
    registry.on_stop("b")
    assert registry.run("b", now=late, is_new=False)
    registry.end("b")
    registry.end("b")
    assert not registry.run("b", now=late)
    assert registry.run("c", now=late)
    assert registry.adapter_states() == {"a": "slot", "b": "host", "c": "slot"}


def test_needed_copy_is_evicted_for_an_older_need() -> None:
    registry = make_registry("abc", max_loras=1, host_loras=2)
    registry.add_sequence("a")
    for digest in "bc":
        registry.add_sequence(digest)
    assert registry.read() == ["a"]
    assert registry.adapter_states() == {"a": "host", "b": "host", "c": "disk"}
    assert registry.pop_reads() == []
    assert registry.run("a")
    registry.end("a")
    assert registry.read() == ["c"]


def test_pinned_adapters_are_read_after_needed_ones() -> None:
    registry = make_registry("abc", max_loras=2, host_loras=2)
    for digest in "bc":
        registry.add_sequence(digest)
    # Both copies have waiting sequences, so the pinned a must wait, and does not delay the adapters behind it.
    assert not registry.add("a", PATH / "a", True)
    assert registry.pop_reads() == []
    assert not registry.add("d", PATH / "d", False)
    registry.add_sequence("d")
    assert registry.run("b")
    registry.end("b")
    assert registry.read() == ["d"]
    registry.check_integrity({"c": 1, "d": 1}, {})
    # Unpinned, a is not needed.
    registry.add("a", PATH / "a", False)
    registry.remove_sequence("d")
    assert registry.pop_reads() == []
    registry.check_integrity({"c": 1}, {})


def test_reads_are_requested_once_in_order_and_within_host_memory() -> None:
    registry = make_registry("abcdef", max_loras=1, host_loras=2)
    assert registry.adapter_states() == {"a": "disk", "b": "disk", "c": "disk", "d": "disk", "e": "host", "f": "host"}
    for digest in "edcbad":
        registry.add_sequence(digest)
    # e has a waiting sequence and stays. f is evicted for one read.
    assert registry.pop_reads() == [("d", PATH / "d")]
    assert registry.pop_reads() == []
    assert registry.add("d", PATH / "d")
    assert registry.run("e") and not registry.run("d")
    registry.end("e")
    assert registry.run("d")
    assert [digest for digest, _ in registry.pop_reads()] == ["c"]
    registry.on_read_failed("c")
    registry.remove_sequence("c")
    assert [digest for digest, _ in registry.pop_reads()] == ["b"]


def test_half_of_the_slots_are_reserved_for_the_longest_waits() -> None:
    registry = make_registry("abcdwxyz", max_loras=4, host_loras=8)
    for digest in "abcdwxyz":
        registry.add_sequence(digest)
        registry.run(digest, now=ord(digest) / 1000)
    assert registry.running_adapters() == list("abcd")
    late = 2 * RESERVE_AFTER_S
    for digest in "abcd":
        registry.add_sequence(digest)
    # a and b drain for w and x. c and d continue.
    assert [registry.run(digest, now=late) for digest in "abcd"] == [False, False, True, True]
    for digest in "ab":
        registry.end(digest)
    # z is first in the queue but gets neither slot.
    assert [registry.run(digest, now=late) for digest in "zwx"] == [False, True, True]
    # Next are y and z, and the slots with the oldest last start.
    for digest in "cdw":
        registry.add_sequence(digest)
    assert [registry.run(digest, now=late) for digest in "cdw"] == [False, False, True]


def test_host_memory_is_limited_in_bytes() -> None:
    registry = Registry(1, 99, max_host_bytes=20)
    for digest, num_bytes in {"a": 10, "b": 4, "c": 4, "d": 2}.items():
        assert registry.add(digest, PATH / digest, False, AdapterInfo(num_bytes))
    assert registry.host_bytes == 20
    # A large copy evicts as many others as necessary, least recently used first.
    assert registry.add("e", PATH / "e", False, AdapterInfo(9))
    assert registry.pop_evicted_copies() == ["a"] and registry.host_bytes == 19
    # Bytes are reserved when a read is requested.
    registry.add_sequence("a")
    assert registry.pop_reads() == [("a", PATH / "a")]
    assert registry.pop_evicted_copies() == ["b", "c", "d"]
    assert registry.adapter_states() == {"a": "disk", "b": "disk", "c": "disk", "d": "disk", "e": "host"}
    assert registry.add("a", PATH / "a", None, AdapterInfo(10)) and registry.host_bytes == 19
    registry.check_integrity({"a": 1}, {})


def test_nothing_is_evicted_if_it_would_not_free_enough() -> None:
    registry = Registry(1, 99, max_host_bytes=20)
    for digest, num_bytes in {"a": 9, "b": 9, "c": 2}.items():
        registry.add(digest, PATH / digest, False, AdapterInfo(num_bytes))
    for digest in "ab":
        registry.add_sequence(digest)
    assert not registry.add("d", PATH / "d", False, AdapterInfo(9))
    assert registry.pop_evicted_copies() == []
    registry.check_integrity({"a": 1, "b": 1}, {})


def test_check_integrity_detects_damage() -> None:
    registry = make_registry("ab")
    registry.add_sequence("a")
    registry.check_integrity({"a": 1}, {})
    with pytest.raises(Internal, match=r"unfinished sequences differ.*2 adapters, 2 of at most 4 host copies"):
        registry.check_integrity({"a": 2}, {})
    registry._on_host.remove("a")
    with pytest.raises(Internal, match="an adapter with sequences has no host copy and is not being read"):
        registry.check_integrity({"a": 1}, {})


def test_a_client_that_uses_many_adapters_evicts_its_own_host_copies() -> None:
    registry = make_registry("abcdefgh", max_loras=1, host_loras=4)

    def use(digest: str, client: str) -> None:
        registry.add_sequence(digest, client=client)
        registry.read()
        assert registry.run(digest)
        registry.end(digest)

    use("a", "calm")
    use("b", "calm")
    for digest in "cdefghcdefgh":
        use(digest, "flood")
        states = registry.adapter_states()
        assert "disk" not in (states["a"], states["b"]), "two copies are the share of one of two clients"
    use("h", "calm")
    assert registry.adapter_states()["h"] != "disk", "the copy belongs to the client that brought it"
    for digest in "cde":
        use(digest, "third")
    states = registry.adapter_states()
    assert [states[digest] for digest in "ab"].count("disk") <= 1, "a third client makes the shares smaller"


def test_as_many_idle_adapters_leave_as_pages_are_needed() -> None:
    """The least recently used ones leave, but none whose pages do not help."""
    pages = {"a": 4, "b": 4, "c": 4, "d": 4, "e": 8, "f": 2}
    registry = Registry(6, 6, num_pages=16)
    for digest, num_pages in pages.items():
        registry.add(digest, PATH / digest, False, AdapterInfo(num_pages=num_pages))
    for digest in "cabd":
        registry.add_sequence(digest)
        assert registry.run(digest)
    registry.end("c")
    registry.end("a")
    registry.end("b")
    # The order of the pages is c, a, b, d. Only a and b, or c and a, are adjacent; c was used before b.
    registry.add_sequence("e")
    assert registry.run("e")
    assert registry.slot_table.pop_evicted() == ["c", "a"]
    registry.add_sequence("f")
    assert registry.run("f")
    assert registry.slot_table.pop_evicted() == ["b"]
    assert registry.slot_table.num_used_pages == 4 + 8 + 2


def test_an_adapter_of_high_rank_drains_others_and_pins_yield_to_it() -> None:
    registry = Registry(4, 8, num_pages=16)
    for digest in "abc":
        registry.add(digest, PATH / digest, digest == "c", AdapterInfo(num_pages=4))
        registry.add_sequence(digest)
        assert registry.run(digest)
    registry.add("large", PATH / "large", False, AdapterInfo(num_pages=16))
    registry.add_sequence("large")
    registry.end("c")
    assert not registry.run("large", 0.0)
    assert not registry.run("large", RESERVE_AFTER_S)
    # New sequences do not start with the adapters that must leave.
    registry.add_sequence("a")
    assert not registry.run("a", RESERVE_AFTER_S)
    registry.end("a")
    assert not registry.run("large", RESERVE_AFTER_S)
    registry.end("b")
    assert registry.run("large", RESERVE_AFTER_S)
    assert registry.slot_table.adapters_in_slots() == ["large"]
    registry.end("large")
    assert registry.run("a", 2 * RESERVE_AFTER_S)
    registry.begin_step(2 * RESERVE_AFTER_S)
    assert sorted(registry.slot_table.adapters_in_slots()) == ["a", "c"]  # the pinned one is back


def test_rejects_pins_that_leave_no_pages() -> None:
    registry = Registry(4, 8, num_pages=16)
    for digest in "ab":
        registry.add(digest, PATH / digest, True, AdapterInfo(num_pages=8))
    with pytest.raises(
        InvalidArgument, match=r"'c' cannot be pinned: it needs 1 pages .* have 16 of 16; raise max_loaded"
    ):
        registry.add("c", PATH / "c", True, AdapterInfo(num_pages=1))
    registry.add("a", PATH / "a", False, AdapterInfo(num_pages=8))
    registry.add("c", PATH / "c", True, AdapterInfo(num_pages=1))


def test_pages_of_a_sum_are_at_most_its_rank() -> None:
    """A bound, from before the sum is read: parts of odd rank are padded, their sum is not."""
    infos = [AdapterInfo(rank=3, num_pages=4), AdapterInfo(rank=5, num_pages=6), AdapterInfo(rank=8, num_pages=2)]
    assert combined_info(infos, 16).num_pages == 12
    assert combined_info(infos[:2], 16).num_pages == 8
    with pytest.raises(InvalidArgument, match="the sum of the adapters' ranks is 16, but max_lora_rank is 8; raise it"):
        combined_info(infos, 8)
