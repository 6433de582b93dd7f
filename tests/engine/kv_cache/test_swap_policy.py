# SPDX-License-Identifier: Apache-2.0
"""Preempted sequences are swapped to host memory and restored unchanged, or computed again."""

from dataclasses import replace

import pytest
from support.fake_runner import expected_output
from support.scheduler_harness import ALWAYS_SWAP, CONFIG, SchedulerHarness

from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.sequence import SequenceStatus


@pytest.mark.parametrize("caching", [False, True])
def test_swapped_sequence_resumes_where_it_was(caching: bool) -> None:
    harness = SchedulerHarness(
        replace(CONFIG, enable_prefix_caching=caching), num_blocks=4, max_model_len=24, swap_costs=ALWAYS_SWAP
    )
    harness.add(7, 17)
    harness.add(7, 17)
    harness.run_until_preempted()
    block_manager = harness.scheduler.block_manager
    assert (
        block_manager.num_swapped_out_blocks,
        block_manager.num_used_host_blocks,
        harness.scheduler.num_swapped,
    ) == (2, 2, 1)
    swapped = harness.sequences[1]
    assert swapped.status is SequenceStatus.PREEMPTED and not swapped.block_table
    while harness.sequences[0].status is SequenceStatus.RUNNING:
        harness.step()
    # Only its 17th token is computed, which is in its third block.
    assert harness.step() == [(1, 16, 1)]
    harness.run()
    assert harness.outputs == {i: expected_output([i] * 7, 17) for i in range(2)}
    assert harness.runner.num_computed == 2 * (7 + 16)
    # With prefix caching its first block is still cached; the other sequence has taken the second one.
    assert block_manager.num_swapped_in_blocks == (1 if caching else 2)


def test_swapped_in_blocks_are_cached_for_other_sequences() -> None:
    config = replace(CONFIG, enable_prefix_caching=True)
    harness = SchedulerHarness(config, num_blocks=6, max_model_len=40, swap_costs=ALWAYS_SWAP)
    harness.add(16, 20)
    harness.add(16, 20)
    while harness.scheduler.has_work:
        harness.step()
        if harness.scheduler.block_manager.num_swapped_in_blocks and len(harness.sequences) == 2:
            harness.add([1] * 16 + [99], 1)
    assert (2, 16, 1) in [span for batch in harness.runner.batches for span in batch]
    assert harness.outputs[2] == expected_output([1] * 16 + [99], 1)


def test_swaps_only_if_worthwhile_and_never_shared_blocks() -> None:
    # A block costs as much time as six tokens.
    swap = SwapCosts(64, seconds_per_block=6.0, seconds_per_token=1.0)
    assert swap.is_worthwhile(2, 13) and not swap.is_worthwhile(2, 12) and not swap.is_worthwhile(0, 0)
    harness = SchedulerHarness(num_blocks=6, max_model_len=40, swap_costs=swap)
    prompt = harness.add(17, 23).prompt_token_ids
    harness.add(prompt, 23, parent_id=0)
    harness.run_until_preempted()
    # Two blocks are shared, and its own two are full.
    assert harness.scheduler.block_manager.num_swapped_out_blocks == 2 and harness.sequences[1].num_shared_blocks == 2
    harness.run()
    assert harness.outputs == dict.fromkeys(range(2), expected_output(prompt, 23))


@pytest.mark.parametrize(("num_host_blocks", "seconds_per_block"), [(1, 0.0), (64, 99.0), (0, 0.0)])
def test_preempted_sequence_is_computed_again_if_swapping_does_not_fit_or_pay(
    num_host_blocks: int, seconds_per_block: float
) -> None:
    swap = SwapCosts(num_host_blocks, seconds_per_block, seconds_per_token=1.0)
    harness = SchedulerHarness(num_blocks=4, max_model_len=24, swap_costs=swap)
    for _ in range(2):
        harness.add(7, 17)
    harness.run()
    assert harness.scheduler.num_preemptions == 1 and harness.scheduler.block_manager.num_swapped_out_blocks == 0
    assert harness.outputs == {i: expected_output([i] * 7, 17) for i in range(2)}
