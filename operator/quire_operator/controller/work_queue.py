# SPDX-License-Identifier: Apache-2.0
"""Work queue of keys with delays and backoff, modelled on client-go's workqueue. No I/O; the clock is an argument.

Only one worker at a time gets a key. Used by the controller.
"""

import asyncio
import heapq
import random
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from quire_spec.backoff import backoff

K = TypeVar("K", bound=Hashable)

BASE_DELAY_S, MAX_DELAY_S = 1.0, 300.0
"""Seconds of delay after the first failure, and maximum delay. Each further failure doubles the delay."""
MIN_INTERVAL_S = 0.1
"""Minimum seconds between two passes over a key, because events come in bursts and another writer can undo changes."""
MIN_RETRY_S = 2.0
"""Minimum seconds of delay after a failure, even if the key is added again."""


class WorkQueue(Generic[K]):
    """Queue of unique keys. A key that is added several times is worked on once. A key that is added while a worker has
    it is worked on once more."""

    def __init__(self, clock: Callable[[], float] | None = None, jitter: Callable[[], float] = random.random) -> None:
        """`clock` returns seconds, by default those of the event loop; `jitter` returns a number from 0 to 1."""
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
        """Number of keys that are due and wait for a worker."""
        now = self._clock()
        return sum(1 for key, due in self._due_at.items() if due <= now and key not in self._running)

    @property
    def oldest_age_s(self) -> float:
        """Seconds for which the oldest key has been due or worked on; 0 if there is no such key."""
        now = self._clock()
        waiting = (due for key, due in self._due_at.items() if key not in self._running)
        return max(0.0, now - min((*waiting, *self._running.values()), default=now))

    def add(self, key: K, delay_s: float = 0.0) -> None:
        """Make a key due after `delay_s` seconds; an earlier due time is kept."""
        due = max(self._clock() + delay_s, self._not_before.get(key, 0.0))
        if key in self._due_at and self._due_at[key] <= due:
            return
        self._due_at[key] = due
        self._push(key, due)

    def add_after(self, key: K, delay_s: float) -> None:
        """Make a key due after `delay_s` seconds, in place of an earlier due time. A later add() can shorten the
        delay."""
        self._due_at.pop(key, None)
        self.add(key, delay_s)

    async def get(self) -> K:
        """Wait for the next due key; the caller must call done() or add_rate_limited() afterwards."""
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
                # Not wait_for: before Python 3.12 it can lose a cancellation.
                async with asyncio.timeout(timeout_s):
                    await self._wakeup.wait()
            except TimeoutError:
                pass

    def done(self, key: K, requeue_after_s: float | None = None) -> None:
        """Record success, and make the key due again after at most `requeue_after_s` seconds."""
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
        """Record failure, and return the delay until the retry. `reset_backoff` starts again with the first delay.

        Adding the key shortens the delay, but not below `min_delay_s` or MIN_RETRY_S. A failed pass can have changed
        objects, and their events must not start the next pass immediately.
        """
        failures = self._failures[key] = 1 if reset_backoff else self._failures.get(key, 0) + 1
        delay_s = backoff(failures - 1, BASE_DELAY_S, max_delay_s) * (0.8 + 0.4 * self._jitter())
        delay_s = max(delay_s, min_delay_s)
        self._release(key)
        self._not_before[key] = self._clock() + max(min_delay_s, min(delay_s, MIN_RETRY_S))
        self.add_after(key, delay_s)
        return delay_s

    def forget(self, key: K) -> None:
        """Drop a key and its failures."""
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
