# SPDX-License-Identifier: Apache-2.0
"""Arrival times of the tokens of each request, recorded in the engines' processes; measure.py describes replies."""

import time
from collections.abc import Sequence
from typing import Any


class TokenArrivals:
    """Tokens of each request as they come, by the engine's ids, which rise with the requests."""

    def __init__(self, start: float | None = None) -> None:
        """`start`: a time of perf_counter; None is now."""
        self._start = time.perf_counter() if start is None else start
        self._arrivals: dict[int, list[tuple[float, Sequence[int]]]] = {}

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def add(self, request_id: int, token_ids: Sequence[int], seconds: float | None = None) -> None:
        """Tokens of a request came `at` seconds after the start; None: just now."""
        if token_ids:
            self._arrivals.setdefault(request_id, []).append((self.now() if seconds is None else seconds, token_ids))

    def to_reply(self) -> dict[str, Any]:
        """Everything that came, request by request."""
        arrivals = [self._arrivals[request_id] for request_id in sorted(self._arrivals)]
        return {
            "seconds": max(request[-1][0] for request in arrivals),
            "token_ids": [[token for _, tokens in request for token in tokens] for request in arrivals],
            "events": [[(at, len(tokens)) for at, tokens in request] for request in arrivals],
        }
