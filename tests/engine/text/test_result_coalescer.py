# SPDX-License-Identifier: Apache-2.0
"""Joined results say what the single ones said, first tokens and ends do not wait, and nothing waits for ever."""

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
    """Takes what comes."""

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
async def test_every_token_comes_once_and_in_order(seed):
    draw, desk, pace = random.Random(seed), RecordingListener(), ResponseThrottle(2000)
    joiner = ResultCoalescer(desk, pace)
    lengths = {id: draw.randint(1, 30) for id in range(12)}
    made: dict[int, list[int]] = {id: [] for id in lengths}
    while running := [id for id in lengths if len(made[id]) < lengths[id]]:
        results = []
        for id in draw.sample(running, draw.randint(1, len(running))):
            made[id].append(len(made[id]))
            over = len(made[id]) == lengths[id]
            error = "INTERNAL" if over and id % 3 == 0 else None
            reason = "length" if over and not error else None
            logprobs = [[[float(made[id][-1]), -1.0, 1]]] if id % 2 else None
            results.append(SequenceDelta(id, [made[id][-1]], reason, logprobs, error))
        joiner.on_step(step(*results))
        before = {id for id in made if desk.tokens[id]}
        assert {result.id for result in results} <= before, "first tokens wait"
        assert all(desk.tokens[id] == made[id] for id in made if len(made[id]) == lengths[id]), "an end waits"
        pace.record_sent(len(results), asyncio.get_running_loop().time())
        await asyncio.sleep(draw.choice((0, 0, 0.002)))
    assert desk.tokens == made
    for id in lengths:
        ends = [r for r in desk.results if r.id == id and (r.finish_reason or r.error_code)]
        assert len(ends) == 1 and [r for r in desk.results if r.id == id][-1] is ends[0]
        said = [int(position[0][0]) for r in desk.results if r.id == id for position in r.logprobs or []]
        assert said == (made[id] if id % 2 else [])
    assert joiner._pending == {}


@virtual_time
async def test_what_waits_goes_when_it_may_though_no_step_comes():
    desk, pace = RecordingListener(), ResponseThrottle(100)
    joiner, loop = ResultCoalescer(desk, pace), asyncio.get_running_loop()
    joiner.on_step(step(SequenceDelta(1, [0]), SequenceDelta(2, [0])))
    pace.record_sent(5, loop.time())
    for token in (1, 2):
        joiner.on_step(step(SequenceDelta(1, [token]), SequenceDelta(2, [token])))
    assert desk.tokens == {1: [0], 2: [0]}
    await asyncio.sleep(0.1)
    assert desk.tokens == {1: [0, 1, 2], 2: [0, 1, 2]} and len(desk.results) == 4


@virtual_time
async def test_a_core_that_left_leaves_nothing_behind():
    desk, pace = RecordingListener(), ResponseThrottle(100)
    joiner = ResultCoalescer(desk, pace)
    joiner.on_step(step(SequenceDelta(1, [0])))
    pace.record_sent(3, asyncio.get_running_loop().time())
    joiner.on_step(step(SequenceDelta(1, [1])))
    joiner.on_core_lost()
    await asyncio.sleep(0.1)
    assert desk.num_lost == 1 and desk.tokens == {1: [0]}


async def test_sequences_that_were_aborted_are_forgotten():
    desk = RecordingListener()
    joiner = ResultCoalescer(desk, ResponseThrottle(None))
    for id in range(100):
        joiner.on_step(step(SequenceDelta(id, [0])))
    assert len(joiner._pending) <= 2


@given(st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 64)), min_size=1, max_size=50))
def test_what_goes_out_when_it_may_is_bounded_over_any_time(steps):
    pace, now, sent = ResponseThrottle(500), 0.0, []
    for pause, count in steps:
        now += pause
        if pace.delay_s(now) == 0:
            pace.record_sent(count, now)
            sent.append((now, count))
    for i, (start, _) in enumerate(sent):
        for end, _ in sent[i:]:
            between = sum(count for at, count in sent if start <= at < end)
            assert between <= 500 * (end - start) + 1e-6


def test_a_stream_alone_does_not_wait():
    pace = ResponseThrottle(500)
    for step in range(100):
        assert pace.delay_s(step * 0.004) == 0
        pace.record_sent(1, step * 0.004)


def test_many_streams_wait_for_as_long_as_they_took():
    pace = ResponseThrottle(500)
    pace.record_sent(64, 10.0)
    assert pace.delay_s(10.03) == pytest.approx(0.098)
    pace.record_sent(5, 10.03)  # that could not wait
    assert pace.delay_s(10.03) == pytest.approx(0.108)
    assert pace.delay_s(10.2) == 0


def test_no_rate_is_no_wait():
    pace = ResponseThrottle(None)
    pace.record_sent(10**6, 1.0)
    assert pace.delay_s(1.0) == 0
