# SPDX-License-Identifier: Apache-2.0
"""Preempted sequences go to host memory and come back as they were, or are computed again."""

from dataclasses import replace

import pytest
from support.fake_runner import expected_output
from support.scheduler_harness import ALWAYS_SWAP, CONFIG, SchedulerHarness

from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.sequence import SequenceStatus
from quire_engine.step.plan import StepPlan


@pytest.mark.parametrize("caching", [False, True])
def test_a_swapped_sequence_goes_on_where_it_was(caching: bool) -> None:
    bench = SchedulerHarness(
        replace(CONFIG, enable_prefix_caching=caching), num_blocks=4, max_model_len=24, swap_costs=ALWAYS_SWAP
    )
    bench.add(7, 17)
    bench.add(7, 17)
    bench.run_until_preempted()
    tables = bench.scheduler.block_manager
    assert (tables.num_swapped_out_blocks, tables.num_used_host_blocks, bench.scheduler.num_swapped) == (2, 2, 1)
    swapped = bench.sequences[1]
    assert swapped.status is SequenceStatus.PREEMPTED and not swapped.block_table
    while bench.sequences[0].status is SequenceStatus.RUNNING:
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
    bench = SchedulerHarness(config, num_blocks=6, max_model_len=40, swap_costs=ALWAYS_SWAP)
    bench.add(16, 20)
    bench.add(16, 20)
    while bench.scheduler.has_work:
        bench.step()
        if bench.scheduler.block_manager.num_swapped_in_blocks and len(bench.sequences) == 2:
            bench.add([1] * 16 + [99], 1)
    assert (2, 16, 1) in [span for batch in bench.runner.batches for span in batch]
    assert bench.outputs[2] == expected_output([1] * 16 + [99], 1)


def test_swapping_must_pay_and_what_others_hold_is_free_to_compute() -> None:
    # A block for the time of six tokens.
    swap = SwapCosts(64, seconds_per_block=6.0, seconds_per_token=1.0)
    assert swap.is_worthwhile(2, 13) and not swap.is_worthwhile(2, 12) and not swap.is_worthwhile(0, 0)
    bench = SchedulerHarness(num_blocks=6, max_model_len=40, swap_costs=swap)
    prompt = bench.add(17, 23).prompt_token_ids
    bench.add(prompt, 23, parent_id=0)
    bench.run_until_preempted()
    # Two blocks are shared, and the two of its own are full.
    assert bench.scheduler.block_manager.num_swapped_out_blocks == 2 and bench.sequences[1].num_shared_blocks == 2
    bench.run()
    assert bench.outputs == dict.fromkeys(range(2), expected_output(prompt, 23))


def test_what_a_swapped_sequence_left_behind_may_be_gone() -> None:
    bench = SchedulerHarness(num_blocks=6, max_model_len=40, swap_costs=ALWAYS_SWAP)
    prompt = bench.add(17, 23).prompt_token_ids
    bench.add(prompt, 23, parent_id=0)
    bench.run_until_preempted()
    bench.scheduler.abort([0])
    assert bench.step() == [(1, 0, 32)]
    assert bench.scheduler.block_manager.num_swapped_in_blocks == 0
    assert bench.run()[1] == expected_output(prompt, 23)


@pytest.mark.parametrize(("num_host_blocks", "block_s"), [(1, 0.0), (64, 99.0), (0, 0.0)])
def test_without_room_or_gain_a_preempted_sequence_is_computed_again(num_host_blocks: int, block_s: float) -> None:
    swap = SwapCosts(num_host_blocks, block_s, seconds_per_token=1.0)
    bench = SchedulerHarness(num_blocks=4, max_model_len=24, swap_costs=swap)
    for _ in range(2):
        bench.add(7, 17)
    bench.run()
    assert bench.scheduler.num_preemptions == 1 and bench.scheduler.block_manager.num_swapped_out_blocks == 0
    assert bench.outputs == {i: expected_output([i] * 7, 17) for i in range(2)}


def swapping() -> tuple[SchedulerHarness, StepPlan]:
    """A bench with a step in flight that swaps sequence 1 out."""
    bench = SchedulerHarness(num_blocks=4, max_model_len=24, swap_costs=ALWAYS_SWAP)
    for _ in range(2):
        bench.add(7, 17)
    while True:
        plan = bench.scheduler.schedule(0.0)
        assert plan is not None
        if plan.swap_outs:
            return bench, plan
        bench.scheduler.update_from_step(plan, bench.runner.execute(plan))


def test_abort_gives_host_blocks_back_also_during_the_step_that_fills_them() -> None:
    bench, plan = swapping()
    bench.scheduler.abort([1])
    bench.scheduler.check_integrity()
    assert bench.scheduler.block_manager.num_used_host_blocks == 0
    bench.scheduler.update_from_step(plan, bench.runner.execute(plan))
    bench.run()
    bench, plan = swapping()
    bench.scheduler.update_from_step(plan, bench.runner.execute(plan))
    assert bench.scheduler.block_manager.num_used_host_blocks == 2
    bench.scheduler.abort([1])
    bench.run()


def test_a_failed_step_leaves_nothing_of_what_it_swapped_out() -> None:
    bench, plan = swapping()
    assert [s.id for s in bench.scheduler.fail_step(plan)] == [0]
    bench.scheduler.check_integrity()
    assert bench.scheduler.block_manager.num_used_host_blocks == 0
    assert bench.step() == [(1, 0, 17)]


def test_a_failed_step_ends_those_it_swapped_in() -> None:
    bench, plan = swapping()
    bench.scheduler.update_from_step(plan, bench.runner.execute(plan))
    bench.scheduler.abort([0])
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None and len(plan.swap_ins) == 2
    # Its places are read in the step, so nobody gets them before it is over.
    bench.scheduler.check_integrity()
    assert bench.scheduler.block_manager.num_used_host_blocks == 2
    assert [s.id for s in bench.scheduler.fail_step(plan)] == [1]
    bench.scheduler.check_integrity()
    assert bench.scheduler.block_manager.num_used_host_blocks == 0 and not bench.scheduler.has_work
