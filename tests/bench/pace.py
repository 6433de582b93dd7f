# SPDX-License-Identifier: Apache-2.0
"""Record: what came of each request and when. `pace`: an engine's steps with requests arriving between them.

Called in the engines' processes, each with its engine's own `add` and `step`. Standard library only.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any


class Record:
    """Tokens of each request as they come, by the engine's ids, which rise with the requests."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._arrivals: dict[int, list[tuple[float, Sequence[int]]]] = {}

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def take(self, id: int, token_ids: Sequence[int], now: float) -> None:
        """Tokens of a request came."""
        if token_ids:
            self._arrivals.setdefault(id, []).append((now, token_ids))

    def reply(self) -> dict[str, Any]:
        """See measure.py."""
        arrivals = [self._arrivals[id] for id in sorted(self._arrivals)]
        return {
            "seconds": max(request[-1][0] for request in arrivals),
            "token_ids": [[token for _, tokens in request for token in tokens] for request in arrivals],
            "events": [[(now, len(tokens)) for now, tokens in request] for request in arrivals],
        }


def pace(offsets: Sequence[float], record: Record, add: Callable[[int], None], step: Callable[[], bool]) -> None:
    """Add request i `offsets[i]` seconds after the start, or after the step that runs then; `step` is False when the
    engine has nothing to do."""
    num_added, busy = 0, False
    while num_added < len(offsets) or busy:
        while num_added < len(offsets) and offsets[num_added] <= record.now():
            add(num_added)
            num_added += 1
        busy = step()
        if not busy and num_added < len(offsets):
            time.sleep(max(0.0, offsets[num_added] - record.now()))
