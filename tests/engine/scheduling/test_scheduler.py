# SPDX-License-Identifier: Apache-2.0
"""The scheduler forms the expected batches for scripted arrivals, and outputs are equal in every mode."""

import random
from dataclasses import replace

import pytest
from support.fake_runner import expected_output, next_token
from support.scheduler_harness import ALWAYS_SWAP, CONFIG, NEVER_SWAP, SchedulerHarness

from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.sequence import FinishReason, SequenceStatus
from quire_engine.step.plan import SpanOutput
from quire_spec.errors import ConfigError, InvalidArgument, NotFound


def test_batch_order_is_decodes_then_partial_prefills_then_waiting() -> None:
    harness = SchedulerHarness(replace(CONFIG, max_num_batched_tokens=20))
    harness.add(12)
    harness.add(30, 2)
    assert harness.step() == [(0, 0, 12), (1, 0, 8)]
    assert harness.step() == [(0, 12, 1), (1, 8, 19)]
    harness.add(5, 1)
    harness.add(60, 1)
    assert harness.step() == [(0, 13, 1), (1, 27, 3), (2, 0, 5), (3, 0, 11)]
    assert harness.step() == [(0, 14, 1), (1, 30, 1), (3, 11, 18)]
    assert harness.step() == [(3, 29, 20)]
    assert harness.step() == [(3, 49, 11)]
    assert harness.step() == []
    assert {i: s.finish_reason for i, s in harness.sequences.items()} == dict.fromkeys(range(4), FinishReason.LENGTH)


def test_without_chunked_prefill_a_prompt_runs_whole_or_waits() -> None:
    harness = SchedulerHarness(replace(CONFIG, max_num_batched_tokens=20, enable_chunked_prefill=False))
    harness.add(12, 2)
    harness.add(10)
    harness.add(3)
    # 10 tokens do not fit beside 12, and the 3 behind them do not overtake.
    assert harness.step() == [(0, 0, 12)]
    assert harness.step() == [(0, 12, 1), (1, 0, 10), (2, 0, 3)]
    with pytest.raises(InvalidArgument, match="21 tokens exceed max_num_batched_tokens 20"):
        harness.add(21)


def test_cached_prefix_is_skipped_except_the_last_token() -> None:
    harness = SchedulerHarness(replace(CONFIG, enable_prefix_caching=True))
    prompt = list(range(24))
    harness.add(prompt, 1)
    assert harness.step() == [(0, 0, 24)]
    harness.add(prompt, 1)
    harness.add([*prompt[:17], 99, 98], 1)
    # All three blocks of the prompt are cached. The last token is computed again for its logits, in a copy of the third
    # block, because the original stays cached.
    assert harness.step() == [(1, 23, 1), (2, 16, 3)]
    assert harness.scheduler.block_manager.num_block_copies == 1
    assert (harness.scheduler.prefix_cache.num_queries, harness.scheduler.prefix_cache.num_hits) == (
        24 + 24 + 19,
        23 + 16,
    )
    assert harness.outputs[0] == harness.outputs[1] == [next_token(prompt, None)]


def test_output_blocks_are_cached() -> None:
    harness = SchedulerHarness(replace(CONFIG, enable_prefix_caching=True))
    harness.add(6, 20)
    [output] = harness.run().values()
    # 25 of 26 tokens were computed, which fill three blocks.
    harness.add([0] * 6 + output, 1)
    assert harness.step() == [(1, 24, 2)]


def test_last_free_blocks_are_computed_instead_of_copied() -> None:
    harness = SchedulerHarness(replace(CONFIG, enable_prefix_caching=True), num_blocks=3, max_model_len=24)
    harness.add([0] * 16, 1)
    harness.run()
    harness.add([0] * 16, 1)
    assert harness.step() == [(1, 15, 1)]
    harness.add([0] * 23, 1)
    harness.run()
    # The sequence needs all three blocks, so no block is left as a copy source.
    harness.add([0] * 16 + [1] * 7, 1)
    harness.run()
    assert harness.runner.batches[-2:] == [[(2, 16, 7)], [(3, 16, 7)]]


@pytest.mark.parametrize("field", ["adapter_digest", "cache_salt"])
def test_prefixes_are_not_shared_across_adapters_or_salts(field: str) -> None:
    harness = SchedulerHarness(replace(CONFIG, enable_prefix_caching=True), adapter_digests="ab")
    for value in ("a", "b", None, "a"):
        harness.add([5] * 20, 1, **{field: value})
        harness.step()
    assert [batch[0][1] for batch in harness.runner.batches] == [0, 0, 0, 16]


def test_stop_tokens_max_tokens_and_min_tokens() -> None:
    harness = SchedulerHarness()
    expected = expected_output([0] * 5, 8)
    stopped = harness.add(5, 8, stop_token_ids=frozenset(expected[2:3]))
    harness.run()
    assert (harness.outputs[0], stopped.finish_reason) == (expected[:3], FinishReason.STOP)
    expected = expected_output([1] * 5, 8)
    # The sampler masks stop tokens for the first min_tokens tokens. One that occurs there does not end the sequence.
    full = harness.add(5, 8, stop_token_ids=frozenset(expected[2:3]), min_tokens=3)
    last = harness.add([1] * 5, 8, stop_token_ids=frozenset(expected[3:4]), min_tokens=3)
    harness.run()
    assert (harness.outputs[1], full.finish_reason) == (expected, FinishReason.LENGTH)
    assert (harness.outputs[2], last.finish_reason) == (expected[:4], FinishReason.STOP)


