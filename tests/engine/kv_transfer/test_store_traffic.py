# SPDX-License-Identifier: Apache-2.0
"""Reads of a store are shared and bounded, and a store that is late delays no sequence twice."""

import math
import threading
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import ClassVar

import pytest

from quire_engine.kv_cache.host_cache import HostCache
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.kv_transfer.store_traffic import READ_DEADLINE_S, StoreTraffic
from quire_engine.sequence import Sequence
from quire_spec.engine.sampling_params import SamplingParams

NUM_ROWS = 100


class FullStore:
    """A KVStore that has every block, and whose reads end when the test says."""

    seconds_per_block: float = 0.0
    errors: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        self.reads: list[tuple[list[bytes], Callable[[int], None]]] = []

    def contains(self, keys: Items[bytes]) -> int:
        return len(keys)

    def read(
        self,
        keys: Items[bytes],
        rows: Items[int],
        on_done: Callable[[int], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self.reads.append((list(keys), on_done))

    def write(self, keys: Items[bytes], rows: Items[int], on_done: Callable[[int], None]) -> None:
        raise AssertionError

    def end_read(self, num_read: int | None = None) -> None:
        """End the first read."""
        keys, on_done = self.reads.pop(0)
        on_done(len(keys) if num_read is None else num_read)


class Harness:
    """The traffic of a FullStore, and sequences that nothing but the store delays."""

    def __init__(self) -> None:
        self.store = FullStore()
        self.host_cache = HostCache(SwapCosts(NUM_ROWS, 0.0, 1.0), 8, True)
        self.traffic = StoreTraffic(self.store, self.host_cache, 8)
        self.keys: dict[Sequence, list[bytes]] = {}

    def add(self, *blocks: str) -> Sequence:
        """Add a sequence with the keys of its blocks."""
        sequence = Sequence(len(self.keys), [1], SamplingParams(), 0, 1)
        self.keys[sequence] = [block.encode() for block in blocks]
        return sequence

    def plan(self, now: float) -> list[Sequence]:
        """Return the sequences that wait for the store."""
        self.traffic.poll()
        waiting = [sequence for sequence in self.keys if not self._is_ready(sequence, now)]
        keys = [key for transfer in self.traffic._transfers for key in transfer.keys]
        assert len(keys) == len(set(keys)) <= NUM_ROWS // 2
        self.host_cache.check_integrity(self.traffic.held_rows)
        return waiting

    def _is_ready(self, sequence: Sequence, now: float) -> bool:
        keys = self.keys[sequence]
        return self.traffic.is_ready(sequence, lambda: dict.fromkeys(keys[len(self.host_cache.find(keys)) :]), now)


def test_sequences_with_the_same_beginning_wait_for_one_read() -> None:
    h = Harness()
    num_threads = threading.active_count()
    beginning = [f"b{number}" for number in range(20)]
    sequences = [h.add(*beginning, f"own{number}") for number in range(200)]
    assert h.plan(0.0) == sequences and len(h.store.reads) == 1
    assert threading.active_count() == num_threads and h.traffic.next_deadline == READ_DEADLINE_S
    h.store.end_read()
    # Each of the others reads its own block, as many as may be read at the same time. The rest is computed.
    assert h.plan(0.5) == sequences[1 : NUM_ROWS // 2 + 1]
    assert {tuple(keys) for keys, _ in h.store.reads} == {(b"own%d" % n,) for n in range(1, NUM_ROWS // 2 + 1)}
    while h.store.reads:
        h.store.end_read()
    assert h.plan(0.6) == [] and h.traffic.next_deadline == math.inf
    assert h.host_cache.pool.num_used == 0 and len(h.host_cache.find(h.keys[sequences[1]])) == 21


def test_reads_leave_half_of_the_rows() -> None:
    h = Harness()
    h.add(*(f"a{number}" for number in range(30)))
    h.add(*(f"b{number}" for number in range(30)))
    h.add("c")
    assert len(h.plan(0.0)) == 2 and [len(keys) for keys, _ in h.store.reads] == [30, 20]


def test_read_stops_before_a_block_that_is_being_read() -> None:
    h = Harness()
    h.add("b", "c")
    h.add("a", "b", "c")
    h.add("c")
    assert len(h.plan(0.0)) == 3 and [keys for keys, _ in h.store.reads] == [[b"b", b"c"], [b"a"]]


def test_store_that_hangs_delays_only_the_sequences_of_one_deadline() -> None:
    h = Harness()
    first = h.add("a")
    assert h.plan(0.0) == [first]
    joining = h.add("a")
    assert h.plan(1.0) == [first, joining] and h.traffic.next_deadline == READ_DEADLINE_S
    late = [h.add("a"), h.add("b")]
    assert h.plan(READ_DEADLINE_S) == [] and len(h.store.reads) == 1
    # After the end of the late read, the store is used again.
    h.store.end_read()
    after = h.add("c")
    assert h.plan(9.0) == [after] and late[0] not in h.plan(9.0)


def test_sequence_waits_at_most_for_one_deadline_in_all() -> None:
    """It waits for the read of another sequence, and then for its own."""
    h = Harness()
    h.add("a")
    sequence = h.add("a", "b")
    h.plan(0.0)
    h.store.end_read()
    assert h.plan(1.5) == [sequence] and h.traffic.next_deadline == READ_DEADLINE_S
    assert h.plan(READ_DEADLINE_S) == []


def test_blocks_that_the_other_sequence_did_not_get_are_read_once_more() -> None:
    h = Harness()
    first, second = h.add("a", "b"), h.add("a", "b", "c")
    assert h.plan(0.0) == [first, second]
    h.store.end_read(1)
    assert h.plan(0.1) == [second] and h.store.reads[0][0] == [b"b", b"c"]
    h.store.end_read(0)
    assert h.plan(0.2) == []


@pytest.mark.parametrize(("seconds_per_block", "threshold", "is_read"), [(7, 1, True), (9, 1, False), (9, 0, True)])
def test_blocks_of_a_slow_pod_are_read_only_without_a_threshold(
    seconds_per_block: float, threshold: int, is_read: bool
) -> None:
    """Computing a block takes 8 s."""
    store = FullStore()
    store.seconds_per_block = seconds_per_block
    traffic = StoreTraffic(None, HostCache(SwapCosts(NUM_ROWS, 0.0, 1.0), 8, True), 8, lambda _: store, threshold)
    sequence = Sequence(0, [1], SamplingParams(), 0, 1, kv_source="pod:8005")
    assert traffic.is_ready(sequence, lambda: {b"a": None, b"b": None}, 0.0) == (not is_read)
    assert len(store.reads) == is_read
