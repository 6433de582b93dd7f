# SPDX-License-Identifier: Apache-2.0
"""The work queue: each key once, at its time, later and later after failures."""

import asyncio

import pytest

from quire_operator.controller.work_queue import MAX_DELAY_S, MIN_INTERVAL_S, MIN_RETRY_S, WorkQueue


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def queue(clock):
    return WorkQueue(clock, jitter=lambda: 0.5)


async def taken(queue):
    """The next key, or None when there is none now."""
    try:
        async with asyncio.timeout(0.02):
            return await queue.get()
    except TimeoutError:
        return None


async def test_a_key_added_often_is_worked_on_once_and_again_when_added_meanwhile(queue, clock):
    for _ in range(3):
        queue.add("a")
    assert await taken(queue) == "a" and await taken(queue) is None
    queue.add("a")
    assert await taken(queue) is None, "never twice at once"
    queue.done("a", requeue_after_s=600)
    assert await taken(queue) is None, "not before some calm"
    clock.now += MIN_INTERVAL_S
    assert await taken(queue) == "a"
    queue.done("a", requeue_after_s=600)
    clock.now += 599
    assert await taken(queue) is None
    clock.now += 1
    assert await taken(queue) == "a"


async def test_the_earliest_wish_wins(queue, clock):
    queue.add("a", 50)
    queue.add("a", 5)
    queue.add("a", 500)
    queue.add("b", 1)
    clock.now += 6
    assert [await taken(queue), await taken(queue)] == ["b", "a"]


async def test_failures_wait_longer_and_longer_and_news_shorten_that_only_so_far(queue, clock):
    queue.add("a")
    waits = []
    for _ in range(12):
        assert await taken(queue) == "a"
        waits.append(queue.add_rate_limited("a"))
        clock.now += waits[-1]
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, MAX_DELAY_S, MAX_DELAY_S, MAX_DELAY_S]
    assert await taken(queue) == "a"
    queue.add_rate_limited("a")
    queue.add("a")
    assert await taken(queue) is None
    clock.now += MIN_RETRY_S
    assert await taken(queue) == "a"
    assert queue.add_rate_limited("a", reset_backoff=True) == 1


async def test_what_a_server_asks_for_is_the_least(queue, clock):
    queue.add("a")
    await queue.get()
    assert queue.add_rate_limited("a", min_delay_s=20) == 20
    queue.add("a")
    clock.now += 19
    assert await taken(queue) is None
    clock.now += 1
    assert await taken(queue) == "a"


async def test_depth_and_age_say_what_waits(queue, clock):
    assert (queue.depth, queue.oldest_age_s) == (0, 0)
    queue.add("a")
    queue.add("b", 100)
    clock.now += 7
    assert (queue.depth, queue.oldest_age_s) == (1, 7)
    await queue.get()
    clock.now += 5
    assert (queue.depth, queue.oldest_age_s) == (0, 5), "a key that is worked on counts too"
    queue.forget("b")
    queue.done("a")
    assert (queue.depth, queue.oldest_age_s) == (0, 0)
