# SPDX-License-Identifier: Apache-2.0
"""Whatever happens in whatever order, outputs are right and every block is accounted for."""

from collections.abc import Iterable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.fake_runner import VOCAB, expected_output
from support.scheduler_harness import SchedulerHarness

from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.sequence import SequenceStatus
from quire_spec.engine.config import EngineConfig

STOPS = frozenset(range(0, VOCAB, 8))


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts (also during a step) and failed steps in any order, on a pool for few."""

    @initialize(
        block_size=st.sampled_from([8, 16]),
        spare=st.integers(0, 6),
        caching=st.booleans(),
        chunked=st.booleans(),
        max_num_seqs=st.integers(1, 6),
        max_loras=st.integers(1, 2),
        policy=st.sampled_from(["fcfs", "priority"]),
        swap=st.builds(SwapCosts, st.integers(0, 12), st.sampled_from([0.0, 5.0]), st.just(1.0)),
        ahead=st.booleans(),
    )
    def start(
        self,
        block_size: int,
        spare: int,
        caching: bool,
        chunked: bool,
        max_num_seqs: int,
        max_loras: int,
        policy: str,
        swap: SwapCosts,
        ahead: bool,
    ) -> None:
        config = EngineConfig(
            "m",
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=24,
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            scheduling_policy=policy,
        )
        self.bench = SchedulerHarness(config, 48 // block_size + spare, 48, "abc", max_loras, swap, ahead)
        self.jobs: dict[int, tuple[list[int], int, str | None, frozenset[int]]] = {}
        self.open: set[int] = set()

    @rule(
        letter=st.integers(0, 1),
        length=st.integers(1, 24),
        num_output=st.integers(1, 23),
        adapter=st.sampled_from("0abc"),
        priority=st.integers(-1, 1),
        stops=st.sampled_from([frozenset[int](), STOPS]),
        waits=st.integers(0, 5),
    )
    def arrive(
        self,
        letter: int,
        length: int,
        num_output: int,
        adapter: str,
        priority: int,
        stops: frozenset[int],
        waits: int,
    ) -> None:
        digest = None if adapter == "0" else adapter
        priority = priority if self.bench.config.scheduling_policy == "priority" else 0
        fields: dict[str, Any] = {"adapter_digest": digest, "priority": priority, "stop_token_ids": stops}
        # Steps of one that has bad words are not begun ahead.
        fields |= {"bad_words": ((VOCAB,),)} if waits == 5 else {}
        sequence = self.bench.add([letter] * length, num_output, **fields)
        self.jobs[sequence.id] = (sequence.prompt_token_ids, num_output, digest, stops)
        self.open.add(sequence.id)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), num_output=st.integers(1, 23))
    def fork(self, data: st.DataObject, num_output: int) -> None:
        prompt, _, digest, stops = self.jobs[leader := data.draw(st.sampled_from(sorted(self.open)))]
        priority = data.draw(st.integers(-1, 1)) if self.bench.config.scheduling_policy == "priority" else 0
        fields: dict[str, Any] = {"adapter_digest": digest, "priority": priority, "stop_token_ids": stops}
        sequence = self.bench.add(prompt, num_output, parent_id=leader, **fields)
        self.jobs[sequence.id] = (prompt, num_output, digest, stops)
        self.open.add(sequence.id)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.drop_open([data.draw(st.sampled_from(sorted(self.open)))])

    def drop_open(self, ids: Iterable[int]) -> None:
        self.open.difference_update(ids)
        self.bench.scheduler.abort(ids)

    @rule(num=st.integers(1, 12))
    def steps(self, num: int) -> None:
        for _ in range(num):
            self.bench.step()
        self.collect()

    @rule(data=st.data(), fails=st.booleans())
    def step_with_aborts(self, data: st.DataObject, fails: bool) -> None:
        flight = self.bench.launch()
        if flight is None:
            assert not self.bench.scheduler.has_work
            return
        self.bench.launch_lookahead()
        self.bench.scheduler.check_integrity()
        ids = sorted(self.open)
        self.drop_open(data.draw(st.lists(st.sampled_from(ids), max_size=2)) if ids else [])
        self.bench.scheduler.check_integrity()
        if fails:
            self.drop_open([sequence.id for sequence in self.bench.fail_step(flight)])
        else:
            self.bench.complete(flight)
        self.collect()

    def collect(self) -> None:
        for i in [i for i in self.open if self.bench.sequences[i].status is SequenceStatus.FINISHED]:
            assert self.bench.outputs[i] == expected_output(*self.jobs[i])
            self.open.remove(i)

    @invariant()
    def is_whole(self) -> None:
        self.bench.scheduler.check_integrity()
        assert self.bench.scheduler.num_running + self.bench.scheduler.num_waiting == len(self.open)
        for sequence in self.bench.sequences.values():
            # Less than a block of each sequence is wasted, at any time.
            allocated = len(sequence.block_table) * self.bench.config.block_size
            assert allocated < sequence.num_tokens + self.bench.config.block_size

    def teardown(self) -> None:
        for _ in range(24 * (len(self.open) + 1) * 2):
            self.bench.now += 1.0
            self.bench.step()
            self.collect()
        assert not self.open and self.bench.block_pool.num_used == 0
        assert self.bench.scheduler.block_manager.num_used_host_blocks == 0
        self.bench.registry.check_integrity({}, {})


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=30)
