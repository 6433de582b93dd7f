# SPDX-License-Identifier: Apache-2.0
"""The pool of cores: every request ends exactly once, on one core at a time, whichever cores die and return."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire_engine.kv_cache.block_hash import BlockHasher
from quire_engine.text.cores.core_metrics import CoreMetrics
from quire_engine.text.cores.core_pool import CorePool
from quire_engine.text.cores.core_stats import CoreStats, merge_stats
from quire_engine.text.cores.dispatch import CoreLoad, Speeds, choose_core, estimate_s
from quire_engine.text.cores.prefix_index import MAX_BLOCKS, PrefixIndex
from quire_engine.text.live_snapshot import merge_live
from quire_engine.text.metric_series import Registry
from quire_engine.text.request_manager import FrontendSink
from quire_spec.constants import AdapterDigest
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import Unavailable
from quire_spec.protocol.messages import (
    AdapterResidency,
    BlockChanges,
    SchedulerStats,
    SequenceDelta,
    SequenceRequest,
    StepResult,
)

NUM_CORES = 3
HASHER = BlockHasher("model", "float32", 16, "float32")
ADAPTERS = [AdapterDigest("sha256:a"), AdapterDigest("sha256:b")]


@dataclass
class FakeClient:
    """A core: the sequences that it runs, and the adapters that it has."""

    running: dict[int, SequenceRequest] = field(default_factory=dict)
    adapters: list[AdapterDigest] = field(default_factory=list)
    is_up: bool = False
    num_steps: int = 0

    def send(self, message: SequenceRequest) -> None:
        assert self.is_up, "a request was sent to a dead core"
        assert message.id not in self.running
        self.running[message.id] = message

    def abort(self, ids: Iterable[int]) -> None:
        for sequence_id in ids:
            self.running.pop(sequence_id, None)


@dataclass
class Listener:
    """The request manager: the results of each sequence, and those that were lost."""

    results: dict[int, list[SequenceDelta]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    is_open: bool = False
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    residencies: dict[AdapterDigest, tuple[str, bool]] = field(default_factory=dict)
    """State and pin of each adapter of the pod."""

    def on_core_connected(self) -> None:
        assert not self.is_open
        self.is_open = True

    def on_core_lost(self) -> None:
        assert self.is_open
        self.is_open = False

    def on_step(self, step: StepResult) -> None:
        for result in step.results:
            self.results.setdefault(result.id, []).append(result)
        self.stats = step.stats
        for change in step.adapter_changes:
            self.residencies[change.digest] = change.state, change.pinned

    def on_sequences_lost(self, sequence_ids: Iterable[int], reason: str) -> None:
        assert "try again" in reason
        self.lost |= set(sequence_ids)

    def reader_of(self, sequence_id: int) -> FrontendSink | None:
        return None


class CorePoolMachine(RuleBasedStateMachine):
    """Cores start, step, die and return; requests of one to three sequences are sent and aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.clients = [FakeClient() for _ in range(NUM_CORES)]
        self.pool = CorePool(
            self.clients,  # type: ignore[arg-type]
            CoreMetrics(Registry(), "base", NUM_CORES),
            EngineConfig("m", max_num_seqs=8, data_parallel_size=NUM_CORES),
            lambda: self.now,
        )
        self.pool.dispatcher.prefix_index.hasher = HASHER
        self.listener = self.pool.listener = Listener()
        self.open: dict[int, range] = {}
        """The ids of the request of each unfinished sequence."""
        self.has_output: set[int] = set()
        self.deaths: Counter[range] = Counter()
        self.next_id = 1

    def step_of(self, number: int, results: list[SequenceDelta], **fields: Any) -> None:
        client = self.clients[number]
        client.num_steps += 1
        self.now += 0.01
        stats = SchedulerStats(num_running=len(client.running), num_blocks=8, num_steps=client.num_steps)
        self.pool.on_step(number, StepResult(results, [], stats, **fields))

    @precondition(lambda self: not all(client.is_up for client in self.clients))
    @rule(data=st.data())
    def start_core(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([n for n, client in enumerate(self.clients) if not client.is_up]))
        self.clients[number].is_up = True
        self.step_of(number, [])

    @precondition(lambda self: any(client.is_up for client in self.clients))
    @rule(data=st.data(), digest=st.sampled_from(ADAPTERS))
    def load_adapter(self, data: st.DataObject, digest: AdapterDigest) -> None:
        number = data.draw(st.sampled_from([n for n, client in enumerate(self.clients) if client.is_up]))
        self.clients[number].adapters = sorted({*self.clients[number].adapters, digest})
        self.step_of(number, [], adapter_changes=[AdapterResidency(digest, "host")])

    @precondition(lambda self: self.listener.is_open)
    @rule(
        num=st.integers(1, 3),
        digest=st.sampled_from([None, *ADAPTERS]),
        rank=st.sampled_from([None, None, *range(NUM_CORES)]),
        num_tokens=st.integers(1, 50),
    )
    def submit(self, num: int, digest: AdapterDigest | None, rank: int | None, num_tokens: int) -> None:
        ids = range(self.next_id, self.next_id + num)
        self.next_id += num
        requests = [SequenceRequest(i, [5] * num_tokens, SamplingParams(), digest) for i in ids]
        if rank is not None and not self.clients[rank].is_up:
            with pytest.raises(Unavailable):
                self.pool.submit(requests, ids, rank)
            return
        self.pool.submit(requests, ids, rank)
        self.open |= dict.fromkeys(ids, ids)
        (core,) = {n for n, client in enumerate(self.clients) if client.running.keys() & set(ids)}
        assert rank in (None, core)
        if rank is None and digest is not None and any(digest in c.adapters for c in self.clients if c.is_up):
            assert digest in self.clients[core].adapters

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        ids = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        self.pool.abort([i for i in ids if i in self.open])
        for i in ids:
            self.open.pop(i, None)

    @precondition(lambda self: any(client.running for client in self.clients))
    @rule(data=st.data(), error=st.booleans())
    def step(self, data: st.DataObject, error: bool) -> None:
        number = data.draw(st.sampled_from([n for n, client in enumerate(self.clients) if client.running]))
        running = self.clients[number].running
        results = []
        for i in data.draw(st.lists(st.sampled_from(sorted(running)), unique=True)):
            ends = data.draw(st.booleans())
            if ends:
                del running[i]
                del self.open[i]
            fails = ends and error
            results.append(
                SequenceDelta(i, error_code="INTERNAL") if fails else SequenceDelta(i, [7], "stop" if ends else None)
            )
            if not fails:
                self.has_output.add(i)
        self.step_of(number, results)

    @precondition(lambda self: any(client.is_up for client in self.clients))
    @rule(data=st.data())
    def kill_core(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([n for n, client in enumerate(self.clients) if client.is_up]))
        victims = {self.open[i] for i in self.clients[number].running if i in self.open}
        self.clients[number] = client = FakeClient()
        self.pool._cores[number].client = client  # type: ignore[assignment]
        was_lost = set(self.listener.lost)
        self.pool.on_core_lost(number)
        if not self.listener.is_open:
            self.open.clear()
            return
        for ids in victims:
            self.deaths[ids] += 1
            open_ids = {i for i in ids if i in self.open}
            if open_ids <= self.listener.lost - was_lost:
                for i in open_ids:
                    del self.open[i]
            else:
                assert self.deaths[ids] == 1, "a request was moved twice"
                assert not self.has_output & set(ids), "a request with output was moved"

    @invariant()
    def each_open_sequence_runs_on_one_core(self) -> None:
        placed = Counter(i for client in self.clients for i in client.running)
        assert all(count == 1 for count in placed.values())
        assert self.open.keys() <= placed.keys()
        for ids in self.open.values():
            assert sum(bool(client.running.keys() & set(ids)) for client in self.clients) == 1
        assert self.listener.is_open == any(client.is_up for client in self.clients)

    @invariant()
    def the_counts_of_the_pool_are_right(self) -> None:
        cores = self.pool.dispatcher.cores
        for core in cores:
            open_ids = [len(request.open_ids) for request in core.requests if not request.messages]
            assert core.num_running == sum(open_ids)
            assert core.num_queued_tokens == sum(request.num_queued_tokens for request in core.requests)
            digests = Counter(request.adapter_digest for request in core.requests)
            assert all(core.num_requests[digest] == digests[digest] for digest in ADAPTERS)
        assert {i for core in cores for r in core.requests for i in r.open_ids} == self.open.keys()
        for core, expected in zip(cores, self.pool.dispatcher.prefix_index._expected, strict=True):
            assert expected == Counter(block_hash for request in core.requests for block_hash in request.hashes)


