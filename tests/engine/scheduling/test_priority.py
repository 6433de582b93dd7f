# SPDX-License-Identifier: Apache-2.0
"""More urgent sequences run first, and preempt only as many less urgent ones as necessary."""

from dataclasses import replace

from support.fake_runner import expected_output
from support.scheduler_harness import CONFIG, SchedulerHarness

from quire_engine.sequence import SequenceStatus

PRIORITY = replace(CONFIG, scheduling_policy="priority")


def test_waiting_sequences_start_by_priority_then_arrival() -> None:
    harness = SchedulerHarness(replace(PRIORITY, max_num_seqs=1))
    harness.add(5, 1)
    for priority in (3, -1, 3, 0):
        harness.add(5, 1, priority=priority)
    assert [harness.step()[0][0] for _ in range(5)] == [2, 0, 4, 1, 3]


def test_priorities_have_no_effect_without_the_policy() -> None:
    harness = SchedulerHarness(replace(CONFIG, max_num_seqs=1))
    for priority in (3, -1, 0):
        harness.add(5, 1, priority=priority)
    assert [harness.step()[0][0] for _ in range(3)] == [0, 1, 2]


def test_urgent_prompt_runs_before_partial_prefills_of_others() -> None:
    harness = SchedulerHarness(replace(PRIORITY, max_num_batched_tokens=16))
    harness.add(60, 1, priority=1)
    assert harness.step() == [(0, 0, 16)]
    harness.add(10, 3)
    assert harness.step() == [(1, 0, 10), (0, 16, 6)]
    harness.add(20, 1)
    assert [harness.step() for _ in range(2)] == [[(1, 10, 1), (2, 0, 15)], [(1, 11, 1), (2, 15, 5), (0, 22, 10)]]
    assert harness.scheduler.num_preemptions == 0
    harness.run()


def test_decoding_preempts_the_last_arrival_of_the_least_urgent() -> None:
    harness = SchedulerHarness(PRIORITY, num_blocks=8, max_model_len=24)
    for priority in (2, 0, 2, 1):
        harness.add(7, 17, priority=priority)
    harness.run_until_preempted()
    # The last sequence frees two blocks, which two others take as their third ones. Then the next to last finds none.
    assert [s.num_preemptions for s in harness.sequences.values()] == [1, 0, 1, 0]
    harness.run()
    assert harness.outputs == {i: expected_output([i] * 7, 17) for i in range(4)}


def test_urgent_arrival_preempts_only_the_least_urgent_at_max_num_seqs() -> None:
    harness = SchedulerHarness(replace(PRIORITY, max_num_seqs=3))
    for priority in (1, 0, 1):
        harness.add(5, 9, priority=priority)
    harness.step()
    harness.add(5, 9, priority=1)
    assert [i for i, _, _ in harness.step()] == [1, 0, 2]
    harness.add(5, 2, priority=0)
    # It replaces the preempted sequence in the same step, and no other sequence loses its token.
    assert harness.step() == [(1, 6, 1), (0, 6, 1), (4, 0, 5)]
    assert harness.sequences[2].status is SequenceStatus.PREEMPTED
    harness.add(5, 2, priority=0)
    assert harness.step() == [(1, 7, 1), (4, 5, 1), (5, 0, 5)]
    assert harness.step() == [(1, 8, 1), (5, 5, 1), (0, 0, 8)]
    harness.run()
    assert harness.outputs == {i: expected_output([i] * 5, 9 if i < 4 else 2) for i in range(6)}


def test_urgent_arrival_preempts_as_few_as_needed_and_none_without_effect() -> None:
    harness = SchedulerHarness(PRIORITY, num_blocks=17, max_model_len=136)
    for priority in (0, 2, 1, 2):
        harness.add(20, 4, priority=priority)
    harness.step()
    assert harness.block_pool.num_free == 5
    # It needs eight blocks and a reserve of three: two must be preempted, the latest of the least urgent first.
    harness.add([9] * 57, 1, priority=0)
    assert {i for i, _, _ in harness.step()} == {0, 2, 4}
    assert [s.num_preemptions for s in harness.sequences.values()] == [0, 1, 0, 1, 0]
    harness.run()
    for priority in (0, 2):
        harness.add(20, 9, priority=priority)
    harness.step()
    # It would not fit beside the more urgent one, even if all others were preempted.
    harness.add([9] * 120, 1, priority=1)
    assert {i for i, _, _ in harness.step()} == {5, 6}
    harness.run()
    assert harness.outputs[7] == expected_output([9] * 120, 1)
