# SPDX-License-Identifier: Apache-2.0
"""Work queue of keys with delays and backoff, modelled on client-go's workqueue. The queue does no I/O, and the caller
can pass the clock.

The queue never gives a key to two workers at the same time. Used by the controller.
"""

import asyncio
import heapq
import random
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from quire_spec.backoff import backoff

K = TypeVar("K", bound=Hashable)

BASE_DELAY_S, MAX_DELAY_S = 1.0, 300.0
"""The first value is the delay in seconds after the first failure of a key. Each further failure doubles the delay. The
second value is the maximum delay."""
MIN_INTERVAL_S = 0.1
"""Minimum number of seconds between two passes over a key. Without it, a burst of events would start many passes.
Another writer that always undoes the operator's changes would also start many passes."""
MIN_RETRY_S = 2.0
"""After a failure, a key is delayed by at least this number of seconds, even if it is added again."""


class WorkQueue(Generic[K]):
    """Queue of unique keys. If a key is added several times before a worker takes it, it is processed once. If it is
    added while a worker processes it, it is processed once more afterwards."""

    def __init__(self, clock: Callable[[], float] | None = None, jitter: Callable[[], float] = random.random) -> None:
        """`clock` returns the time in seconds; by default, it is the clock of the event loop. `jitter` returns a number
        from 0 to 1."""
        self._clock = clock or asyncio.get_running_loop().time
        self._jitter = jitter
        self._due_at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._num_pushed = 0
        self._running: dict[K, float] = {}
        self._failures: dict[K, int] = {}
        self._not_before: dict[K, float] = {}
        self._wakeup = asyncio.Event()

    @property
    def depth(self) -> int:
        """Number of keys that are due but that no worker has taken yet."""
        now = self._clock()
        return sum(1 for key, due in self._due_at.items() if due <= now and key not in self._running)

    @property
    def oldest_age_s(self) -> float:
        """Age in seconds of the oldest key that is due or being processed; 0 if there is no such key. The age counts
        from the time at which the key became due, or at which a worker took it."""
        now = self._clock()
        waiting = (due for key, due in self._due_at.items() if key not in self._running)
        return max(0.0, now - min((*waiting, *self._running.values()), default=now))

    def add(self, key: K, delay_s: float = 0.0) -> None:
        """Schedule a key to be processed in `delay_s` seconds. If the key is already scheduled for an earlier time,
        that time is kept."""
        due = max(self._clock() + delay_s, self._not_before.get(key, 0.0))
        if key in self._due_at and self._due_at[key] <= due:
            return
        self._due_at[key] = due
        self._push(key, due)

    def add_after(self, key: K, delay_s: float) -> None:
        """Schedule a key to be processed in `delay_s` seconds. This replaces any time for which the key was scheduled
        before. A later call of add() can shorten the delay."""
        self._due_at.pop(key, None)
        self.add(key, delay_s)

    async def get(self) -> K:
        """Wait until a key is due, and return the key. The caller must call done() or add_rate_limited() afterwards."""
        while True:
            now = self._clock()
            while self._heap:
                due, _, key = self._heap[0]
                if self._due_at.get(key) != due or key in self._running:
                    heapq.heappop(self._heap)
                    continue
                if due > now:
                    break
                heapq.heappop(self._heap)
                del self._due_at[key]
                self._running[key] = now
                return key
            self._wakeup.clear()
            timeout_s = self._heap[0][0] - now if self._heap else None
            try:
                # Do not use `asyncio.wait_for` here. Before Python 3.12, it can lose a cancellation.
                async with asyncio.timeout(timeout_s):
                    await self._wakeup.wait()
            except TimeoutError:
                pass

    def done(self, key: K, requeue_after_s: float | None = None) -> None:
        """Record that a pass over the key succeeded. If `requeue_after_s` is set, schedule the next pass in at most
        that number of seconds."""
        self._failures.pop(key, None)
        self._not_before[key] = self._clock() + MIN_INTERVAL_S
        if key in self._due_at:
            self._due_at[key] = max(self._due_at[key], self._not_before[key])
        self._release(key)
        if requeue_after_s is not None:
            self.add(key, requeue_after_s)

    def add_rate_limited(
        self, key: K, min_delay_s: float = 0.0, reset_backoff: bool = False, max_delay_s: float = MAX_DELAY_S
    ) -> float:
        """Record that a pass over the key failed, schedule a retry, and return the delay until the retry. With
        `reset_backoff`, the delays start again with the first one.

        A call of add() for the key shortens the delay, but not below `min_delay_s` or MIN_RETRY_S. This limit exists
        because a failed pass may have changed objects already: the events of those changes must not start the next pass
        immediately.
        """
        failures = self._failures[key] = 1 if reset_backoff else self._failures.get(key, 0) + 1
        delay_s = backoff(failures - 1, BASE_DELAY_S, max_delay_s) * (0.8 + 0.4 * self._jitter())
        delay_s = max(delay_s, min_delay_s)
        self._release(key)
        self._not_before[key] = self._clock() + max(min_delay_s, min(delay_s, MIN_RETRY_S))
        self.add_after(key, delay_s)
        return delay_s

    def forget(self, key: K) -> None:
        """Remove a key from the schedule, and forget how often it failed."""
        self._due_at.pop(key, None)
        self._failures.pop(key, None)
        self._not_before.pop(key, None)

    def _release(self, key: K) -> None:
        self._running.pop(key, None)
        if key in self._due_at:
            self._push(key, self._due_at[key])

    def _push(self, key: K, due: float) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (due, self._num_pushed, key))
        self._wakeup.set()
