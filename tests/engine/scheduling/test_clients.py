# SPDX-License-Identifier: Apache-2.0
"""Clients share the engine: no client waits for the queue of another one, and none waits forever."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.fake_runner import expected_output
from support.scheduler_harness import CONFIG, SchedulerHarness

from quire_engine.sequence import SequenceStatus

prompt_lengths = st.lists(st.integers(1, 100), min_size=20, max_size=60)


@given(lengths=prompt_lengths, num_output=st.integers(2, 20), num_steps=st.integers(0, 40), lookahead=st.booleans())
def test_new_client_starts_in_the_next_steps_beside_any_queue(
    lengths: list[int], num_output: int, num_steps: int, lookahead: bool
) -> None:
    harness = SchedulerHarness(num_blocks=64, lookahead=lookahead)
    for length in lengths:
        harness.add(length, num_output, client="batch")
    for _ in range(num_steps):
        harness.step()
    new = harness.add(16, 1, client="new")
    for _ in range(3):
        harness.step()
    # One sequence of the other client may hold nearly all blocks, and is never preempted.
    assert new.status is SequenceStatus.FINISHED or harness.scheduler.num_running == 1
    harness.run()
    assert harness.outputs == {
        s.id: expected_output([s.id] * len(s.prompt_token_ids), s.max_output_tokens) for s in harness.sequences.values()
    }


def test_prompts_of_clients_get_equal_parts_of_a_step_and_one_client_gets_the_rest() -> None:
    harness = SchedulerHarness(replace(CONFIG, max_num_batched_tokens=16), num_blocks=64)
    harness.add(100, 1, client="a")
    assert harness.step() == [(0, 0, 16)]
    harness.add(40, 1, client="b")
    assert harness.step() == [(0, 16, 8), (1, 0, 8)]
    harness.add(3, 1, client="c")
    # Each has a third of the budget; c needs less, and a is the most urgent one.
    assert harness.step() == [(0, 24, 8), (1, 8, 5), (2, 0, 3)]
    assert harness.step() == [(0, 32, 8), (1, 13, 8)]


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4), num_clients=st.integers(2, 6))
def test_clients_with_queues_get_equal_numbers_of_tokens(lengths: list[int], num_clients: int) -> None:
    harness = SchedulerHarness(replace(CONFIG, max_num_seqs=12), num_blocks=128)
    for client in range(num_clients):
        for i in range(40):
            harness.add(lengths[i % len(lengths)], 2, client=str(client))
    computed: Counter[str] = Counter()
    for _ in range(30):
        for sequence_id, _, length in harness.step():
            computed[harness.sequences[sequence_id].client] += length
        if len({s.client for s in harness.scheduler._waiting}) < num_clients:
            break
    # A client may be ahead by the sequences that it runs at once.
    assert max(computed.values()) - min(computed.values()) <= 12 * (max(lengths) + 2)


def test_client_with_a_queue_finishes_beside_an_endless_stream_of_new_clients() -> None:
    harness = SchedulerHarness(replace(CONFIG, max_num_seqs=2))
    queue = [harness.add(8, 4, client="queue") for _ in range(10)]
    for i in range(300):
        # Two places, each for four steps: the new clients alone need both of them.
        if i % 2 == 0:
            harness.add(8, 4, client=f"new {i}")
        harness.step()
        if all(sequence.status is SequenceStatus.FINISHED for sequence in queue):
            return
    raise AssertionError("sequences of the client with a queue still wait")


def test_preempted_client_keeps_its_most_urgent_sequence_and_shares_do_not_oscillate() -> None:
    harness = SchedulerHarness(replace(CONFIG, max_num_seqs=8), num_blocks=64)
    for _ in range(20):
        harness.add(4, 30, client="a")
    harness.step()
    for _ in range(20):
        harness.add(4, 30, client="b")
    harness.step()
    running = Counter(s.client for s in harness.scheduler._running)
    num_preemptions = harness.scheduler.num_preemptions
    assert running == {"a": 5, "b": 3} and num_preemptions == 3
    assert harness.sequences[0].status is SequenceStatus.RUNNING
    for _ in range(20):
        harness.step()
    assert harness.scheduler.num_preemptions == num_preemptions
    harness.run()
