# SPDX-License-Identifier: Apache-2.0
"""Quotas: what each adapter may take of this pod, where the catalogue limits it. Policy only: the clock is passed in.

What is over a limit is refused at once and not queued: requests that wait would fill the one queue that all adapters
share, and a client knows better than we do whether to come back. The desk asks and tells it about every request.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from quire_spec.documents.adapter_catalog import AdapterLimits
from quire_spec.errors import Unavailable

BURST_S = 10.0
"""Seconds' worth of tokens that an adapter may save up: requests come in bursts, and are hundreds of tokens each."""


@dataclass(slots=True)
class _Bucket:
    """Tokens that an adapter may take; below zero after a request that took more than there were."""

    level: float
    since: float
    """When `level` was right."""

    def fill(self, rate: int, now: float) -> None:
        self.level = min(BURST_S * rate, self.level + rate * (now - self.since))
        self.since = now


class Quotas:
    """By adapter name. An adapter without limits costs a look into a table."""

    def __init__(self) -> None:
        self._limits: Mapping[str, AdapterLimits] = {}
        self._buckets: dict[str, _Bucket] = {}
        self._num_open: Counter[str] = Counter()

    def set(self, limits: Mapping[str, AdapterLimits], now: float) -> None:
        """Replace all limits. What an adapter has open and has taken still counts."""
        self._limits = dict(limits)
        kept = self._buckets
        self._buckets = {
            name: kept.get(name) or _Bucket(BURST_S * each.maxTokensPerSecond, now)
            for name, each in limits.items()
            if each.maxTokensPerSecond is not None
        }

    def check(self, adapter: str | None, now: float) -> None:
        """Whether a request may begin.

        Raises:
            Unavailable: its adapter is at a limit; the message says which, and when to come back.
        """
        if adapter is None or (limits := self._limits.get(adapter)) is None:
            return
        most, num_open = limits.maxConcurrentRequests, self._num_open[adapter]
        if most is not None and num_open >= most:
            raise Unavailable(
                f"adapter {adapter!r}: {num_open} of its requests are open and limits.maxConcurrentRequests is {most}; "
                "try again when one is over, or raise it"
            )
        if (bucket := self._buckets.get(adapter)) is not None and (rate := limits.maxTokensPerSecond):
            bucket.fill(rate, now)
            if bucket.level <= 0:
                seconds = (1 - bucket.level) / rate
                raise Unavailable(
                    f"adapter {adapter!r}: it has had its tokens, limits.maxTokensPerSecond is {rate}; try again in "
                    f"{seconds:.1f} s, or raise it"
                )

    def opened(self, adapter: str | None) -> None:
        """A request began."""
        if adapter is not None:
            self._num_open[adapter] += 1

    def closed(self, adapter: str | None) -> None:
        """A request ended."""
        if adapter is not None:
            self._num_open[adapter] -= 1
            if not self._num_open[adapter]:
                del self._num_open[adapter]

    def took(self, adapter: str | None, num_tokens: int) -> None:
        """Tokens of a prompt are to be computed, or tokens were generated."""
        if adapter is not None and (bucket := self._buckets.get(adapter)) is not None:
            bucket.level -= num_tokens
