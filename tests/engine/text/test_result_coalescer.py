# SPDX-License-Identifier: Apache-2.0
"""Coalesced results contain every token once and in order; first tokens and ends do not wait for the throttle; the
number of responses, and the results that wait for a frontend, are bounded."""

import asyncio
import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.virtual_time import virtual_time

from quire_engine.text.result_coalescer import (
    MAX_WAITING_BYTES,
    MAX_WAITING_STREAM_BYTES,
    ResponseThrottle,
    ResultCoalescer,
)
from quire_spec.protocol.messages import SchedulerStats, SequenceDelta, StepResult


class Frontend:
    """A frontend that can stop reading."""

    def __init__(self):
        self.is_blocked, self.close_reason = False, None

    def send(self, delta): ...

    def close_slow_reader(self, reason):
        self.close_reason = reason


class RecordingListener:
    """Records everything that it receives."""

    def __init__(self, readers=None):
        self.tokens, self.results, self.num_steps, self.num_lost = defaultdict(list), [], 0, 0
        self.readers = readers or {}

    def reader_of(self, sequence_id):
        return self.readers.get(sequence_id)

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


@pytest.mark.parametrize("seed", range(20))
async def test_results_wait_until_their_frontend_reads(seed):
    draw, throttle = random.Random(seed), ResponseThrottle(None if seed % 2 else 2000)
    frontends = [Frontend() for _ in range(2)]
    listener = RecordingListener({id: frontends[id % 3] for id in range(9) if id % 3 < 2})
    coalescer = ResultCoalescer(listener, throttle)
    lengths = {id: draw.randint(1, 20) for id in range(9)}
    made: dict[int, list[int]] = {id: [] for id in lengths}
    while running := [id for id in lengths if len(made[id]) < lengths[id]]:
        results = []
        for id in draw.sample(running, draw.randint(1, len(running))):
            is_first, has_ended = not made[id], len(made[id]) + 1 == lengths[id]
            made[id].append(len(made[id]))
            error = "INTERNAL" if has_ended and id % 2 else None
            results.append(
                SequenceDelta(
                    id,
                    [made[id][-1]],
                    "length" if has_ended and not error else None,
                    error_code=error,
                    prompt_logprobs=[[(7, -1.0, 1)]] if is_first else None,
                    num_cached_tokens=5 if is_first else None,
                )
            )
        before = {id: len(listener.tokens[id]) for id in made}
        coalescer.on_step(step(*results))
        assert all(len(listener.tokens[id]) == before[id] for id in made if id % 3 < 2 and frontends[id % 3].is_blocked)
        throttle.record_sent(len(results), asyncio.get_running_loop().time())
        for frontend in frontends:
            frontend.is_blocked = not frontend.is_blocked if draw.random() < 0.3 else frontend.is_blocked
            if not frontend.is_blocked:
                coalescer.on_frontend_writable(frontend)
        await asyncio.sleep(draw.choice((0, 0, 0.002)))
    for frontend in frontends:
        frontend.is_blocked = False
        coalescer.on_frontend_writable(frontend)
    assert listener.tokens == made
    for id in lengths:
        own = [result for result in listener.results if result.id == id]
        assert [bool(r.finish_reason or r.error_code) for r in own] == [False] * (len(own) - 1) + [True]
        assert [r.prompt_logprobs for r in own if r.prompt_logprobs] == [[[(7, -1.0, 1)]]]
        assert [r.num_cached_tokens for r in own if r.num_cached_tokens is not None] == [5]
    assert all(frontend.close_reason is None for frontend in frontends)


@pytest.mark.parametrize(
    ("num_streams", "num_logprobs", "limit"), [(1, 0, MAX_WAITING_STREAM_BYTES), (1000, 20, MAX_WAITING_BYTES)]
)
async def test_a_frontend_that_does_not_read_is_closed(num_streams, num_logprobs, limit):
    slow, other = Frontend(), Frontend()
    slow.is_blocked = True
    listener = RecordingListener(dict.fromkeys(range(num_streams), slow) | {num_streams: other})
    coalescer, num_steps = ResultCoalescer(listener, ResponseThrottle(None)), 0
    logprobs = [[(i, -1.0, i) for i in range(num_logprobs)]] if num_logprobs else None
    while slow.close_reason is None:
        coalescer.on_step(step(*(SequenceDelta(id, [num_steps], logprobs=logprobs) for id in range(num_streams + 1))))
        num_steps += 1
        assert num_steps * num_streams * 20 < limit
    assert str(limit) in slow.close_reason and other.close_reason is None
    assert num_steps > (5000 if num_streams == 1 else 10)
    assert listener.tokens == {num_streams: [*range(num_steps)]}
    coalescer.on_frontend_closed(slow)
    coalescer.on_frontend_writable(slow)
    assert len(listener.tokens) == 1


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
