# SPDX-License-Identifier: Apache-2.0
"""The scheduler: exact batches for scripted arrivals, and equal output in every mode."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_runner import expected_output, next_token
from support.scheduler_harness import ALWAYS_SWAP, CONFIG, NEVER_SWAP, SchedulerHarness

from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.sequence import FinishReason, SequenceStatus
from quire_engine.step.plan import SpanOutput
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError, Internal, InvalidArgument, NotFound


def test_decode_comes_first_then_chunks_then_waiting_ones_in_order() -> None:
    bench = SchedulerHarness(replace(CONFIG, max_num_batched_tokens=20))
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
    bench = SchedulerHarness(replace(CONFIG, max_num_batched_tokens=20, enable_chunked_prefill=False))
    bench.add(12, 2)
    bench.add(10)
    bench.add(3)
    # 10 tokens do not fit beside 12, and 3 do not overtake them.
    assert bench.step() == [(0, 0, 12)]
    assert bench.step() == [(0, 12, 1), (1, 0, 10), (2, 0, 3)]
    with pytest.raises(InvalidArgument, match="21 tokens exceed max_num_batched_tokens 20"):
        bench.add(21)


def test_max_num_seqs_bounds_the_batch() -> None:
    bench = SchedulerHarness(replace(CONFIG, max_num_seqs=2))
    for _ in range(4):
        bench.add(3, 2)
    assert bench.step() == [(0, 0, 3), (1, 0, 3)]
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 2)
    assert bench.step() == [(0, 3, 1), (1, 3, 1)]
    assert bench.step() == [(2, 0, 3), (3, 0, 3)]


def test_started_names_a_sequence_once() -> None:
    bench = SchedulerHarness(num_blocks=4, max_model_len=32)
    for _ in range(2):
        bench.add(8, 20)
    started = []
    while plan := bench.scheduler.schedule(0.0):
        started += plan.started_ids
        bench.scheduler.update_from_step(plan, bench.runner.execute(plan))
    assert started == [0, 1]
    assert bench.scheduler.num_preemptions > 0


def test_a_cached_prefix_is_skipped_but_never_the_whole_prompt() -> None:
    bench = SchedulerHarness(replace(CONFIG, enable_prefix_caching=True))
    prompt = list(range(24))
    bench.add(prompt, 1)
    assert bench.step() == [(0, 0, 24)]
    bench.add(prompt, 1)
    bench.add([*prompt[:17], 99, 98], 1)
    # All three blocks of the prompt are cached; the last token is computed again, so that there are logits, in a copy
    # of the third one, which others may find.
    assert bench.step() == [(1, 23, 1), (2, 16, 3)]
    assert bench.scheduler.block_manager.num_block_copies == 1
    assert (bench.scheduler.prefix_cache.num_queries, bench.scheduler.prefix_cache.num_hits) == (24 + 24 + 19, 23 + 16)
    assert bench.outputs[0] == bench.outputs[1] == [next_token(prompt, None)]


def test_output_blocks_are_cached_too() -> None:
    bench = SchedulerHarness(replace(CONFIG, enable_prefix_caching=True))
    bench.add(6, 20)
    [output] = bench.run().values()
    # 25 of 26 tokens were computed: three full blocks.
    bench.add([0] * 6 + output, 1)
    assert bench.step() == [(1, 24, 2)]


def test_the_last_free_blocks_are_computed_in_rather_than_copied_to() -> None:
    bench = SchedulerHarness(replace(CONFIG, enable_prefix_caching=True), num_blocks=3, max_model_len=24)
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


@pytest.mark.parametrize("field", ["adapter_digest", "cache_salt"])
def test_prefixes_are_not_shared_across_adapters_or_salts(field: str) -> None:
    bench = SchedulerHarness(replace(CONFIG, enable_prefix_caching=True), adapter_digests="ab")
    for value in ("a", "b", None, "a"):
        bench.add([5] * 20, 1, **{field: value})
        bench.step()
    assert [batch[0][1] for batch in bench.runner.batches] == [0, 0, 0, 16]


def test_stop_tokens_length_and_min_tokens() -> None:
    bench = SchedulerHarness()
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
    bench = SchedulerHarness()
    sequence = bench.add(5, 8, stop_token_ids=frozenset([7]))
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None
    # As a speculating runner may answer: more tokens than the sequence wants.
    [(_, sampled)] = bench.scheduler.update_from_step(plan, [SpanOutput([3, 7, 9], [[], [], []])])
    assert (sampled.token_ids, sampled.logprobs) == ([3, 7], [[], []])
    assert sequence.output_token_ids == [3, 7]


def test_the_last_admitted_is_preempted_and_comes_back_when_it_fits_again() -> None:
    # Four blocks: two sequences of one block each, growing to three blocks each.
    bench = SchedulerHarness(num_blocks=4, max_model_len=24)
    bench.add(7, 17)
    bench.add(7, 17)
    bench.add(7, 17)
    batch = bench.run_until_preempted()
    # At token 16 both need a third block, and there is none.
    assert batch == [(0, 16, 1)]
    assert bench.sequences[1].status is SequenceStatus.PREEMPTED and not bench.sequences[1].block_table
    while bench.sequences[0].status is SequenceStatus.RUNNING:
        assert bench.step()[0][0] == 0
    # It goes before those that never ran.
    assert bench.step() == [(1, 0, 17)]
    bench.run()
    assert bench.outputs == {i: expected_output([i] * 7, 17) for i in range(3)}
    assert bench.scheduler.num_preemptions == 1


def test_a_preempted_sequence_longer_than_a_step_comes_back_in_chunks_even_without_chunking() -> None:
    config = replace(CONFIG, enable_chunked_prefill=False, max_num_batched_tokens=16)
    bench = SchedulerHarness(config, num_blocks=6, max_model_len=48)
    bench.add(14, 30)
    bench.add(14, 30)
    bench.run()
    assert bench.scheduler.num_preemptions == 1
    chunks = [span for batch in bench.runner.batches for span in batch if span[2] > 1]
    assert chunks == [(0, 0, 14), (1, 0, 14), (1, 0, 16), (1, 16, 8)]
    assert bench.outputs == {i: expected_output([i] * 14, 30) for i in range(2)}


def test_what_can_never_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len: 128 tokens need 16 KV blocks of 8 tokens, the cache has 15"):
        SchedulerHarness(num_blocks=15)
    bench = SchedulerHarness(num_blocks=16)
    with pytest.raises(InvalidArgument, match="128 tokens leave no room for output; max_model_len is 128"):
        bench.add(128)
    with pytest.raises(NotFound):
        bench.add(1, adapter_digest="sha256:none")
    bench.add(127, 1)
    bench.run()
    with pytest.raises(InvalidArgument, match="id 1: a sequence of this id is open"):
        bench.add(3, 5)
        bench.scheduler.add(bench.sequences[1])


def test_abort_during_a_step_takes_effect_after_it() -> None:
    bench = SchedulerHarness(adapter_digests="a")
    bench.fill_slot("a")
    bench.add(20, adapter_digest="a")
    bench.add(5)
    bench.add(5)
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None
    bench.scheduler.abort([0, 2, 77])
    bench.scheduler.check_integrity()
    # The runner may still write to its blocks and slot.
    assert bench.block_pool.num_used == 5 and bench.registry.running_adapters() == ["a"]
    progress = bench.scheduler.update_from_step(plan, bench.runner.execute(plan))
    bench.scheduler.check_integrity()
    assert [sequence.id for sequence, _ in progress] == [1]
    assert bench.block_pool.num_used == 1 and bench.registry.running_adapters() == []
    assert bench.sequences[0].finish_reason is FinishReason.ABORT
    bench.scheduler.abort([1])
    assert not bench.scheduler.has_work and bench.block_pool.num_used == 0


def test_a_failed_step_ends_its_sequences_only_and_keeps_good_blocks() -> None:
    bench = SchedulerHarness(replace(CONFIG, enable_prefix_caching=True, max_num_seqs=2), adapter_digests="a")
    bench.add([4] * 16, 1)
    bench.run()
    bench.add([4] * 20)
    bench.add(9, adapter_digest="a")
    bench.add(9, adapter_digest="a")
    assert [i for i, _, _ in bench.step()] == [1]
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None
    assert [s.id for s in bench.scheduler.fail_step(plan)] == [1, 2]
    bench.scheduler.check_integrity()
    assert bench.sequences[1].finish_reason is FinishReason.ERROR and bench.block_pool.num_used == 0
    assert bench.step() == [(3, 0, 9)]
    bench.add([4] * 20, 1)
    assert (4, 16, 4) in bench.step()
    bench.run()
    assert bench.sequences[3].output_token_ids == expected_output([3] * 9, 4, "a")
    assert bench.outputs[4] == expected_output([4] * 20, 1)


def test_a_sequence_without_a_slot_stops_nobody_and_gets_one_in_time() -> None:
    bench = SchedulerHarness(replace(CONFIG, max_num_seqs=4), adapter_digests="ab", max_loras=1)
    bench.fill_slot("a")
    bench.add(3, 9, adapter_digest="a")
    blocked = bench.add(3, 9, adapter_digest="b")
    bench.add(3, 9)
    assert [i for i, _, _ in bench.step()] == [0, 2]
    assert blocked.status is SequenceStatus.WAITING_FOR_ADAPTER
    # New sequences of a keep coming, so its slot would never become free.
    for _ in range(200):
        bench.now += 0.1
        if bench.scheduler.num_running + bench.scheduler.num_waiting < 5:
            bench.add(3, 9, adapter_digest="a")
        bench.step()
        if blocked.status is SequenceStatus.RUNNING:
            break
    assert bench.now < 1.0 + 0.1 * (9 + 3)
    bench.run()
    assert bench.outputs[blocked.id] == expected_output([1] * 3, 9, "b")


def test_nothing_is_runnable_while_all_wait_for_copies() -> None:
    bench = SchedulerHarness(max_loras=1)
    for digest in "abcdef":
        bench.registry.add(digest, Path(digest), False)
    assert bench.registry.adapter_states()["a"] == "disk"
    for dropped in bench.registry.pop_evicted_copies():
        assert dropped in "ab"
    waiting = bench.add(3, adapter_digest="a")
    assert bench.scheduler.has_runnable
    assert bench.step() == []
    assert not bench.scheduler.has_runnable and bench.scheduler.has_work
    [(digest, path)] = bench.registry.pop_reads()
    assert bench.registry.add(digest, path)
    bench.runner.store_adapter(digest, digest)
    bench.scheduler.on_adapter_ready()
    assert bench.scheduler.has_runnable and bench.step() == [(0, 0, 3)]
    # And one whose copy cannot be had is over.
    failing = bench.add(3, adapter_digest="b")
    assert bench.registry.pop_reads()
    assert bench.scheduler.fail_adapter("b") == [failing]
    bench.registry.on_read_failed("b")
    bench.scheduler.check_integrity()
    assert waiting.status is SequenceStatus.RUNNING


def test_check_integrity_sees_damage() -> None:
    bench = SchedulerHarness()
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
        bench = SchedulerHarness(MODES[mode](replace(CONFIG, block_size=block_size)), num_blocks, max_model_len, "ab")
        for prompt, num_output, adapter in jobs:
            bench.add(prompt, num_output, adapter_digest=None if adapter == "0" else adapter)
        outputs = bench.run()
        for i, (prompt, num_output, adapter) in enumerate(jobs):
            assert outputs[i] == expected_output(prompt, num_output, None if adapter == "0" else adapter)
        num_preemptions.append(bench.scheduler.num_preemptions)
    assert num_preemptions[0] == 0
    # Two blocks of 128 tokens for sequences of up to 210: hardly two ever run at once.
    assert num_preemptions[1] > 0 or block_size >= 64


@pytest.mark.parametrize(
    ("caching", "swap"), [(False, NEVER_SWAP), (True, NEVER_SWAP), (False, replace(ALWAYS_SWAP, num_host_blocks=512))]
)
def test_an_overloaded_pool_does_not_thrash(caching: bool, swap: SwapCosts) -> None:
    """200 sequences, of which the pool holds five: steps pass between admissions and preemptions, and work is kept."""
    config = replace(CONFIG, max_num_seqs=16, max_num_batched_tokens=256, enable_prefix_caching=caching)
    bench = SchedulerHarness(config, num_blocks=48, max_model_len=384, swap_costs=swap)
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
    # What preempted sequences compute again is a fraction of the work, and nothing if they are swapped.
    assert bench.runner.num_computed < 1.5 * needed
    assert (bench.runner.num_computed == needed) == bool(swap.num_host_blocks)