TestCorePool = CorePoolMachine.TestCase


def started_pool(num_cores: int = 2) -> tuple[CorePool, list[FakeClient]]:
    clients = [FakeClient(is_up=True) for _ in range(num_cores)]
    config = EngineConfig("m", max_num_seqs=8, data_parallel_size=num_cores)
    pool = CorePool(clients, CoreMetrics(Registry(), "base", num_cores), config, lambda: 0.0)  # type: ignore[arg-type]
    pool.listener, pool.dispatcher.prefix_index.hasher = Listener(), HASHER
    for number in range(num_cores):
        pool.on_step(number, StepResult([], [], SchedulerStats(num_blocks=8)))
    return pool, clients


def core_of(pool: CorePool, clients: list[FakeClient], sequence_id: int, token_ids: list[int], **fields: Any) -> int:
    pool.submit([SequenceRequest(sequence_id, token_ids, SamplingParams(), **fields)], [sequence_id], None)
    return next(number for number, client in enumerate(clients) if sequence_id in client.running)


def test_a_burst_of_equal_beginnings_is_not_spread():
    """Each of eight documents is computed once, although no core has cached any of them yet."""
    pool, clients = started_pool()
    documents = [[100 + document] * 512 for document in range(8)]
    cores = [
        [core_of(pool, clients, 10 * i + j, [*document, *[j + 1] * 20]) for i, document in enumerate(documents)]
        for j in range(6)
    ]
    moved = sum(cores[0][i] != row[i] for row in cores for i in range(8))
    assert moved == 0 and sorted(cores[0]) == [0] * 4 + [1] * 4


