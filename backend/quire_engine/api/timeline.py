# SPDX-License-Identifier: Apache-2.0
"""When requests arrived and when their tokens were generated, and the latencies that follow."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from quire_spec.errors import error_from_code
from quire_spec.protocol.messages import SequenceDelta

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies in milliseconds."""

    ttft: dict[str, float]
    """Percentiles of the time from arrival to the first token: p50, p90, p95, p99."""
    itl: dict[str, float]
    """Percentiles of the time between two tokens of a request. Empty if every output has one token."""


class Timeline:
    """Times of requests, in seconds after the start."""

    def __init__(self) -> None:
        self._arrivals: dict[int, float] = {}
        self._tokens: dict[int, list[float]] = {}

    def arrive(self, request_id: int, arrival_s: float) -> None:
        """Record the arrival of a request."""
        self._arrivals[request_id], self._tokens[request_id] = arrival_s, []

    def add(self, result: SequenceDelta, now: float) -> None:
        """Record the tokens of a result; raises its error if it has one."""
        if result.error_code is not None:
            raise error_from_code(result.error_code, result.error)
        self._tokens[result.id] += [now] * len(result.token_ids)

    def restore(self, arrival_s: float, token_times: list[float]) -> None:
        """Add a request that was recorded."""
        request_id = len(self._arrivals)
        self._arrivals[request_id], self._tokens[request_id] = float(arrival_s), [float(t) for t in token_times]

    def requests(self) -> Iterator[tuple[float, list[float]]]:
        """Return for each request its arrival and the times of its tokens."""
        for request_id, arrival_s in self._arrivals.items():
            yield arrival_s, self._tokens[request_id]

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last token."""
        return max(times[-1] for _, times in self.requests()) - min(self._arrivals.values())

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(map(len, self._tokens.values()))

    def ttft_s(self) -> list[float]:
        """Return the seconds from the arrival of each request to its first token."""
        return [times[0] - arrival_s for arrival_s, times in self.requests()]

    def itl_s(self) -> list[float]:
        """Return the seconds between each two tokens of a request that follow each other."""
        return [later - earlier for _, times in self.requests() for earlier, later in pairwise(times)]

    def latencies(self) -> Latencies:
        """Return the percentiles of all requests."""
        return Latencies(_percentiles(self.ttft_s()), _percentiles(self.itl_s()))

    def goodput(self, max_ttft_s: float, max_itl_s: float) -> float:
        """Return the share of the requests whose first token and whose mean time between tokens are within limits."""
        good = [
            times[0] - arrival <= max_ttft_s and (times[-1] - times[0]) / max(1, len(times) - 1) <= max_itl_s
            for arrival, times in self.requests()
        ]
        return sum(good) / len(good)


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": float(1000 * np.percentile(seconds, p)) for p in PERCENTILES} if seconds else {}
