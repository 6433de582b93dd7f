# SPDX-License-Identifier: Apache-2.0
"""The scheduler: exact batches for scripted arrivals, equal output in every mode, and invariants in any order."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.runner import TokenRunner, expected_output, next_token

from quire_engine.adapters import AdapterRegistry
from quire_engine.blocks import BlockPool, ContentKey
from quire_engine.request import FinishReason, Sequence, Status
from quire_engine.scheduler import Scheduler
from quire_engine.step import Sampled, StepPlan
from quire_engine.swap import SwapSpace
from quire_spec.config import EngineConfig
from quire_spec.errors import ConfigError, Internal, InvalidArgument, NotFound
from quire_spec.sampling import SamplingParams

CONFIG = EngineConfig("m", block_size=8, max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=False)

NO_SWAP = SwapSpace()
ALWAYS_SWAP = SwapSpace(64, block_s=0.0, token_s=1.0)


@dataclass
class Bench:
    """A scheduler with a token runner; `blocks` small enough that tests can count them."""

    config: EngineConfig = CONFIG
    num_blocks: int = 32
    max_model_len: int = 128
    adapters: str = ""
    max_loras: int = 2
    swap: SwapSpace = NO_SWAP
    now: float = 0.0
    outputs: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.blocks = BlockPool(self.num_blocks)
        self.registry = AdapterRegistry(self.max_loras, 4 * self.max_loras)
        self.runner = TokenRunner(self.num_blocks, self.config.block_size, swap_space=self.swap)
        for digest in self.adapters:
            self.registry.add(digest, Path(digest), False)
            self.runner.hold(digest, digest)
        key = ContentKey("m", "float32", self.config.block_size)
        self.scheduler = Scheduler(self.config, self.blocks, self.registry, key, self.max_model_len, self.swap)
        self.sequences: dict[int, Sequence] = {}

    def add(self, prompt: list[int] | int, num_output: int = 4, **fields: Any) -> Sequence:
        """Queue a sequence; a number stands for that many prompt tokens of its own."""
        number = len(self.sequences)
        if isinstance(prompt, int):
            prompt = [number] * prompt
        params = SamplingParams(max_tokens=num_output, min_tokens=fields.pop("min_tokens", 0))
        sequence = Sequence(number, prompt, params, 0, num_output, **fields)
        self.scheduler.add(sequence)
        self.sequences[number] = sequence
        return sequence

    def step(self) -> list[tuple[int, int, int]]:
        """One step; returns its batch as (id, start, length), empty when nothing can run."""
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        if plan is None:
            return []
        for sequence, sampled in self.scheduler.finish(plan, self.runner.execute(plan)):
            self.outputs.setdefault(sequence.id, []).extend(sampled.token_ids)
        self.scheduler.check_integrity()
        return self.runner.batches[-1]

    def run_until_preempted(self) -> list[tuple[int, int, int]]:
        """Steps until one preempts a sequence; returns its batch."""
        while self.scheduler.has_work:
            batch = self.step()
            if self.scheduler.num_preemptions:
                return batch
        raise AssertionError("nobody was preempted")

    def run(self) -> dict[int, list[int]]:
        """Steps until everything is over; every step has work."""
        while self.scheduler.has_work:
            assert self.step()
        assert self.blocks.num_used == 0 and self.scheduler.tables.num_used_host_blocks == 0
        return self.outputs


def test_decode_comes_first_then_chunks_then_waiting_ones_in_order() -> None:
    bench = Bench(replace(CONFIG, max_num_batched_tokens=20))
    bench.add(12)
    bench.add(30, 2)
    assert bench.step() == [(0, 0, 12), (1, 0, 8)]
    assert bench.step() == [(0, 12, 1), (1, 8, 19)]
    bench.add(5, 1)
    bench.add(60, 1)
    assert bench.step() == [(0, 13, 1), (1, 27, 3), (2, 0, 5), (3, 0, 11)]
    assert bench.step() == [(0, 14, 1), (1, 30, 1), (3, 11, 18)]
    assert bench.step() == [(3, 29, 20)]
    assert bench.step() == [(3, 49, 11)]
    assert bench.step() == []
    assert {i: s.finish_reason for i, s in bench.sequences.items()} == dict.fromkeys(range(4), FinishReason.LENGTH)


def test_without_chunking_a_prompt_runs_whole_or_waits() -> None:
    bench = Bench(replace(CONFIG, max_num_batched_tokens=20, enable_chunked_prefill=False))
    bench.add(12, 2)
    bench.add(10)
    bench.add(3)
    # 10 tokens do not fit beside 12, and 3 do not overtake them.
    assert bench.step() == [(0, 0, 12)]
    assert bench.step() == [(0, 12, 1), (1, 0, 10), (2, 0, 3)]
    with pytest.raises(InvalidArgument, match="21 tokens exceed max_num_batched_tokens 20"):
        bench.add(21)


def test_max_num_seqs_bounds_the_batch() -> None:
    bench = Bench(replace(CONFIG, max_num_seqs=2))
    for _ in range(4):
        bench.add(3, 2)
    assert bench.step() == [(0, 0, 3), (1, 0, 3)]
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 2)
    assert bench.step() == [(0, 3, 1), (1, 3, 1)]
    assert bench.step() == [(2, 0, 3), (3, 0, 3)]


def test_started_names_a_sequence_once() -> None:
    bench = Bench(num_blocks=4, max_model_len=32)
    for _ in range(2):
        bench.add(8, 20)
    started = []
    while plan := bench.scheduler.schedule(0.0):
        started += plan.started
        bench.scheduler.finish(plan, bench.runner.execute(plan))
    assert started == [0, 1]
    assert bench.scheduler.num_preemptions > 0


def test_a_cached_prefix_is_skipped_but_never_the_whole_prompt() -> None:
    bench = Bench(replace(CONFIG, enable_prefix_caching=True))
    prompt = list(range(24))
    bench.add(prompt, 1)
    assert bench.step() == [(0, 0, 24)]
    bench.add(prompt, 1)
    bench.add([*prompt[:17], 99, 98], 1)
    # All three blocks of the prompt are cached; the last token is computed again, so that there are logits, in a copy
    # of the third one, which others may find.
    assert bench.step() == [(1, 23, 1), (2, 16, 3)]
    assert bench.scheduler.tables.num_block_copies == 1
    assert (bench.scheduler.prefixes.num_queries, bench.scheduler.prefixes.num_hits) == (24 + 24 + 19, 23 + 16)
    assert bench.outputs[0] == bench.outputs[1] == [next_token(prompt, None)]


def test_output_blocks_are_cached_too() -> None:
    bench = Bench(replace(CONFIG, enable_prefix_caching=True))
    bench.add(6, 20)
    [output] = bench.run().values()
    # 25 of 26 tokens were computed: three full blocks.
    bench.add([0] * 6 + output, 1)
    assert bench.step() == [(1, 24, 2)]


@pytest.mark.parametrize("length", [17, 20, 24])
@pytest.mark.parametrize("caching", [True, False])
def test_forks_share_the_prompt_and_copy_the_block_that_it_ends_in(caching: bool, length: int) -> None:
    bench = Bench(replace(CONFIG, enable_prefix_caching=caching))
    leader = bench.add(length, 6)
    prompt = leader.prompt_token_ids
    forks = [bench.add(prompt, 6, fork_of=0) for _ in range(3)]
    other = bench.add(5, 6)
    # They wait for the leader's prompt and hold nobody back.
    assert bench.step() == [(0, 0, length), (other.id, 0, 5)]
    assert bench.step()[2:] == [(fork.id, length - 1, 1) for fork in forks]
    assert bench.scheduler.tables.num_block_copies == (0 if length == 17 else 3)
    # Three blocks of the leader's, two of them shared, one more for each fork, one for the other sequence.
    assert bench.blocks.num_used == 3 + 3 + 1 + (length == 24)
    bench.run()
    assert bench.runner.num_computed == length + 5 + 3 * 6 + 5 + 5
    assert [bench.outputs[i] for i in range(4)] == [expected_output(prompt, 6)] * 4


def test_forks_of_a_leader_in_chunks_wait_for_its_last_chunk() -> None:
    bench = Bench(replace(CONFIG, max_num_batched_tokens=16))
    prompt = bench.add(30, 2).prompt_token_ids
    bench.add(prompt, 2, fork_of=0)
    assert [bench.step() for _ in range(3)] == [[(0, 0, 16)], [(0, 16, 14)], [(0, 30, 1), (1, 29, 1)]]


def test_a_fork_starts_without_a_leader_that_is_gone() -> None:
    bench = Bench()
    prompt = bench.add(20, 4).prompt_token_ids
    forks = [bench.add(prompt, 4, fork_of=leader) for leader in (0, 1)]
    bench.scheduler.abort([0])
    assert bench.step() == [(1, 0, 20)]
    # A fork may lead, and go at any time.
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None and len(plan.copies) == 1
    bench.scheduler.abort([1])
    [(fork, sampled)] = bench.scheduler.finish(plan, bench.runner.execute(plan))
    assert fork is forks[1]
    bench.outputs[fork.id] = sampled.token_ids
    bench.add(prompt, 4, fork_of=77)
    assert bench.step() == [(2, 20, 1), (3, 0, 20)]
    bench.run()
    assert [bench.outputs[2], bench.outputs[3]] == [expected_output(prompt, 4)] * 2


def test_a_fork_of_a_preempted_leader_starts_when_that_is_back() -> None:
    bench = Bench(num_blocks=8, max_model_len=40)
    bench.add(7, 33)
    bench.add(7, 33)
    bench.run_until_preempted()
    fork = bench.add(bench.sequences[1].prompt_token_ids, 3, fork_of=1)
    bench.scheduler.abort([0])
    assert [bench.step() for _ in range(2)] == [[(1, 0, 33)], [(1, 33, 1), (fork.id, 6, 1)]]
    bench.run()
    assert bench.outputs[2] == expected_output([1] * 7, 3)


def test_a_failed_step_ends_a_leader_and_its_forks_and_nobody_else() -> None:
    bench = Bench(replace(CONFIG, max_num_seqs=2))
    prompt = bench.add(20, 9).prompt_token_ids
    for _ in range(2):
        bench.add(prompt, 4, fork_of=0)
    bench.step()
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None
    assert [s.id for s in bench.scheduler.fail(plan)] == [0, 1]
    bench.scheduler.check_integrity()
    assert bench.run()[2] == expected_output(prompt, 4)


def test_a_fork_that_differs_from_its_leader_is_refused() -> None:
    bench = Bench(adapters="ab")
    bench.add([1, 2, 3], adapter="a", cache_salt="s")
    same = {"prompt": [1, 2, 3], "adapter": "a", "cache_salt": "s", "fork_of": 0}
    for name, value in [("prompt", [1, 2, 4]), ("adapter", "b"), ("cache_salt", None)]:
        with pytest.raises(InvalidArgument, match=f"fork_of: sequence 0 has another {name}"):
            bench.add(**(same | {name: value}))
    bench.add(**same)
    assert len(bench.sequences) == 2
    bench.run()


def test_the_last_free_blocks_are_computed_in_rather_than_copied_to() -> None:
    bench = Bench(replace(CONFIG, enable_prefix_caching=True), num_blocks=3, max_model_len=24)
    bench.add([0] * 16, 1)
    bench.run()
    bench.add([0] * 16, 1)
    assert bench.step() == [(1, 15, 1)]
    bench.add([0] * 23, 1)
    bench.run()
    # All of its three blocks, and none to copy from beside them.
    bench.add([0] * 16 + [1] * 7, 1)
    bench.run()
    assert bench.runner.batches[-2:] == [[(2, 16, 7)], [(3, 16, 7)]]


@pytest.mark.parametrize("field", ["adapter", "cache_salt"])
def test_prefixes_are_not_shared_across_adapters_or_salts(field: str) -> None:
    bench = Bench(replace(CONFIG, enable_prefix_caching=True), adapters="ab")
    for value in ("a", "b", None, "a"):
        bench.add([5] * 20, 1, **{field: value})
        bench.step()
    assert [batch[0][1] for batch in bench.runner.batches] == [0, 0, 0, 16]


def test_stop_tokens_length_and_min_tokens() -> None:
    bench = Bench()
    expected = expected_output([0] * 5, 8)
    stopped = bench.add(5, 8, stop_token_ids=frozenset(expected[2:3]))
    bench.run()
    assert (bench.outputs[0], stopped.finish_reason) == (expected[:3], FinishReason.STOP)
    expected = expected_output([1] * 5, 8)
    # The sampler masks stop tokens for the first min_tokens tokens; one that appears there ends nothing.
    full = bench.add(5, 8, stop_token_ids=frozenset(expected[2:3]), min_tokens=3)
    last = bench.add([1] * 5, 8, stop_token_ids=frozenset(expected[3:4]), min_tokens=3)
    bench.run()
    assert (bench.outputs[1], full.finish_reason) == (expected, FinishReason.LENGTH)
    assert (bench.outputs[2], last.finish_reason) == (expected[:4], FinishReason.STOP)


def test_tokens_behind_the_last_one_do_not_count() -> None:
    bench = Bench()
    sequence = bench.add(5, 8, stop_token_ids=frozenset([7]))
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None
    # As a speculating runner may answer: more tokens than the sequence wants.
    [(_, sampled)] = bench.scheduler.finish(plan, [Sampled([3, 7, 9], [[], [], []])])
    assert (sampled.token_ids, sampled.logprobs) == ([3, 7], [[], []])
    assert sequence.output_token_ids == [3, 7]


def test_the_last_admitted_is_preempted_and_comes_back_when_it_fits_again() -> None:
    # Four blocks: two sequences of one block each, growing to three blocks each.
    bench = Bench(num_blocks=4, max_model_len=24)
    bench.add(7, 17)
    bench.add(7, 17)
    bench.add(7, 17)
    batch = bench.run_until_preempted()
    # At token 16 both need a third block, and there is none.
    assert batch == [(0, 16, 1)]
    assert bench.sequences[1].status is Status.PREEMPTED and not bench.sequences[1].block_table
    while bench.sequences[0].status is Status.RUNNING:
        assert bench.step()[0][0] == 0
    # It goes before those that never ran.
    assert bench.step() == [(1, 0, 17)]
    bench.run()
    assert bench.outputs == {i: expected_output([i] * 7, 17) for i in range(3)}
    assert bench.scheduler.num_preemptions == 1


@pytest.mark.parametrize("caching", [False, True])
def test_a_swapped_sequence_goes_on_where_it_was(caching: bool) -> None:
    bench = Bench(replace(CONFIG, enable_prefix_caching=caching), num_blocks=4, max_model_len=24, swap=ALWAYS_SWAP)
    bench.add(7, 17)
    bench.add(7, 17)
    bench.run_until_preempted()
    tables = bench.scheduler.tables
    assert (tables.num_swapped_out_blocks, tables.num_used_host_blocks, bench.scheduler.num_swapped) == (2, 2, 1)
    swapped = bench.sequences[1]
    assert swapped.status is Status.PREEMPTED and not swapped.block_table
    while bench.sequences[0].status is Status.RUNNING:
        bench.step()
    # Its 17th token is all that is computed, and it fills its third block.
    assert bench.step() == [(1, 16, 1)]
    bench.run()
    assert bench.outputs == {i: expected_output([i] * 7, 17) for i in range(2)}
    assert bench.runner.num_computed == 2 * (7 + 16)
    # With caching its first block is still where it was; the second one was needed by the other.
    assert tables.num_swapped_in_blocks == (1 if caching else 2)


def test_what_swapping_brought_back_is_found_by_others() -> None:
    config = replace(CONFIG, enable_prefix_caching=True)
    bench = Bench(config, num_blocks=6, max_model_len=40, swap=ALWAYS_SWAP)
    bench.add(16, 20)
    bench.add(16, 20)
    while bench.scheduler.has_work:
        bench.step()
        if bench.scheduler.tables.num_swapped_in_blocks and len(bench.sequences) == 2:
            bench.add([1] * 16 + [99], 1)
    assert (2, 16, 1) in [span for batch in bench.runner.batches for span in batch]
    assert bench.outputs[2] == expected_output([1] * 16 + [99], 1)


def test_swapping_must_pay_and_what_others_hold_is_free_to_compute() -> None:
    # A block for the time of six tokens.
    swap = SwapSpace(64, block_s=6.0, token_s=1.0)
    assert swap.pays(2, 13) and not swap.pays(2, 12) and not swap.pays(0, 0)
    bench = Bench(num_blocks=6, max_model_len=40, swap=swap)
    prompt = bench.add(17, 23).prompt_token_ids
    bench.add(prompt, 23, fork_of=0)
    bench.run_until_preempted()
    # Two blocks are shared, and the two of its own are full.
    assert bench.scheduler.tables.num_swapped_out_blocks == 2 and bench.sequences[1].num_left_blocks == 2
    bench.run()
    assert bench.outputs == dict.fromkeys(range(2), expected_output(prompt, 23))


def test_what_a_swapped_sequence_left_behind_may_be_gone() -> None:
    bench = Bench(num_blocks=6, max_model_len=40, swap=ALWAYS_SWAP)
    prompt = bench.add(17, 23).prompt_token_ids
    bench.add(prompt, 23, fork_of=0)
    bench.run_until_preempted()
    bench.scheduler.abort([0])
    assert bench.step() == [(1, 0, 32)]
    assert bench.scheduler.tables.num_swapped_in_blocks == 0
    assert bench.run()[1] == expected_output(prompt, 23)


@pytest.mark.parametrize(("num_host_blocks", "block_s"), [(1, 0.0), (64, 99.0), (0, 0.0)])
def test_without_room_or_gain_a_preempted_sequence_is_computed_again(num_host_blocks: int, block_s: float) -> None:
    swap = SwapSpace(num_host_blocks, block_s, token_s=1.0)
    bench = Bench(num_blocks=4, max_model_len=24, swap=swap)
    for _ in range(2):
        bench.add(7, 17)
    bench.run()
    assert bench.scheduler.num_preemptions == 1 and bench.scheduler.tables.num_swapped_out_blocks == 0
    assert bench.outputs == {i: expected_output([i] * 7, 17) for i in range(2)}


def swapping() -> tuple[Bench, StepPlan]:
    """A bench with a step in flight that swaps sequence 1 out."""
    bench = Bench(num_blocks=4, max_model_len=24, swap=ALWAYS_SWAP)
    for _ in range(2):
        bench.add(7, 17)
    while True:
        plan = bench.scheduler.schedule(0.0)
        assert plan is not None
        if plan.swap_outs:
            return bench, plan
        bench.scheduler.finish(plan, bench.runner.execute(plan))


def test_abort_gives_host_blocks_back_also_during_the_step_that_fills_them() -> None:
    bench, plan = swapping()
    bench.scheduler.abort([1])
    bench.scheduler.check_integrity()
    assert bench.scheduler.tables.num_used_host_blocks == 0
    bench.scheduler.finish(plan, bench.runner.execute(plan))
    bench.run()
    bench, plan = swapping()
    bench.scheduler.finish(plan, bench.runner.execute(plan))
    assert bench.scheduler.tables.num_used_host_blocks == 2
    bench.scheduler.abort([1])
    bench.run()


def test_a_failed_step_leaves_nothing_of_what_it_swapped_out() -> None:
    bench, plan = swapping()
    assert [s.id for s in bench.scheduler.fail(plan)] == [0]
    bench.scheduler.check_integrity()
    assert bench.scheduler.tables.num_used_host_blocks == 0
    assert bench.step() == [(1, 0, 17)]


def test_a_failed_step_ends_those_it_swapped_in() -> None:
    bench, plan = swapping()
    bench.scheduler.finish(plan, bench.runner.execute(plan))
    bench.scheduler.abort([0])
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None and len(plan.swap_ins) == 2
    # Its places are read in the step, so nobody gets them before it is over.
    bench.scheduler.check_integrity()
    assert bench.scheduler.tables.num_used_host_blocks == 2
    assert [s.id for s in bench.scheduler.fail(plan)] == [1]
    bench.scheduler.check_integrity()
    assert bench.scheduler.tables.num_used_host_blocks == 0 and not bench.scheduler.has_work


PRIORITY = replace(CONFIG, scheduling_policy="priority")


def test_waiting_sequences_start_by_priority_then_arrival() -> None:
    bench = Bench(replace(PRIORITY, max_num_seqs=1))
    bench.add(5, 1)
    for priority in (3, -1, 3, 0):
        bench.add(5, 1, priority=priority)
    assert [bench.step()[0][0] for _ in range(5)] == [2, 0, 4, 1, 3]
    with pytest.raises(InvalidArgument, match="priority: 2, but scheduling_policy is fcfs"):
        Bench().add(5, priority=2)


def test_an_urgent_prompt_goes_before_the_chunks_of_others() -> None:
    bench = Bench(replace(PRIORITY, max_num_batched_tokens=16))
    bench.add(60, 1, priority=1)
    assert bench.step() == [(0, 0, 16)]
    bench.add(10, 3)
    assert bench.step() == [(1, 0, 10), (0, 16, 6)]
    bench.add(20, 1)
    assert [bench.step() for _ in range(2)] == [[(1, 10, 1), (2, 0, 15)], [(1, 11, 1), (2, 15, 5), (0, 22, 10)]]
    assert bench.scheduler.num_preemptions == 0
    bench.run()


def test_growth_preempts_the_least_urgent_and_the_last_of_them() -> None:
    bench = Bench(PRIORITY, num_blocks=8, max_model_len=24)
    for priority in (2, 0, 2, 1):
        bench.add(7, 17, priority=priority)
    bench.run_until_preempted()
    # Two blocks for those that need their third: what the last gave up. Then the next to last finds none.
    assert [s.num_preemptions for s in bench.sequences.values()] == [1, 0, 1, 0]
    bench.run()
    assert bench.outputs == {i: expected_output([i] * 7, 17) for i in range(4)}


def test_an_urgent_arrival_takes_the_seat_of_the_last_in_rank_and_nobody_elses() -> None:
    bench = Bench(replace(PRIORITY, max_num_seqs=3))
    for priority in (1, 0, 1):
        bench.add(5, 9, priority=priority)
    bench.step()
    bench.add(5, 9, priority=1)
    assert [i for i, _, _ in bench.step()] == [1, 0, 2]
    bench.add(5, 2, priority=0)
    # Its seat, and in this step its place: nobody else's token waits.
    assert bench.step() == [(1, 6, 1), (0, 6, 1), (4, 0, 5)]
    assert bench.sequences[2].status is Status.PREEMPTED
    bench.add(5, 2, priority=0)
    assert bench.step() == [(1, 7, 1), (4, 5, 1), (5, 0, 5)]
    assert bench.step() == [(1, 8, 1), (5, 5, 1), (0, 0, 8)]
    bench.run()
    assert bench.outputs == {i: expected_output([i] * 5, 9 if i < 4 else 2) for i in range(6)}


def test_an_urgent_arrival_takes_blocks_of_as_few_as_it_needs_and_of_none_in_vain() -> None:
    bench = Bench(PRIORITY, num_blocks=17, max_model_len=136)
    for priority in (0, 2, 1, 2):
        bench.add(20, 4, priority=priority)
    bench.step()
    assert bench.blocks.num_free == 5
    # Eight blocks and three in reserve: two must go, the latest of the least urgent first.
    bench.add([9] * 57, 1, priority=0)
    assert {i for i, _, _ in bench.step()} == {0, 2, 4}
    assert [s.num_preemptions for s in bench.sequences.values()] == [0, 1, 0, 1, 0]
    bench.run()
    for priority in (0, 2):
        bench.add(20, 9, priority=priority)
    bench.step()
    # Beside the more urgent one there is no room for it even alone.
    bench.add([9] * 120, 1, priority=1)
    assert {i for i, _, _ in bench.step()} == {5, 6}
    bench.run()
    assert bench.outputs[7] == expected_output([9] * 120, 1)


def test_an_urgent_fork_does_not_preempt_its_leader() -> None:
    bench = Bench(PRIORITY, num_blocks=7, max_model_len=48)
    prompt = bench.add(20, 20, priority=5).prompt_token_ids
    bench.add(9, 9, priority=4)
    bench.step()
    bench.add(prompt, 20, priority=0, fork_of=0)
    assert bench.step() == [(0, 20, 1), (2, 19, 1)]
    bench.run()
    assert bench.outputs[0] == bench.outputs[2] == expected_output(prompt, 20)


def test_a_preempted_sequence_longer_than_a_step_comes_back_in_chunks_even_without_chunking() -> None:
    config = replace(CONFIG, enable_chunked_prefill=False, max_num_batched_tokens=16)
    bench = Bench(config, num_blocks=6, max_model_len=48)
    bench.add(14, 30)
    bench.add(14, 30)
    bench.run()
    assert bench.scheduler.num_preemptions == 1
    chunks = [span for batch in bench.runner.batches for span in batch if span[2] > 1]
    assert chunks == [(0, 0, 14), (1, 0, 14), (1, 0, 16), (1, 16, 8)]
    assert bench.outputs == {i: expected_output([i] * 14, 30) for i in range(2)}


def test_what_can_never_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len: 128 tokens need 16 KV blocks of 8 tokens, the cache has 15"):
        Bench(num_blocks=15)
    bench = Bench(num_blocks=16)
    with pytest.raises(InvalidArgument, match="128 tokens leave no room for output; max_model_len is 128"):
        bench.add(128)
    with pytest.raises(NotFound):
        bench.add(1, adapter="sha256:none")
    bench.add(127, 1)
    bench.run()
    with pytest.raises(InvalidArgument, match="id 1: a sequence of this id is open"):
        bench.add(3, 5)
        bench.scheduler.add(bench.sequences[1])


def test_abort_during_a_step_takes_effect_after_it() -> None:
    bench = Bench(adapters="a")
    bench.add(20, adapter="a")
    bench.add(5)
    bench.add(5)
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None
    bench.scheduler.abort([0, 2, 77])
    bench.scheduler.check_integrity()
    # The runner may still write to its blocks and slot.
    assert bench.blocks.num_used == 5 and bench.registry.running() == ["a"]
    progress = bench.scheduler.finish(plan, bench.runner.execute(plan))
    bench.scheduler.check_integrity()
    assert [sequence.id for sequence, _ in progress] == [1]
    assert bench.blocks.num_used == 1 and bench.registry.running() == []
    assert bench.sequences[0].finish_reason is FinishReason.ABORT
    bench.scheduler.abort([1])
    assert not bench.scheduler.has_work and bench.blocks.num_used == 0


def test_a_failed_step_ends_its_sequences_only_and_keeps_good_blocks() -> None:
    bench = Bench(replace(CONFIG, enable_prefix_caching=True, max_num_seqs=2), adapters="a")
    bench.add([4] * 16, 1)
    bench.run()
    bench.add([4] * 20)
    bench.add(9, adapter="a")
    bench.add(9, adapter="a")
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None and len(plan.loads) == 1
    assert [s.id for s in bench.scheduler.fail(plan)] == [1, 2]
    bench.scheduler.check_integrity()
    assert bench.sequences[1].finish_reason is FinishReason.ERROR and bench.blocks.num_used == 0
    # The slot's load is not to be trusted either, and is done again.
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None and [load.digest for load in plan.loads] == ["a"]
    bench.scheduler.finish(plan, bench.runner.execute(plan))
    bench.add([4] * 20, 1)
    assert (4, 16, 4) in bench.step()
    bench.run()
    assert bench.sequences[3].output_token_ids == expected_output([3] * 9, 4, "a")
    assert bench.outputs[4] == expected_output([4] * 20, 1)


def test_a_sequence_without_a_slot_stops_nobody_and_gets_one_in_time() -> None:
    bench = Bench(replace(CONFIG, max_num_seqs=4), adapters="ab", max_loras=1)
    bench.add(3, 9, adapter="a")
    blocked = bench.add(3, 9, adapter="b")
    bench.add(3, 9)
    assert [i for i, _, _ in bench.step()] == [0, 2]
    assert blocked.status is Status.WAITING_ADAPTER
    # New sequences of a keep coming, so its slot would never become free.
    for _ in range(200):
        bench.now += 0.1
        if bench.scheduler.num_running + bench.scheduler.num_waiting < 5:
            bench.add(3, 9, adapter="a")
        bench.step()
        if blocked.status is Status.RUNNING:
            break
    assert bench.now < 1.0 + 0.1 * (9 + 3)
    bench.run()
    assert bench.outputs[blocked.id] == expected_output([1] * 3, 9, "b")


def test_nothing_is_runnable_while_all_wait_for_copies() -> None:
    bench = Bench(max_loras=1)
    for digest in "abcdef":
        bench.registry.add(digest, Path(digest), False)
    assert bench.registry.states()["a"] == "disk"
    for dropped in bench.registry.take_dropped():
        assert dropped in "ab"
    waiting = bench.add(3, adapter="a")
    assert bench.scheduler.runnable
    assert bench.step() == []
    assert not bench.scheduler.runnable and bench.scheduler.has_work
    [(digest, path)] = bench.registry.take_fetches()
    assert bench.registry.add(digest, path)
    bench.runner.hold(digest, digest)
    bench.scheduler.wake()
    assert bench.scheduler.runnable and bench.step() == [(0, 0, 3)]
    # And one whose copy cannot be had is over.
    failing = bench.add(3, adapter="b")
    assert bench.registry.take_fetches()
    assert bench.scheduler.fail_adapter("b") == [failing]
    bench.registry.fail("b")
    bench.scheduler.check_integrity()
    assert waiting.status is Status.RUNNING


def test_check_integrity_sees_damage() -> None:
    bench = Bench()
    sequence = bench.add(20)
    bench.step()
    sequence.block_table.pop()
    with pytest.raises(Internal, match=r"sequences \[0\] lack blocks"):
        bench.scheduler.check_integrity()


MODES: dict[str, Callable[[EngineConfig], EngineConfig]] = {
    "as it is": lambda c: c,
    "prefix cache": lambda c: replace(c, enable_prefix_caching=True),
    "no chunking": lambda c: replace(c, enable_chunked_prefill=False),
    "prefix cache, no chunking": lambda c: replace(c, enable_prefix_caching=True, enable_chunked_prefill=False),
    "small steps": lambda c: replace(c, max_num_batched_tokens=c.max_num_seqs),
}


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("mode", MODES)
def test_output_is_the_same_in_every_mode(mode: str, block_size: int) -> None:
    """Against the output that follows from the prompt alone; with a pool for everything, and for hardly anything."""
    draw = random.Random(f"{mode} {block_size}")
    chunked = MODES[mode](CONFIG).enable_chunked_prefill
    longest = 60 if chunked else 56
    jobs = [
        ([draw.randrange(2)] * draw.randint(1, longest), draw.randint(1, 150), draw.choice("ab0")) for _ in range(24)
    ]
    max_model_len = 256
    num_preemptions = []
    for num_blocks in (16384 // block_size, max_model_len // block_size + 1):
        bench = Bench(MODES[mode](replace(CONFIG, block_size=block_size)), num_blocks, max_model_len, "ab")
        for prompt, num_output, adapter in jobs:
            bench.add(prompt, num_output, adapter=None if adapter == "0" else adapter)
        outputs = bench.run()
        for i, (prompt, num_output, adapter) in enumerate(jobs):
            assert outputs[i] == expected_output(prompt, num_output, None if adapter == "0" else adapter)
        num_preemptions.append(bench.scheduler.num_preemptions)
    assert num_preemptions[0] == 0
    # Two blocks of 128 tokens for sequences of up to 210: hardly two ever run at once.
    assert num_preemptions[1] > 0 or block_size >= 64


@pytest.mark.parametrize("caching", [False, True])
def test_an_overloaded_pool_does_not_thrash(caching: bool) -> None:
    """200 sequences, of which the pool holds five: steps pass between admissions and preemptions, and work is kept."""
    config = replace(CONFIG, max_num_seqs=16, max_num_batched_tokens=256, enable_prefix_caching=caching)
    bench = Bench(config, num_blocks=48, max_model_len=384)
    draw = random.Random(3)
    needed = 0
    for _ in range(200):
        prompt, output = draw.randint(1, 100), draw.randint(1, 120)
        bench.add(prompt, output)
        needed += prompt + output - 1
    last_admission, step, num_preemptions = 0, 0, 0
    while bench.scheduler.has_work:
        running = set(bench.scheduler._running)
        assert bench.step()
        step += 1
        if bench.scheduler.num_preemptions > num_preemptions:
            num_preemptions = bench.scheduler.num_preemptions
            assert step - last_admission >= bench.config.block_size
            assert set(bench.scheduler._running) <= running
        elif set(bench.scheduler._running) - running:
            last_admission = step
    assert 0 < num_preemptions < 200
    # What preempted sequences compute again is a fraction of the work.
    assert bench.runner.num_computed < 1.5 * needed


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
        swap=st.builds(SwapSpace, st.integers(0, 12), st.sampled_from([0.0, 5.0]), st.just(1.0)),
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
        swap: SwapSpace,
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
        self.bench = Bench(config, 48 // block_size + spare, 48, "abc", max_loras, swap)
        self.jobs: dict[int, tuple[list[int], int, str | None]] = {}
        self.open: set[int] = set()

    @rule(
        letter=st.integers(0, 1),
        length=st.integers(1, 24),
        num_output=st.integers(1, 23),
        adapter=st.sampled_from("0abc"),
        priority=st.integers(-1, 1),
    )
    def arrive(self, letter: int, length: int, num_output: int, adapter: str, priority: int) -> None:
        digest = None if adapter == "0" else adapter
        priority = priority if self.bench.config.scheduling_policy == "priority" else 0
        sequence = self.bench.add([letter] * length, num_output, adapter=digest, priority=priority)
        self.jobs[sequence.id] = (sequence.prompt_token_ids, num_output, digest)
        self.open.add(sequence.id)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), num_output=st.integers(1, 23))
    def fork(self, data: st.DataObject, num_output: int) -> None:
        prompt, _, digest = self.jobs[leader := data.draw(st.sampled_from(sorted(self.open)))]
        priority = data.draw(st.integers(-1, 1)) if self.bench.config.scheduling_policy == "priority" else 0
        sequence = self.bench.add(prompt, num_output, adapter=digest, fork_of=leader, priority=priority)
        self.jobs[sequence.id] = (prompt, num_output, digest)
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
        plan = self.bench.scheduler.schedule(self.bench.now)
        if plan is None:
            assert not self.bench.scheduler.has_work
            return
        sampled = self.bench.runner.execute(plan)
        self.bench.scheduler.check_integrity()
        ids = sorted(self.open)
        self.drop_open(data.draw(st.lists(st.sampled_from(ids), max_size=2)) if ids else [])
        self.bench.scheduler.check_integrity()
        if fails:
            self.drop_open([sequence.id for sequence in self.bench.scheduler.fail(plan)])
        else:
            for sequence, result in self.bench.scheduler.finish(plan, sampled):
                self.bench.outputs.setdefault(sequence.id, []).extend(result.token_ids)
        self.collect()

    def collect(self) -> None:
        for i in [i for i in self.open if self.bench.sequences[i].status is Status.FINISHED]:
            prompt, num_output, adapter = self.jobs[i]
            assert self.bench.outputs[i] == expected_output(prompt, num_output, adapter)
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
        assert not self.open and self.bench.blocks.num_used == 0
        assert self.bench.scheduler.tables.num_used_host_blocks == 0
        self.bench.registry.check_integrity({}, {})


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