def test_a_prompt_goes_where_its_beginning_is_cached_unless_it_is_evicted():
    pool, clients = started_pool()
    prompt = list(range(300))
    hashes = pool.dispatcher.prefix_index.hash_prompt(prompt, None, None)
    assert len(hashes) == 300 // 16
    stats = SchedulerStats(num_blocks=8)
    pool.on_step(1, StepResult([], [], stats, block_changes=BlockChanges(hashes)))
    assert core_of(pool, clients, 1, prompt) == 1
    assert core_of(pool, clients, 2, prompt, cache_salt="other") == 0, "core 1 has something to do"
    pool.abort([1, 2])
    pool.on_step(1, StepResult([], [], stats, block_changes=BlockChanges([], hashes[:1])))
    pool.on_step(0, StepResult([], [], stats, block_changes=BlockChanges(hashes[:3])))
    assert core_of(pool, clients, 3, prompt) == 0
    pool.abort([3])
    short = [7] * 40
    assert core_of(pool, clients, 4, short, cache_salt="a") == 0
    pool.abort([4])
    pool.on_step(0, StepResult([], [], SchedulerStats(num_blocks=8, num_used_blocks=4)))
    assert core_of(pool, clients, 5, short, cache_salt="a") == 0, "a tie stays with the core that served it last"
    assert core_of(pool, clients, 6, short, cache_salt="b") == 1


