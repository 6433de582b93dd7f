# SPDX-License-Identifier: Apache-2.0
"""For any order of events, outputs are correct and no block is lost."""

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.block_mirror import BlockMirror
from support.fake_runner import VOCAB, expected_beam_outputs, expected_output
from support.scheduler_harness import NEVER_SWAP, ONE_GROUP, SchedulerHarness

from quire_engine.kv_cache.block_events import BlockEventLog
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.sequence import BeamGroup, SequenceStatus
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.speculative_config import SpeculativeConfig
from quire_spec.errors import InvalidArgument
from quire_spec.model.kv_layout import KVLayout

STOPS = frozenset(range(0, VOCAB, 8))
LAYOUTS = [
    ONE_GROUP,
    KVLayout.uniform(1, window=9),
    # Layers by group, groups, groups without a window, window.
    KVLayout(1, (0, 1), (0, 0), 2, 1, 5),
    KVLayout(2, (0, 0, 1, 2, 1, 2, 2), (0, 1, 0, 0, 1, 1, 0), 3, 1, 16),
    KVLayout(1, (0, 1, 2), (0, 0, 0), 3, 2, 20),
]


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts (also during a step) and failed steps in any order, with a small pool."""

    @initialize(
        block_size=st.sampled_from([8, 16]),
        num_spare_blocks=st.integers(0, 6),
        caching=st.booleans(),
        chunked=st.booleans(),
        max_num_seqs=st.integers(1, 6),
        max_loras=st.integers(1, 2),
        policy=st.sampled_from(["fcfs", "priority"]),
        swap=st.builds(SwapCosts, st.integers(0, 12), st.sampled_from([0.0, 5.0]), st.just(1.0)),
        lookahead=st.booleans(),
        num_drafts=st.sampled_from([0, 0, 3]),
        layout=st.sampled_from(LAYOUTS),
        offload=st.booleans(),
        has_store=st.booleans(),
        miss_ratio=st.sampled_from([0.0, 0.3]),
        num_snapshots=st.sampled_from([None, None, 0, 1, 4]),
    )
    def start(
        self,
        block_size: int,
        num_spare_blocks: int,
        caching: bool,
        chunked: bool,
        max_num_seqs: int,
        max_loras: int,
        policy: str,
        swap: SwapCosts,
        lookahead: bool,
        num_drafts: int,
        layout: KVLayout,
        offload: bool,
        has_store: bool,
        miss_ratio: float,
        num_snapshots: int | None,
    ) -> None:
        if num_snapshots is not None:
            # Models with states refuse or ignore the rest.
            layout, has_store = ONE_GROUP, has_store and offload and caching
            swap = replace(swap, num_host_states=2, num_blocks_per_state=1) if offload else NEVER_SWAP
        if layout.num_groups > 1:
            swap = NEVER_SWAP
        config = EngineConfig(
            "m",
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=24,
            enable_prefix_caching=caching,
            kv_offloading_size=float(offload and caching),
            enable_chunked_prefill=chunked,
            scheduling_policy=policy,
            # On this device, the policy of drafts gives them to steps of any size here.
            device="cuda",
            speculative_config=SpeculativeConfig("ngram", num_drafts) if num_drafts else None,
        )
        num_blocks = 48 // block_size * layout.num_groups + num_spare_blocks
        self.harness = SchedulerHarness(
            config,
            num_blocks,
            48,
            "abcd",
            max_loras,
            swap,
            lookahead and not num_drafts,
            layout,
            {"c": (0, 1), "d": (1, 0)},
            has_store,
            0 if num_snapshots is None else max_num_seqs + num_snapshots,
        )
        for store in filter(None, (self.harness.store, self.harness.state_store)):
            store.miss_ratio = miss_ratio
        self.event_log = self.harness.block_pool.event_log = BlockEventLog()
        self.mirror = BlockMirror(self.harness.block_hasher)
        self.requests: dict[int, tuple[list[int], int, str | None, frozenset[int]]] = {}
        self.num_drafts = num_drafts
        self.searches: dict[int, BeamGroup] = {}
        self.expected_beams: dict[int, list[list[int]]] = {}
        self.open_ids: set[int] = set()

    @rule(
        letter=st.integers(0, 1),
        length=st.integers(1, 24),
        switch=st.integers(0, 24),
        num_output=st.integers(1, 23),
        adapter_letter=st.sampled_from("0abcd"),
        priority=st.integers(-1, 1),
        stops=st.sampled_from([frozenset[int](), STOPS]),
        bad_words_draw=st.integers(0, 5),
        client=st.sampled_from(["a", "a", "b", "c"]),
    )
    def arrive(
        self,
        letter: int,
        length: int,
        switch: int,
        num_output: int,
        adapter_letter: str,
        priority: int,
        stops: frozenset[int],
        bad_words_draw: int,
        client: str,
    ) -> None:
        adapter_digest = None if adapter_letter == "0" else adapter_letter
        priority = priority if self.harness.config.scheduling_policy == "priority" else 0
        fields: dict[str, Any] = {"adapter_digest": adapter_digest, "priority": priority, "stop_token_ids": stops}
        fields |= {"client": client}
        # A sequence with bad words is excluded from lookahead.
        fields |= {"bad_words": ((VOCAB,),)} if bad_words_draw == 5 else {}
        # The invocations of the adapters c and d are changes of the letter.
        prompt = [letter if index < switch else 1 - letter for index in range(length)]
        sequence = self.harness.add(prompt, num_output, **fields)
        self.requests[sequence.id] = (prompt, num_output, sequence.adapter_until(length), stops)
        self.open_ids.add(sequence.id)

    @rule(
        length=st.integers(1, 20),
        num_output=st.integers(1, 16),
        adapter_letter=st.sampled_from("0ad"),
        priority=st.integers(-1, 1),
        stops=st.sampled_from([frozenset[int](), STOPS]),
        width=st.integers(1, 4),
        length_penalty=st.sampled_from([0.0, 1.0]),
        early_stopping=st.sampled_from([True, False, "never"]),
        client=st.sampled_from("ab"),
    )
    def search(
        self,
        length: int,
        num_output: int,
        adapter_letter: str,
        priority: int,
        stops: frozenset[int],
        width: int,
        length_penalty: float,
        early_stopping: bool | str,
        client: str,
    ) -> None:
        params = {"use_beam_search": True, "n": width}
        params |= {"length_penalty": length_penalty, "early_stopping": early_stopping}
        fields: dict[str, Any] = {"stop_token_ids": stops, "params": params, "client": client}
        fields |= {"adapter_digest": None if adapter_letter == "0" else adapter_letter}
        fields |= {"priority": priority} if self.harness.config.scheduling_policy == "priority" else {}
        with contextlib.suppress(InvalidArgument):
            sequence = self.harness.add([7] * (length // 2) + [1, 0] + [7] * (length // 2), num_output, **fields)
            assert sequence.beam_group is not None
            self.searches[sequence.id] = sequence.beam_group
            self.expected_beams[sequence.id] = expected_beam_outputs(sequence)
            self.open_ids.add(sequence.id)

    @precondition(lambda self: self.open_ids & self.requests.keys())
    @rule(data=st.data(), num_output=st.integers(1, 23))
    def fork(self, data: st.DataObject, num_output: int) -> None:
        prompt, _, active_digest, stops = self.requests[parent_id := self.draw_request(data)]
        priority = data.draw(st.integers(-1, 1)) if self.harness.config.scheduling_policy == "priority" else 0
        fields: dict[str, Any] = {"priority": priority, "stop_token_ids": stops}
        fields |= {"adapter_digest": self.harness.sequences[parent_id].adapter_digest}
        sequence = self.harness.add(prompt, num_output, parent_id=parent_id, **fields)
        self.requests[sequence.id] = (prompt, num_output, active_digest, stops)
        self.open_ids.add(sequence.id)

    @precondition(lambda self: self.open_ids)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.abort_open([data.draw(st.sampled_from(sorted(self.open_ids)))])

    def abort_open(self, ids: Iterable[int]) -> None:
        self.open_ids.difference_update(ids)
        self.harness.scheduler.abort(ids)

    @rule(num=st.integers(1, 4), seconds=st.sampled_from([0.0, 3.0]))
    def transfers_end(self, num: int, seconds: float) -> None:
        self.harness.now += seconds
        self.harness.complete_transfers(num)
        self.harness.scheduler.check_integrity()

    @rule(num=st.integers(1, 12))
    def steps(self, num: int) -> None:
        for _ in range(num):
            self.harness.step()
        self.collect()

    @rule(data=st.data(), step_fails=st.booleans())
    def step_with_aborts(self, data: st.DataObject, step_fails: bool) -> None:
        in_flight = self.harness.launch()
        if in_flight is None:
            assert not self.harness.scheduler.has_work
            return
        self.harness.launch_lookahead()
        self.harness.scheduler.check_integrity()
        ids = sorted(self.open_ids)
        self.abort_open(data.draw(st.lists(st.sampled_from(ids), max_size=2)) if ids else [])
        self.harness.scheduler.check_integrity()
        if step_fails:
            self.abort_open([sequence.id for sequence in self.harness.fail_step(in_flight)])
        else:
            self.harness.complete(in_flight)
        self.collect()

    def draw_request(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.open_ids & self.requests.keys())))

    def collect(self) -> None:
        for i in [i for i in self.open_ids & self.searches.keys() if i in self.harness.outputs]:
            expected = self.expected_beams[i]
            assert [self.harness.outputs[i + index] for index in range(len(expected))] == expected
            self.open_ids.remove(i)
        open_requests = self.open_ids & self.requests.keys()
        for i in [i for i in open_requests if self.harness.sequences[i].status is SequenceStatus.FINISHED]:
            assert self.harness.outputs[i] == expected_output(*self.requests[i])
            self.open_ids.remove(i)

    @invariant()
    def state_is_consistent(self) -> None:
        self.harness.scheduler.check_integrity()
        if (traffic := self.harness.scheduler.store_traffic) is not None:
            reads = [key for transfer in traffic._transfers if transfer.is_read for key in transfer.keys]
            assert len(reads) == len(set(reads)) <= self.harness.scheduler.host_cache.pool.num_blocks // 2
        self.mirror.apply(self.event_log.pop())
        assert self.mirror.keys == set(self.harness.block_pool.cached_hashes())
        beams = [beam for i in self.open_ids & self.searches.keys() for beam in self.searches[i].sequences]
        num_unfinished = len(self.open_ids & self.requests.keys()) + len(beams)
        assert self.harness.scheduler.num_running + self.harness.scheduler.num_waiting == num_unfinished
        assert self.harness.scheduler.num_running <= self.harness.config.max_num_seqs
        for sequence in [*self.harness.sequences.values(), *beams]:
            # Each sequence wastes less than one block at any time, beside those of a rejected draft.
            num_groups = self.harness.layout.num_groups
            allocated = len(sequence.block_table) * self.harness.config.block_size / num_groups
            assert allocated < sequence.num_tokens + self.num_drafts + self.harness.config.block_size

    def teardown(self) -> None:
        for _ in range(24 * (len(self.open_ids) + 1) * 8):
            self.harness.now += 1.0
            self.harness.step()
            self.collect()
        self.harness.complete_transfers()
        if self.harness.scheduler.store_traffic is not None:
            self.harness.scheduler.store_traffic.poll()
        assert not self.open_ids and self.harness.block_pool.num_used == 0
        assert self.harness.scheduler.block_manager.num_used_host_blocks == 0
        self.harness.registry.check_integrity({}, {})


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=30)
