# SPDX-License-Identifier: Apache-2.0
"""More urgent sequences run first, and take what they need from the less urgent ones, and no more."""

from dataclasses import replace

import pytest
from support.fake_runner import expected_output
from support.scheduler_harness import CONFIG, SchedulerHarness

from quire_engine.sequence import SequenceStatus
from quire_spec.errors import InvalidArgument

PRIORITY = replace(CONFIG, scheduling_policy="priority")


def test_waiting_sequences_start_by_priority_then_arrival() -> None:
    bench = SchedulerHarness(replace(PRIORITY, max_num_seqs=1))
    bench.add(5, 1)
    for priority in (3, -1, 3, 0):
        bench.add(5, 1, priority=priority)
    assert [bench.step()[0][0] for _ in range(5)] == [2, 0, 4, 1, 3]
    with pytest.raises(InvalidArgument, match="priority: 2, but scheduling_policy is fcfs"):
        SchedulerHarness().add(5, priority=2)


def test_an_urgent_prompt_goes_before_the_chunks_of_others() -> None:
    bench = SchedulerHarness(replace(PRIORITY, max_num_batched_tokens=16))
    bench.add(60, 1, priority=1)
    assert bench.step() == [(0, 0, 16)]
    bench.add(10, 3)
    assert bench.step() == [(1, 0, 10), (0, 16, 6)]
    bench.add(20, 1)
    assert [bench.step() for _ in range(2)] == [[(1, 10, 1), (2, 0, 15)], [(1, 11, 1), (2, 15, 5), (0, 22, 10)]]
    assert bench.scheduler.num_preemptions == 0
    bench.run()


def test_growth_preempts_the_least_urgent_and_the_last_of_them() -> None:
    bench = SchedulerHarness(PRIORITY, num_blocks=8, max_model_len=24)
    for priority in (2, 0, 2, 1):
        bench.add(7, 17, priority=priority)
    bench.run_until_preempted()
    # Two blocks for those that need their third: what the last gave up. Then the next to last finds none.
    assert [s.num_preemptions for s in bench.sequences.values()] == [1, 0, 1, 0]
    bench.run()
    assert bench.outputs == {i: expected_output([i] * 7, 17) for i in range(4)}


def test_an_urgent_arrival_takes_the_seat_of_the_last_in_rank_and_nobody_elses() -> None:
    bench = SchedulerHarness(replace(PRIORITY, max_num_seqs=3))
    for priority in (1, 0, 1):
        bench.add(5, 9, priority=priority)
    bench.step()
    bench.add(5, 9, priority=1)
    assert [i for i, _, _ in bench.step()] == [1, 0, 2]
    bench.add(5, 2, priority=0)
    # Its seat, and in this step its place: nobody else's token waits.
    assert bench.step() == [(1, 6, 1), (0, 6, 1), (4, 0, 5)]
    assert bench.sequences[2].status is SequenceStatus.PREEMPTED
    bench.add(5, 2, priority=0)
    assert bench.step() == [(1, 7, 1), (4, 5, 1), (5, 0, 5)]
    assert bench.step() == [(1, 8, 1), (5, 5, 1), (0, 0, 8)]
    bench.run()
    assert bench.outputs == {i: expected_output([i] * 5, 9 if i < 4 else 2) for i in range(6)}


def test_an_urgent_arrival_takes_blocks_of_as_few_as_it_needs_and_of_none_in_vain() -> None:
    bench = SchedulerHarness(PRIORITY, num_blocks=17, max_model_len=136)
    for priority in (0, 2, 1, 2):
        bench.add(20, 4, priority=priority)
    bench.step()
    assert bench.block_pool.num_free == 5
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