def test_an_adapter_in_a_slot_attracts_and_a_restarted_core_waits_for_its_adapters():
    pool, clients = started_pool()
    a, b = ADAPTERS
    stats = SchedulerStats(num_blocks=8)
    for number, (in_slot, on_host) in enumerate(((a, b), (b, a))):
        changes = [AdapterResidency(in_slot, "slot"), AdapterResidency(on_host, "host", number == 1, 8)]
        pool.on_step(number, StepResult([], [], stats, adapter_changes=changes))
    assert pool.listener.residencies == {a: ("slot", True), b: ("slot", False)}
    cores = [core_of(pool, clients, i, [i] * 20, adapter_digest=(a, b)[i % 2]) for i in range(8)]
    assert cores == [0, 1] * 4
    pool.on_core_lost(0)
    assert pool.listener.residencies == {a: ("host", True), b: ("slot", False)}
    pool.on_step(0, StepResult([], [], stats))
    assert [core_of(pool, clients, 10 + i, [i] * 20, adapter_digest=a) for i in range(3)] == [1, 1, 1]
    assert core_of(pool, clients, 20, [5] * 20) == 0, "the base model needs no adapter"


def test_a_sum_goes_to_a_core_that_has_all_its_adapters():
    pool, clients = started_pool()
    for number, digests in enumerate((ADAPTERS[:1], ADAPTERS)):
        changes = [AdapterResidency(digest, "host") for digest in digests]
        pool.on_step(number, StepResult([], [], SchedulerStats(num_blocks=8), adapter_changes=changes))
    parts = [(digest, 0.5) for digest in ADAPTERS]
    for i in range(4):
        assert core_of(pool, clients, i, [i] * 20, adapter_digest="sum:1", adapter_parts=parts) == 1


def test_moved_requests_keep_their_order():
    pool, clients = started_pool()
    for i in range(1, 41):
        pool.submit([SequenceRequest(i, [i] * 20, SamplingParams())], [i], None)
    kept, moved = list(clients[1].running), list(clients[0].running)
    pool.on_core_lost(0)
    assert list(clients[1].running) == kept + moved and len(moved) > 10


def test_hashes_are_those_of_the_prefix_cache_and_bounded():
    index = PrefixIndex(1, HASHER)
    tokens = list(range(16 * (MAX_BLOCKS + 9)))
    hashes = index.hash_prompt(tokens, ADAPTERS[0], "salt")
    assert len(hashes) == MAX_BLOCKS
    assert hashes[0] == HASHER.extend(HASHER.root(ADAPTERS[0], "salt"), tokens[:16])
    assert hashes[1] == HASHER.extend(hashes[0], tokens[16:32])


def test_hashes_before_an_invocation_are_those_of_the_base_model():
    pool, _ = started_pool()
    change = AdapterResidency(ADAPTERS[0], "host", invocation_tokens=[7, 8])
    pool.on_step(1, StepResult([], [], SchedulerStats(), adapter_changes=[change]))
    tokens = [*range(100, 140), 7, 8, *range(200, 240)]

    def hashes(adapter: str | None) -> list[bytes]:
        request = SequenceRequest(1, tokens, SamplingParams(), adapter)
        return pool.dispatcher.create_request([request], [1]).hashes

    base, invoked, plain = hashes(None), hashes(ADAPTERS[0]), hashes(ADAPTERS[1])
    assert [a == b for a, b in zip(base, invoked, strict=True)] == [True, True, False, False, False]
    assert not set(plain) & {*base, *invoked}


loads = st.builds(
    CoreLoad,
    queued_tokens=st.integers(0, 10**6),
    uncached_tokens=st.integers(0, 10**5),
    running_share=st.floats(0, 1),
    adapter_load_s=st.floats(0, 100),
    evicts_adapter=st.booleans(),
    silent_s=st.floats(0, 1000),
    kv_usage=st.floats(0, 1),
    served_last=st.booleans(),
)


@given(st.dictionaries(st.integers(0, 15), loads, min_size=1))
def test_the_chosen_core_has_the_smallest_estimate(load_by_core: dict[int, CoreLoad]):
    speeds = Speeds()
    chosen = choose_core(load_by_core, speeds)
    best = min(estimate_s(load, speeds) for load in load_by_core.values())
    assert estimate_s(load_by_core[chosen], speeds) == best
    ties = [load for load in load_by_core.values() if estimate_s(load, speeds) == best]
    if any(not load.evicts_adapter for load in ties):
        ties = [load for load in ties if not load.evicts_adapter]
    assert load_by_core[chosen] in ties
    if any(load.served_last for load in ties):
        assert load_by_core[chosen].served_last


