# SPDX-License-Identifier: Apache-2.0
"""Blocks that are used twice survive their eviction in host memory, and other sequences do not wait for the copies."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_runner import expected_output
from support.scheduler_harness import CONFIG, SchedulerHarness

from quire_engine.kv_cache.block_events import BlockEvent, BlockEventLog, BlocksRemoved, BlocksStored
from quire_engine.kv_cache.swap_policy import COPY_SHARE, SwapCosts
from quire_engine.kv_transfer.store_traffic import READ_DEADLINE_S
from quire_engine.sequence import SequenceStatus

PROMPT = [7] * 40 + [1]
# Copying is free, so a step can copy any number of blocks.
FREE = SwapCosts(64, 0.0, 1.0)
# A step of 64 tokens takes 64 s, and can spend a sixteenth of this on copies that take 2 s in one direction.
SLOW = SwapCosts(64, 4.0, 1.0)


def harness(costs: SwapCosts = FREE, num_blocks: int = 16, **fields: Any) -> SchedulerHarness:
    config = replace(CONFIG, enable_prefix_caching=True, kv_offloading_size=1.0)
    return SchedulerHarness(config, num_blocks=num_blocks, max_model_len=96, swap_costs=costs, **fields)


def run_one(harness: SchedulerHarness, prompt: list[int], num_output: int = 2, **fields: Any) -> int:
    """Run one sequence, check its output, and return how many of its tokens were found."""
    sequence = harness.add(prompt, num_output, **fields)
    harness.run()
    expected = expected_output(prompt, num_output, sequence.adapter_digest)
    assert harness.outputs[sequence.id] == expected
    assert sequence.num_cached_tokens is not None
    return sequence.num_cached_tokens


def evict(harness: SchedulerHarness) -> None:
    """Evict all contents of the device."""
    pool = harness.block_pool
    pool.free(pool.allocate(pool.num_free))


@pytest.mark.parametrize("lookahead", [False, True])
def test_state_is_stored_at_its_second_use_and_restored_after_eviction(lookahead: bool) -> None:
    """The device has room for two states: that of the sequence, and one snapshot. The runner checks the contents."""
    costs = replace(FREE, num_host_states=3, num_blocks_per_state=1)
    h = harness(costs, lookahead=lookahead, num_states=2)
    assert h.scheduler.states is not None
    host, prompts = h.scheduler.states.host, [[letter] * 40 + [1, 2] for letter in (7, 8, 9)]
    for prompt in prompts:
        assert [run_one(h, prompt) for _ in range(3)] == [0, 40, 40]
        evict(h)
    assert (host.num_stored, host.num_loaded) == (3, 0)
    for count, prompt in enumerate([*prompts, prompts[1], prompts[0]], 1):
        assert run_one(h, prompt) == 40 and host.num_loaded == count
        evict(h)


@pytest.mark.parametrize("lookahead", [False, True])
def test_state_is_read_from_a_store_with_the_blocks_before_it(lookahead: bool) -> None:
    costs = replace(FREE, num_host_states=3, num_blocks_per_state=1)
    first = harness(costs, lookahead=lookahead, num_states=2, has_store=True)
    assert [run_one(first, PROMPT) for _ in range(3)] == [0, 40, 40]
    for missing, expected in (("", 40), ("state", 0), ("block", 0)):
        h = harness(costs, lookahead=lookahead, num_states=2, has_store=True)
        assert h.store and h.state_store and first.store and first.state_store and h.scheduler.store_traffic
        h.store.blocks, h.state_store.blocks = dict(first.store.blocks), dict(first.state_store.blocks)
        [key] = h.state_store.blocks
        assert len(h.store.blocks) == 5
        del {"": {key: 0}, "state": h.state_store.blocks, "block": h.store.blocks}[missing][key]
        sequence = h.add(PROMPT, 2)
        while h.scheduler.has_work:
            if not h.step():
                assert sequence.status is SequenceStatus.WAITING_FOR_KV and h.complete_transfers()
        assert h.outputs[sequence.id] == expected_output(PROMPT, 2, None)
        states = h.scheduler.store_traffic.states
        assert sequence.num_cached_tokens == expected and states is not None and states.num_read == bool(expected)


@pytest.mark.parametrize("lookahead", [False, True])
def test_block_is_stored_at_its_second_use_and_restored_after_eviction(lookahead: bool) -> None:
    h = harness(lookahead=lookahead)
    cache, stats = h.scheduler.host_cache, h.scheduler.prefix_cache
    assert run_one(h, PROMPT) == 0
    evict(h)
    assert cache.num_stored_blocks == 0, "a prompt that occurs once is not stored"
    assert run_one(h, PROMPT) == 0
    assert run_one(h, PROMPT) == 40 and cache.num_stored_blocks == 5
    evict(h)
    num_computed, hits = h.runner.num_computed, stats.num_hits
    assert run_one(h, PROMPT) == 40
    # Its last prompt token and its first output token. With lookahead, one more token is computed and dropped.
    assert h.runner.num_computed - num_computed <= 2 + lookahead
    assert (stats.num_host_hits, stats.num_hits) == (40, hits)
    assert h.scheduler.block_manager.num_swapped_in_blocks == 5
    assert h.scheduler.block_manager.num_used_host_blocks == 0
    assert run_one(h, PROMPT) == 40 and stats.num_host_hits == 40, "restored blocks are cached on the device again"


def test_prompt_of_full_blocks_computes_only_its_last_token() -> None:
    h = harness()
    for _ in range(2):
        run_one(h, [7] * 40)
    evict(h)
    assert run_one(h, [7] * 40) == 39 and h.runner.batches[-2][0][1:] == (39, 1)


def test_restoring_sequence_delays_no_other() -> None:
    """While another sequence decodes, each step copies two blocks; nothing is computed before the last one."""
    h = harness(SLOW, num_blocks=24)
    prompt = [7] * 64 + [1]
    assert SLOW.max_copies(64) == 2 == int(COPY_SHARE * 64 / 2)
    for _ in range(3):
        run_one(h, prompt, 8)
    evict(h)
    decoding = h.add([5], 30)
    h.step()
    restoring = h.add(prompt, 2)
    for num_copied in (2, 4, 6):
        assert h.step() == [(decoding.id, num_copied // 2, 1)]
        assert restoring.status is SequenceStatus.RUNNING and restoring.num_computed_tokens == 8 * num_copied
        assert len(restoring.host_blocks) == 8 - num_copied
    late = h.add([9], 1)
    batch = h.step()
    assert (decoding.id, 4, 1) in batch and (restoring.id, 64, 1) in batch and (late.id, 0, 1) in batch
    h.run()
    assert h.outputs[restoring.id] == expected_output(prompt, 2)


def test_sequence_that_runs_alone_restores_all_blocks_in_one_step() -> None:
    h = harness(SLOW, num_blocks=24)
    for _ in range(4):
        run_one(h, PROMPT, 8)
    evict(h)
    sequence = h.add(PROMPT, 2)
    assert h.step() == [(sequence.id, 40, 1)]
    h.run()


def test_each_step_stores_few_blocks_and_eviction_never_waits() -> None:
    h = harness(SLOW)
    for _ in range(2):
        run_one(h, PROMPT, 1)
    # One step ran since the second use. Eviction does not copy the other blocks.
    assert h.scheduler.host_cache.num_stored_blocks == 2
    evict(h)
    assert run_one(h, PROMPT) == 16


def test_nothing_is_stored_or_restored_if_computing_is_faster() -> None:
    h = harness(SwapCosts(64, 9.0, 1.0))
    for _ in range(3):
        run_one(h, PROMPT)
    evict(h)
    assert run_one(h, PROMPT) == 0 and h.scheduler.host_cache.num_stored_blocks == 0


def test_salts_and_adapters_do_not_share_stored_blocks() -> None:
    h = harness(adapter_digests="ab")
    owners = [{}, {"cache_salt": "s"}, {"adapter_digest": "a"}, {"adapter_digest": "b"}]
    for owner in owners[:-1]:
        for _ in range(2):
            run_one(h, PROMPT, **owner)
    evict(h)
    assert [run_one(h, PROMPT, **owner) for owner in owners] == [40, 40, 40, 0]
    assert run_one(h, PROMPT, cache_salt="t") == 0


@pytest.mark.parametrize("lookahead", [False, True])
def test_failed_steps_leave_nothing_behind(lookahead: bool) -> None:
    h = harness(SLOW, num_blocks=24, lookahead=lookahead)
    for _ in range(2):
        run_one(h, PROMPT, 1)
    num_stored = h.scheduler.host_cache.num_stored_blocks
    h.add([5], 9)
    in_flight = h.launch()
    assert in_flight is not None and len(in_flight.plan.swap_outs) == 2
    h.launch_lookahead()
    h.fail_step(in_flight)
    assert h.scheduler.host_cache.num_stored_blocks == num_stored and not h.scheduler.host_cache.storing_rows
    run_one(h, PROMPT, 8)
    evict(h)
    decoding, restoring = h.add([5], 9), None
    h.step()
    restoring = h.add(PROMPT, 2)
    in_flight = h.launch()
    if in_flight is not None and not in_flight.plan.restoring:
        h.complete(in_flight)
        in_flight = h.launch()
    assert in_flight is not None and in_flight.plan.restoring == [restoring]
    assert {s.id for s in h.fail_step(in_flight)} == {decoding.id, restoring.id}
    assert not h.scheduler.has_work and h.block_pool.num_used == 0
    assert run_one(h, PROMPT) == 40, "the rows are still cached"


@pytest.mark.parametrize("lookahead", [False, True])
def test_abort_while_restoring(lookahead: bool) -> None:
    h = harness(SLOW, num_blocks=24, lookahead=lookahead)
    for _ in range(3):
        run_one(h, PROMPT, 8)
    evict(h)
    h.add([5], 20)
    h.step()
    restoring = h.add(PROMPT, 2)
    while not restoring.host_blocks:
        h.step()
    h.scheduler.abort([restoring.id])
    h.scheduler.check_integrity()
    h.run()
    assert run_one(h, PROMPT) == 40


def test_restoring_sequence_can_be_preempted() -> None:
    config = replace(CONFIG, enable_prefix_caching=True, kv_offloading_size=1.0, scheduling_policy="priority")
    h = SchedulerHarness(config, num_blocks=14, max_model_len=96, swap_costs=SLOW)
    for _ in range(3):
        run_one(h, PROMPT, 8)
    evict(h)
    decoding = h.add([5], 30, priority=0)
    h.step()
    restoring = h.add(PROMPT, 2, priority=5)
    h.step()
    assert restoring.host_blocks
    urgent = h.add(60, 2, priority=-1)
    h.run()
    assert restoring.num_preemptions and h.outputs[restoring.id] == expected_output(PROMPT, 2)
    assert h.outputs[decoding.id] == expected_output([5], 30)
    assert h.outputs[urgent.id] == expected_output(urgent.prompt_token_ids, 2)


def test_least_recently_used_rows_are_evicted_and_events_name_the_medium() -> None:
    h = harness(replace(FREE, num_host_blocks=6))
    log = h.scheduler.host_cache.pool.event_log = BlockEventLog()
    for letter in (1, 2):
        for _ in range(2):
            run_one(h, [letter] * 40 + [3])
    events = log.pop()
    stored = [e.keys[0] for e in events if isinstance(e, BlocksStored)]
    removed = [key for e in events if isinstance(e, BlocksRemoved) for key in e.keys]
    assert len(stored) == 10 and set(removed) < set(stored[:5]) and len(removed) == 4
    assert {e.medium for e in events} == {"CPU"}
    evict(h)
    assert run_one(h, [2] * 40 + [3]) == 40
    h.scheduler.check_integrity()


def stored_harness(**fields: Any) -> SchedulerHarness:
    """Return a harness whose store has the blocks of PROMPT, which are nowhere else."""
    h = harness(num_blocks=24, has_store=True, **fields)
    for _ in range(2):
        run_one(h, PROMPT)
    assert h.store is not None and len(h.store.blocks) == 5
    evict(h)
    pool = h.scheduler.host_cache.pool
    pool.free(pool.allocate(pool.num_free))
    return h


@pytest.mark.parametrize("lookahead", [False, True])
def test_sequence_that_waits_for_a_store_delays_no_other(lookahead: bool) -> None:
    h = stored_harness(lookahead=lookahead)
    decoding = h.add([5], 30)
    h.step()
    waiting, late = h.add(PROMPT, 2), h.add([9], 1)
    for _ in range(3):
        h.step()
        assert waiting.status is SequenceStatus.WAITING_FOR_KV
    assert late.status is SequenceStatus.FINISHED and h.scheduler.num_waiting == 1
    h.complete_transfers()
    h.run()
    assert waiting.num_cached_tokens == 40 and h.outputs[waiting.id] == expected_output(PROMPT, 2)
    assert h.outputs[decoding.id] == expected_output([5], 30)


def test_sequence_waits_for_a_slow_store_only_until_its_deadline() -> None:
    h = stored_harness()
    h.add([5], 30)
    h.step()
    waiting = h.add(PROMPT, 2)
    h.step()
    h.now += READ_DEADLINE_S
    h.step()
    assert waiting.status is SequenceStatus.RUNNING and waiting.num_cached_tokens == 0
    h.complete_transfers()
    h.run()
    assert h.outputs[waiting.id] == expected_output(PROMPT, 2)


def test_wrong_blocks_of_a_store_are_computed() -> None:
    h = stored_harness()
    assert h.store is not None
    h.store.miss_ratio = 1.0
    assert run_one(h, PROMPT) == 0 and len(h.store.blocks) == 4


def test_aborted_sequence_leaves_its_read_to_others() -> None:
    h = stored_harness()
    waiting = h.add(PROMPT, 2)
    assert h.scheduler.schedule(h.now) is None and waiting.status is SequenceStatus.WAITING_FOR_KV
    h.scheduler.abort([waiting.id])
    h.scheduler.check_integrity()
    h.complete_transfers()
    assert run_one(h, PROMPT) == 40


def held_blocks(events: list[BlockEvent], held: set[tuple[str, bytes]]) -> None:
    """Apply events to the set of blocks that each medium holds. No block is stored twice or removed twice."""
    for event in events:
        blocks = {(event.medium, key) for key in event.keys}
        if isinstance(event, BlocksStored):
            assert not held & blocks
            held |= blocks
        else:
            assert blocks <= held
            held -= blocks


def test_events_name_the_blocks_of_each_medium() -> None:
    h = harness(num_blocks=24, has_store=True)
    pool, store, held = h.scheduler.host_cache.pool, h.store, set[tuple[str, bytes]]()
    log = pool.event_log = BlockEventLog()
    assert store is not None
    for _ in range(2):
        run_one(h, PROMPT)
    h.complete_transfers()
    run_one(h, [3])
    held_blocks(log.pop(), held)
    assert {key for medium, key in held if medium == "STORAGE"} == set(store.blocks) and len(held) == 10
    evict(h)
    pool.free(pool.allocate(pool.num_free))
    held_blocks(log.pop(), held)
    assert {medium for medium, _ in held} == {"STORAGE"} and len(held) == 5
    # They are read again, which stores them in host memory.
    waiting = h.add(PROMPT, 2)
    h.scheduler.schedule(h.now)
    h.complete_transfers()
    h.run()
    assert waiting.num_cached_tokens == 40
    held_blocks(log.pop(), held)
    assert {key for medium, key in held if medium == "CPU"} == set(store.blocks) and len(held) == 10
    # Another process removes two of them.
    for key in list(store.blocks)[:2]:
        del store.blocks[key]
    run_one(h, [4])
    held_blocks(log.pop(), held)
    assert {key for medium, key in held if medium == "STORAGE"} == set(store.blocks) and len(held) == 8


@settings(deadline=None, max_examples=25)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 3), st.integers(1, 60), st.integers(1, 12), st.sampled_from([None, "a"]), st.integers(0, 3)
        ),
        min_size=4,
        max_size=14,
    ),
    costs=st.builds(SwapCosts, st.integers(0, 20), st.sampled_from([0.0, 3.0, 7.0]), st.just(1.0)),
    lookahead=st.booleans(),
    caching_blocks=st.integers(12, 20),
)
def test_outputs_are_the_same_with_and_without_the_cache(
    requests: list[tuple[int, int, int, str | None, int]], costs: SwapCosts, lookahead: bool, caching_blocks: int
) -> None:
    """The runner checks in each step that the blocks of each sequence contain exactly its tokens."""
    h = harness(costs, caching_blocks, lookahead=lookahead, adapter_digests="a")
    expected = {}
    for letter, length, num_output, adapter_digest, num_steps in requests:
        sequence = h.add([letter] * length, num_output, adapter_digest=adapter_digest)
        expected[sequence.id] = expected_output([letter] * length, num_output, adapter_digest)
        for _ in range(num_steps):
            h.step()
    assert h.run() == expected
