# SPDX-License-Identifier: Apache-2.0
"""Queue: keys that are to be looked at, each at its time, none twice at once. No I/O; the clock is an argument."""

import asyncio
import heapq
import random
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

BASE_DELAY_S, MAX_DELAY_S = 1.0, 300.0
"""Wait after the first failure, doubled with each further one, and the longest."""
MIN_INTERVAL_S = 0.1
"""After a pass, news of a key brings it back no earlier: events come in showers, and two writers may quarrel."""
MIN_RETRY_S = 2.0
"""After a failure, news of a key brings it back no earlier."""


class WorkQueue(Generic[K]):
    """A work queue: a key that is added many times is worked on once; one that is added meanwhile, once more."""

    def __init__(self, clock: Callable[[], float] | None = None, jitter: Callable[[], float] = random.random) -> None:
        """`clock` gives seconds, the event loop's by default; `jitter` a number from 0 to 1."""
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
        """Keys whose time has come and that nobody works on."""
        now = self._clock()
        return sum(1 for key, due in self._due_at.items() if due <= now and key not in self._running)

    @property
    def oldest_age_s(self) -> float:
        """For how long the oldest key is overdue or being worked on; 0 when there is none."""
        now = self._clock()
        waiting = (due for key, due in self._due_at.items() if key not in self._running)
        return max(0.0, now - min((*waiting, *self._running.values()), default=now))

    def add(self, key: K, delay_s: float = 0.0) -> None:
        """Look at a key after so many seconds, or earlier when that is wanted already."""
        due = max(self._clock() + delay_s, self._not_before.get(key, 0.0))
        if key in self._due_at and self._due_at[key] <= due:
            return
        self._due_at[key] = due
        self._push(key, due)

    def add_after(self, key: K, delay_s: float) -> None:
        """Look at a key after so many seconds, and no earlier unless something adds it again."""
        self._due_at.pop(key, None)
        self.add(key, delay_s)

    async def get(self) -> K:
        """The next key whose time has come; `done` has to follow."""
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
        """A key was worked on well; look at it again after so many seconds at the latest."""
        self._failures.pop(key, None)
        self._not_before[key] = self._clock() + MIN_INTERVAL_S
        if key in self._due_at:
            self._due_at[key] = max(self._due_at[key], self._not_before[key])
        self._release(key)
        if requeue_after_s is not None:
            self.add(key, requeue_after_s)

    def add_rate_limited(self, key: K, min_delay_s: float = 0.0, reset_backoff: bool = False) -> float:
        """A key could not be worked on; seconds until it is tried again, the first of them if `anew`: it got further.

        Something that adds it before then shortens that, but not to less than `least_s` or a few seconds: an attempt
        that fails half way changes objects, and the news of those must not bring the next attempt at once.
        """
        failures = self._failures[key] = 1 if reset_backoff else self._failures.get(key, 0) + 1
        delay_s = min(MAX_DELAY_S, BASE_DELAY_S * 2.0 ** min(failures - 1, 16)) * (0.8 + 0.4 * self._jitter())
        delay_s = max(delay_s, min_delay_s)
        self._release(key)
        self._not_before[key] = self._clock() + max(min_delay_s, min(delay_s, MIN_RETRY_S))
        self.add_after(key, delay_s)
        return delay_s

    def forget(self, key: K) -> None:
        """Forget a key that is gone."""
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
