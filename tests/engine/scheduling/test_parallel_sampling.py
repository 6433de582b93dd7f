# SPDX-License-Identifier: Apache-2.0
"""Forks share their leader's prompt and nothing that either writes."""

from dataclasses import replace

import pytest
from support.fake_runner import expected_output
from support.scheduler_harness import CONFIG, SchedulerHarness

from quire_spec.errors import InvalidArgument


@pytest.mark.parametrize("length", [17, 20, 24])
@pytest.mark.parametrize("caching", [True, False])
def test_forks_share_the_prompt_and_copy_the_block_that_it_ends_in(caching: bool, length: int) -> None:
    bench = SchedulerHarness(replace(CONFIG, enable_prefix_caching=caching))
    leader = bench.add(length, 6)
    prompt = leader.prompt_token_ids
    forks = [bench.add(prompt, 6, parent_id=0) for _ in range(3)]
    other = bench.add(5, 6)
    # They wait for the leader's prompt and hold nobody back.
    assert bench.step() == [(0, 0, length), (other.id, 0, 5)]
    assert bench.step()[2:] == [(fork.id, length - 1, 1) for fork in forks]
    assert bench.scheduler.block_manager.num_block_copies == (0 if length == 17 else 3)
    # Three blocks of the leader's, two of them shared, one more for each fork, one for the other sequence.
    assert bench.block_pool.num_used == 3 + 3 + 1 + (length == 24)
    bench.run()
    assert bench.runner.num_computed == length + 5 + 3 * 6 + 5 + 5
    assert [bench.outputs[i] for i in range(4)] == [expected_output(prompt, 6)] * 4


def test_forks_of_a_leader_in_chunks_wait_for_its_last_chunk() -> None:
    bench = SchedulerHarness(replace(CONFIG, max_num_batched_tokens=16))
    prompt = bench.add(30, 2).prompt_token_ids
    bench.add(prompt, 2, parent_id=0)
    assert [bench.step() for _ in range(3)] == [[(0, 0, 16)], [(0, 16, 14)], [(0, 30, 1), (1, 29, 1)]]


def test_a_fork_starts_without_a_leader_that_is_gone() -> None:
    bench = SchedulerHarness()
    prompt = bench.add(20, 4).prompt_token_ids
    forks = [bench.add(prompt, 4, parent_id=leader) for leader in (0, 1)]
    bench.scheduler.abort([0])
    assert bench.step() == [(1, 0, 20)]
    # A fork may lead, and go at any time.
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None and len(plan.copies) == 1
    bench.scheduler.abort([1])
    [(fork, sampled)] = bench.scheduler.update_from_step(plan, bench.runner.execute(plan))
    assert fork is forks[1]
    bench.outputs[fork.id] = sampled.token_ids
    bench.add(prompt, 4, parent_id=77)
    assert bench.step() == [(2, 20, 1), (3, 0, 20)]
    bench.run()
    assert [bench.outputs[2], bench.outputs[3]] == [expected_output(prompt, 4)] * 2


def test_a_fork_of_a_preempted_leader_starts_when_that_is_back() -> None:
    bench = SchedulerHarness(num_blocks=8, max_model_len=40)
    bench.add(7, 33)
    bench.add(7, 33)
    bench.run_until_preempted()
    fork = bench.add(bench.sequences[1].prompt_token_ids, 3, parent_id=1)
    bench.scheduler.abort([0])
    assert [bench.step() for _ in range(2)] == [[(1, 0, 33)], [(1, 33, 1), (fork.id, 6, 1)]]
    bench.run()
    assert bench.outputs[2] == expected_output([1] * 7, 3)


def test_a_failed_step_ends_a_leader_and_its_forks_and_nobody_else() -> None:
    bench = SchedulerHarness(replace(CONFIG, max_num_seqs=2))
    prompt = bench.add(20, 9).prompt_token_ids
    for _ in range(2):
        bench.add(prompt, 4, parent_id=0)
    bench.step()
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None
    assert [s.id for s in bench.scheduler.fail_step(plan)] == [0, 1]
    bench.scheduler.check_integrity()
    assert bench.run()[2] == expected_output(prompt, 4)


def test_a_fork_that_differs_from_its_leader_is_refused() -> None:
    bench = SchedulerHarness(adapter_digests="ab")
    bench.add([1, 2, 3], adapter_digest="a", cache_salt="s")
    same = {"prompt": [1, 2, 3], "adapter_digest": "a", "cache_salt": "s", "parent_id": 0}
    for name, value in [("prompt", [1, 2, 4]), ("adapter_digest", "b"), ("cache_salt", None)]:
        with pytest.raises(InvalidArgument, match=f"parent_id: sequence 0 has another {name}"):
            bench.add(**(same | {name: value}))
    bench.add(**same)
    assert len(bench.sequences) == 2
    bench.run()


def test_an_urgent_fork_does_not_preempt_its_leader() -> None:
    bench = SchedulerHarness(replace(CONFIG, scheduling_policy="priority"), num_blocks=7, max_model_len=48)
    prompt = bench.add(20, 20, priority=5).prompt_token_ids
    bench.add(9, 9, priority=4)
    bench.step()
    bench.add(prompt, 20, priority=0, parent_id=0)
    assert bench.step() == [(0, 20, 1), (2, 19, 1)]
    bench.run()
    assert bench.outputs[0] == bench.outputs[2] == expected_output(prompt, 20)


def test_what_forks_share_is_no_favourite_of_others() -> None:
    bench = SchedulerHarness(replace(CONFIG, enable_prefix_caching=True), num_blocks=16)
    for prompt, fork_of in (([0] * 33, None), ([0] * 33, 0), ([1] * 33, None), ([1] * 33, None)):
        bench.add(prompt, 1, parent_id=fork_of)
        if fork_of is None:
            bench.step()
    bench.run()
    for one_off in range(2, 8):
        bench.add([one_off] * 33, 1)
        bench.run()
    for prompt in ([0] * 33, [1] * 33):
        before = bench.scheduler.prefix_cache.num_hits
        bench.add(prompt, 1)
        bench.run()
        assert bench.scheduler.prefix_cache.num_hits - before == (0 if prompt[0] == 0 else 32)