def test_tokens_after_a_stop_token_are_dropped() -> None:
    harness = SchedulerHarness()
    sequence = harness.add(5, 8, stop_token_ids=frozenset([7]))
    plan = harness.scheduler.schedule(0.0)
    assert plan is not None
    # A runner with speculative decoding can return more tokens than the sequence needs.
    [(_, sampled)] = harness.scheduler.update_from_step(plan, [SpanOutput([3, 7, 9], [[], [], []])])
    assert (sampled.token_ids, sampled.logprobs) == ([3, 7], [[], []])
    assert sequence.output_token_ids == [3, 7]


def test_last_admitted_is_preempted_and_resumes_when_it_fits() -> None:
    # Four blocks: two sequences of one block each, growing to three blocks each.
    harness = SchedulerHarness(num_blocks=4, max_model_len=24)
    harness.add(7, 17)
    harness.add(7, 17)
    harness.add(7, 17)
    batch = harness.run_until_preempted()
    # At token 16 both need a third block, and no block is free.
    assert batch == [(0, 16, 1)]
    assert harness.sequences[1].status is SequenceStatus.PREEMPTED and not harness.sequences[1].block_table
    while harness.sequences[0].status is SequenceStatus.RUNNING:
        assert harness.step()[0][0] == 0
    # It resumes before sequences that never ran.
    assert harness.step() == [(1, 0, 17)]
    harness.run()
    assert harness.outputs == {i: expected_output([i] * 7, 17) for i in range(3)}
    assert harness.scheduler.num_preemptions == 1


def test_preempted_sequence_longer_than_a_step_resumes_in_chunks_without_chunked_prefill() -> None:
    config = replace(CONFIG, enable_chunked_prefill=False, max_num_batched_tokens=16)
    harness = SchedulerHarness(config, num_blocks=6, max_model_len=48)
    harness.add(14, 30)
    harness.add(14, 30)
    harness.run()
    assert harness.scheduler.num_preemptions == 1
    chunks = [span for batch in harness.runner.batches for span in batch if span[2] > 1]
    assert chunks == [(0, 0, 14), (1, 0, 14), (1, 0, 16), (1, 16, 8)]
    assert harness.outputs == {i: expected_output([i] * 14, 30) for i in range(2)}


def test_rejects_sequences_that_can_never_run() -> None:
    with pytest.raises(
        ConfigError, match="max_model_len: 128 tokens need 16 KV blocks of 8 tokens, but the cache has 15"
    ):
        SchedulerHarness(num_blocks=15)
    harness = SchedulerHarness(num_blocks=16)
    with pytest.raises(InvalidArgument, match="128 tokens leave no room for output, max_model_len is 128"):
        harness.add(128)
    with pytest.raises(NotFound):
        harness.add(1, adapter_digest="sha256:none")
    harness.add(127, 1)
    harness.run()
    with pytest.raises(InvalidArgument, match="id: 1 is in use by an unfinished sequence"):
        harness.add(3, 5)
        harness.scheduler.add(harness.sequences[1])


def test_failed_step_ends_only_its_sequences_and_keeps_earlier_blocks() -> None:
    harness = SchedulerHarness(replace(CONFIG, enable_prefix_caching=True, max_num_seqs=2), adapter_digests="a")
    harness.add([4] * 16, 1)
    harness.run()
    harness.add([4] * 20)
    harness.add(9, adapter_digest="a")
    harness.add(9, adapter_digest="a")
    assert [i for i, _, _ in harness.step()] == [1]
    plan = harness.scheduler.schedule(0.0)
    assert plan is not None
    assert [s.id for s in harness.scheduler.fail_step(plan)] == [1, 2]
    harness.scheduler.check_integrity()
    assert harness.sequences[1].finish_reason is FinishReason.ERROR and harness.block_pool.num_used == 0
    assert harness.step() == [(3, 0, 9)]
    harness.add([4] * 20, 1)
    assert (4, 16, 4) in harness.step()
    harness.run()
    assert harness.sequences[3].output_token_ids == expected_output([3] * 9, 4, "a")
    assert harness.outputs[4] == expected_output([4] * 20, 1)


@pytest.mark.parametrize(
    ("caching", "swap"), [(False, NEVER_SWAP), (True, NEVER_SWAP), (False, replace(ALWAYS_SWAP, num_host_blocks=512))]
)
def test_overloaded_pool_does_not_thrash(caching: bool, swap: SwapCosts) -> None:
    """200 sequences in a pool for five: steps pass between admissions and preemptions, and little work is repeated."""
    config = replace(CONFIG, max_num_seqs=16, max_num_batched_tokens=256, enable_prefix_caching=caching)
    harness = SchedulerHarness(config, num_blocks=48, max_model_len=384, swap_costs=swap)
    rng = random.Random(3)
    num_needed = 0
    for _ in range(200):
        prompt, output = rng.randint(1, 100), rng.randint(1, 120)
        harness.add(prompt, output)
        num_needed += prompt + output - 1
    last_admission, step, num_preemptions = 0, 0, 0
    while harness.scheduler.has_work:
        running = set(harness.scheduler._running)
        assert harness.step()
        step += 1
        if harness.scheduler.num_preemptions > num_preemptions:
            num_preemptions = harness.scheduler.num_preemptions
            assert step - last_admission >= harness.config.block_size
            assert set(harness.scheduler._running) <= running
        elif set(harness.scheduler._running) - running:
            last_admission = step
    assert 0 < num_preemptions < 200
    # Preempted sequences compute a fraction of the work again, and nothing if they are swapped.
    assert harness.runner.num_computed < 1.5 * num_needed
    assert (harness.runner.num_computed == num_needed) == bool(swap.num_host_blocks)
