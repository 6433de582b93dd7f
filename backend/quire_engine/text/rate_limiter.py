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
class TokenBucket:
    """Tokens that an adapter may take; below zero after a request that took more than there were."""

    available_tokens: float
    refilled_at: float
    """When `level` was right."""

    def refill(self, rate: int, now: float) -> None:
        self.available_tokens = min(BURST_S * rate, self.available_tokens + rate * (now - self.refilled_at))
        self.refilled_at = now


class AdapterRateLimiter:
    """By adapter name. An adapter without limits costs a look into a table."""

    def __init__(self) -> None:
        self._limits: Mapping[str, AdapterLimits] = {}
        self._buckets: dict[str, TokenBucket] = {}
        self._num_open: Counter[str] = Counter()

    def set_limits(self, limits: Mapping[str, AdapterLimits], now: float) -> None:
        """Replace all limits. What an adapter has open and has taken still counts."""
        self._limits = dict(limits)
        previous_buckets = self._buckets
        self._buckets = {
            name: previous_buckets.get(name) or TokenBucket(BURST_S * adapter_limits.maxTokensPerSecond, now)
            for name, adapter_limits in limits.items()
            if adapter_limits.maxTokensPerSecond is not None
        }

    def check(self, adapter_name: str | None, now: float) -> None:
        """Whether a request may begin.

        Raises:
            Unavailable: its adapter is at a limit; the message says which, and when to come back.
        """
        if adapter_name is None or (limits := self._limits.get(adapter_name)) is None:
            return
        max_concurrent, num_open = limits.maxConcurrentRequests, self._num_open[adapter_name]
        if max_concurrent is not None and num_open >= max_concurrent:
            raise Unavailable(
                f"adapter {adapter_name!r}: {num_open} of its requests are open and limits.maxConcurrentRequests is "
                f"{max_concurrent}; "
                "try again when one is over, or raise it"
            )
        if (bucket := self._buckets.get(adapter_name)) is not None and (rate := limits.maxTokensPerSecond):
            bucket.refill(rate, now)
            if bucket.available_tokens <= 0:
                retry_after_s = (1 - bucket.available_tokens) / rate
                raise Unavailable(
                    f"adapter {adapter_name!r}: it has had its tokens, limits.maxTokensPerSecond is {rate}; try again "
                    "in "
                    f"{retry_after_s:.1f} s, or raise it"
                )

    def acquire(self, adapter_name: str | None) -> None:
        """A request began."""
        if adapter_name is not None:
            self._num_open[adapter_name] += 1

    def release(self, adapter_name: str | None) -> None:
        """A request ended."""
        if adapter_name is not None:
            self._num_open[adapter_name] -= 1
            if not self._num_open[adapter_name]:
                del self._num_open[adapter_name]

    def consume(self, adapter_name: str | None, num_tokens: int) -> None:
        """Tokens of a prompt are to be computed, or tokens were generated."""
        if adapter_name is not None and (bucket := self._buckets.get(adapter_name)) is not None:
            bucket.available_tokens -= num_tokens
