# SPDX-License-Identifier: Apache-2.0
"""Forks share the prompt blocks of their parent, but no block that either of them writes."""

from dataclasses import replace

import pytest
from support.fake_runner import expected_output
from support.scheduler_harness import CONFIG, SchedulerHarness

from quire_spec.errors import InvalidArgument


@pytest.mark.parametrize("length", [17, 20, 24])
@pytest.mark.parametrize("caching", [True, False])
def test_forks_share_the_prompt_and_copy_its_partial_block(caching: bool, length: int) -> None:
    harness = SchedulerHarness(replace(CONFIG, enable_prefix_caching=caching))
    parent = harness.add(length, 6)
    prompt = parent.prompt_token_ids
    forks = [harness.add(prompt, 6, parent_id=0) for _ in range(3)]
    other = harness.add(5, 6)
    # Forks wait for the parent's prompt and delay no other sequence.
    assert harness.step() == [(0, 0, length), (other.id, 0, 5)]
    assert harness.step()[2:] == [(fork.id, length - 1, 1) for fork in forks]
    assert harness.scheduler.block_manager.num_block_copies == (0 if length == 17 else 3)
    # The parent has three blocks and shares two. Each fork has one more, and the other sequence has one.
    assert harness.block_pool.num_used == 3 + 3 + 1 + (length == 24)
    harness.run()
    assert harness.runner.num_computed == length + 5 + 3 * 6 + 5 + 5
    assert [harness.outputs[i] for i in range(4)] == [expected_output(prompt, 6)] * 4


def test_forks_wait_for_the_last_chunk_of_their_parent() -> None:
    harness = SchedulerHarness(replace(CONFIG, max_num_batched_tokens=16))
    prompt = harness.add(30, 2).prompt_token_ids
    harness.add(prompt, 2, parent_id=0)
    assert [harness.step() for _ in range(3)] == [[(0, 0, 16)], [(0, 16, 14)], [(0, 30, 1), (1, 29, 1)]]


def test_rejects_a_fork_that_differs_from_its_parent() -> None:
    harness = SchedulerHarness(adapter_digests="ab")
    harness.add([1, 2, 3], adapter_digest="a", cache_salt="s")
    fields = {"prompt": [1, 2, 3], "adapter_digest": "a", "cache_salt": "s", "parent_id": 0}
    for name, value in [("prompt", [1, 2, 4]), ("adapter_digest", "b"), ("cache_salt", None)]:
        with pytest.raises(InvalidArgument, match=f"parent_id: sequence 0 has a different {name}"):
            harness.add(**(fields | {name: value}))
    harness.add(**fields)
    assert len(harness.sequences) == 2
    harness.run()


def test_urgent_fork_does_not_preempt_its_parent() -> None:
    harness = SchedulerHarness(replace(CONFIG, scheduling_policy="priority"), num_blocks=7, max_model_len=48)
    prompt = harness.add(20, 20, priority=5).prompt_token_ids
    harness.add(9, 9, priority=4)
    harness.step()
    harness.add(prompt, 20, priority=0, parent_id=0)
    assert harness.step() == [(0, 20, 1), (2, 19, 1)]
    harness.run()
    assert harness.outputs[0] == harness.outputs[2] == expected_output(prompt, 20)


def test_blocks_shared_by_forks_are_not_protected() -> None:
    harness = SchedulerHarness(replace(CONFIG, enable_prefix_caching=True), num_blocks=16)
    for prompt, parent_id in (([0] * 33, None), ([0] * 33, 0), ([1] * 33, None), ([1] * 33, None)):
        harness.add(prompt, 1, parent_id=parent_id)
        if parent_id is None:
            harness.step()
    harness.run()
    for one_off in range(2, 8):
        harness.add([one_off] * 33, 1)
        harness.run()
    for prompt in ([0] * 33, [1] * 33):
        hits_before = harness.scheduler.prefix_cache.num_hits
        harness.add(prompt, 1)
        harness.run()
        assert harness.scheduler.prefix_cache.num_hits - hits_before == (0 if prompt[0] == 0 else 32)