@given(loads, st.integers(1, 10**5), st.integers(1, 10**5))
def test_more_work_never_attracts_a_request(load: CoreLoad, tokens: int, cached: int):
    speeds = Speeds()
    busier = CoreLoad(
        **{name: getattr(load, name) for name in CoreLoad.__slots__} | {"queued_tokens": load.queued_tokens + tokens}
    )
    assert estimate_s(busier, speeds) > estimate_s(load, speeds)
    fresh = CoreLoad(uncached_tokens=cached + tokens)
    assert choose_core({0: fresh, 1: CoreLoad(uncached_tokens=tokens)}, speeds) == 1


def test_a_silent_core_gets_no_more_requests():
    hanging = CoreLoad(silent_s=3.0)
    assert choose_core({0: hanging, 1: CoreLoad(queued_tokens=5000)}, Speeds()) == 1
    assert choose_core({0: CoreLoad(silent_s=0.5), 1: CoreLoad(queued_tokens=5000)}, Speeds()) == 0


def test_speeds_follow_the_steps():
    speeds = Speeds()
    for _ in range(300):
        speeds.record_step(0.03, 0, had_prompts=False)
        speeds.record_step(0.03 + 0.5, 0, had_prompts=True)
        speeds.record_step(0.03 + 0.5, 2000, had_prompts=True)
    assert speeds.step_s == pytest.approx(0.03, rel=0.01) and speeds.token_s == pytest.approx(1 / 2000, rel=0.03)


stats_of_a_core = st.builds(
    SchedulerStats,
    num_running=st.integers(0, 9),
    num_blocks=st.integers(0, 99),
    prefix_cache_hits=st.integers(0, 99),
    num_steps=st.integers(0, 99),
    accepted_draft_tokens_per_position=st.lists(st.integers(0, 9), min_size=2, max_size=2),
)


@given(st.lists(st.tuples(st.integers(0, 2), st.none() | stats_of_a_core), max_size=12))
def test_the_sum_of_all_cores(events: list[tuple[int, SchedulerStats | None]]):
    """Gauges are those of the living cores, and counters never decrease. None is the death of a core."""
    stats, living, hits = CoreStats(), dict[int, SchedulerStats](), 0
    for core, new in events:
        # The counters of a core grow while it lives.
        if new is not None and core in living and new.prefix_cache_hits < living[core].prefix_cache_hits:
            continue
        total = stats.remove(core) if new is None else stats.set(core, new)
        living = {n: s for n, s in living.items() if n != core} | ({} if new is None else {core: new})
        assert total.num_running == sum(s.num_running for s in living.values())
        assert total.num_blocks == sum(s.num_blocks for s in living.values())
        assert total.prefix_cache_hits >= hits
        hits = total.prefix_cache_hits


def test_every_number_is_added_up():
    one = SchedulerStats(
        **{name: 1 for name in SchedulerStats.__struct_fields__ if "adapters" not in name and "per_" not in name}
    )
    total = merge_stats([one, one, one])
    assert {
        getattr(total, n) for n in one.__struct_fields__ if isinstance(getattr(one, n), int) and getattr(one, n)
    } == {3}


def test_the_live_page_adds_up_cores():

    def core(rows: list[list[Any]]) -> dict[str, Any]:
        slots = [digest for digest, state, *_ in rows if state == "slot"]
        stats = msgspec.structs.asdict(SchedulerStats(num_blocks=4))
        return {"stats": stats, "slots": slots, "adapters": rows, "num_adapters": 2}

    a, b = ADAPTERS
    merged = merge_live(
        [
            core([[None, "", 1, 2, 3], [a, "disk", 0, 0, 0]]),
            core([[None, "", 4, 0, 1], [a, "slot", 1, 0, 2], [b, "host", 0, 0, 0]]),
        ]
    )
    assert merged["stats"]["num_blocks"] == 8 and merged["num_adapters"] == 2 and merged["slots"] == [a]
    assert merged["adapters"] == [[None, "", 5, 2, 4], [a, "slot", 1, 0, 2], [b, "host", 0, 0, 0]]
