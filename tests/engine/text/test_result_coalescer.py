# SPDX-License-Identifier: Apache-2.0
"""Coalesced results contain every token once and in order; first tokens and ends do not wait; responses are bounded."""

import asyncio
import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.virtual_time import virtual_time

from quire_engine.text.result_coalescer import ResponseThrottle, ResultCoalescer
from quire_spec.protocol.messages import SchedulerStats, SequenceDelta, StepResult


class RecordingListener:
    """Records everything that it receives."""

    def __init__(self):
        self.tokens, self.results, self.num_steps, self.num_lost = defaultdict(list), [], 0, 0

    def on_core_connected(self): ...

    def on_core_lost(self):
        self.num_lost += 1

    def on_step(self, step):
        self.num_steps += 1
        self.results += step.results
        for result in step.results:
            self.tokens[result.id] += result.token_ids


def step(*results):
    return StepResult(list(results), [], SchedulerStats(num_steps=1))


@pytest.mark.parametrize("seed", range(20))
async def test_every_token_arrives_once_and_in_order(seed):
    draw, listener, throttle = random.Random(seed), RecordingListener(), ResponseThrottle(2000)
    coalescer = ResultCoalescer(listener, throttle)
    lengths = {id: draw.randint(1, 30) for id in range(12)}
    made: dict[int, list[int]] = {id: [] for id in lengths}
    while running := [id for id in lengths if len(made[id]) < lengths[id]]:
        results = []
        for id in draw.sample(running, draw.randint(1, len(running))):
            made[id].append(len(made[id]))
            has_ended = len(made[id]) == lengths[id]
            error = "INTERNAL" if has_ended and id % 3 == 0 else None
            reason = "length" if has_ended and not error else None
            logprobs = [[[float(made[id][-1]), -1.0, 1]]] if id % 2 else None
            results.append(SequenceDelta(id, [made[id][-1]], reason, logprobs, error))
        coalescer.on_step(step(*results))
        before = {id for id in made if listener.tokens[id]}
        assert {result.id for result in results} <= before, "first tokens waited"
        assert all(listener.tokens[id] == made[id] for id in made if len(made[id]) == lengths[id]), "an end waited"
        throttle.record_sent(len(results), asyncio.get_running_loop().time())
        await asyncio.sleep(draw.choice((0, 0, 0.002)))
    assert listener.tokens == made
    for id in lengths:
        ends = [r for r in listener.results if r.id == id and (r.finish_reason or r.error_code)]
        assert len(ends) == 1 and [r for r in listener.results if r.id == id][-1] is ends[0]
        logprob_ids = [int(position[0][0]) for r in listener.results if r.id == id for position in r.logprobs or []]
        assert logprob_ids == (made[id] if id % 2 else [])
    assert coalescer._pending == {}


@virtual_time
async def test_waiting_results_are_sent_without_another_step():
    listener, throttle = RecordingListener(), ResponseThrottle(100)
    coalescer, loop = ResultCoalescer(listener, throttle), asyncio.get_running_loop()
    coalescer.on_step(step(SequenceDelta(1, [0]), SequenceDelta(2, [0])))
    throttle.record_sent(5, loop.time())
    for token in (1, 2):
        coalescer.on_step(step(SequenceDelta(1, [token]), SequenceDelta(2, [token])))
    assert listener.tokens == {1: [0], 2: [0]}
    await asyncio.sleep(0.1)
    assert listener.tokens == {1: [0, 1, 2], 2: [0, 1, 2]} and len(listener.results) == 4


@virtual_time
async def test_waiting_results_are_discarded_when_the_core_is_lost():
    listener, throttle = RecordingListener(), ResponseThrottle(100)
    coalescer = ResultCoalescer(listener, throttle)
    coalescer.on_step(step(SequenceDelta(1, [0])))
    throttle.record_sent(3, asyncio.get_running_loop().time())
    coalescer.on_step(step(SequenceDelta(1, [1])))
    coalescer.on_core_lost()
    await asyncio.sleep(0.1)
    assert listener.num_lost == 1 and listener.tokens == {1: [0]}


async def test_aborted_sequences_are_forgotten():
    listener = RecordingListener()
    coalescer = ResultCoalescer(listener, ResponseThrottle(None))
    for id in range(100):
        coalescer.on_step(step(SequenceDelta(id, [0])))
    assert len(coalescer._pending) <= 2


@given(st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 64)), min_size=1, max_size=50))
def test_throttled_responses_are_bounded_in_any_interval(steps):
    throttle, now, sent = ResponseThrottle(500), 0.0, []
    for pause, count in steps:
        now += pause
        if throttle.delay_s(now) == 0:
            throttle.record_sent(count, now)
            sent.append((now, count))
    for i, (start, _) in enumerate(sent):
        for end, _ in sent[i:]:
            between = sum(count for at, count in sent if start <= at < end)
            assert between <= 500 * (end - start) + 1e-6


def test_single_stream_is_not_delayed():
    throttle = ResponseThrottle(500)
    for step in range(100):
        assert throttle.delay_s(step * 0.004) == 0
        throttle.record_sent(1, step * 0.004)


def test_delay_is_proportional_to_the_responses_sent():
    throttle = ResponseThrottle(500)
    throttle.record_sent(64, 10.0)
    assert throttle.delay_s(10.03) == pytest.approx(0.098)
    throttle.record_sent(5, 10.03)  # results that could not wait
    assert throttle.delay_s(10.03) == pytest.approx(0.108)
    assert throttle.delay_s(10.2) == 0


def test_throttle_without_a_rate_never_delays():
    throttle = ResponseThrottle(None)
    throttle.record_sent(10**6, 1.0)
    assert throttle.delay_s(1.0) == 0
