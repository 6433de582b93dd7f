# SPDX-License-Identifier: Apache-2.0
"""The events of a simulation in the order of their times, and the virtual clock."""

import heapq
from collections.abc import Callable
from itertools import count


class EventQueue:
    """Future actions, by time. It is also the clock of everything that is simulated."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the start of the simulation."""
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def __call__(self) -> float:
        return self.now

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Run an action at a time. Actions of the same time run in the order of these calls."""
        heapq.heappush(self._actions, (time_s, next(self._numbers), action))

    def run(self) -> None:
        """Run all actions, also those that actions add."""
        while self._actions:
            self.now, _, action = heapq.heappop(self._actions)
            action()


class Channel:
    """Something that does at most a fixed number of operations at a time, in the order of their starts."""

    def __init__(self, queue: EventQueue, num_places: int) -> None:
        self._queue = queue
        self._free_at = [0.0] * num_places

    def run(self, seconds: float, action: Callable[[], None]) -> None:
        """Run an action when an operation of this many seconds is complete."""
        end = max(self._queue.now, heapq.heappop(self._free_at)) + seconds
        heapq.heappush(self._free_at, end)
        self._queue.at(end, action)
