# SPDX-License-Identifier: Apache-2.0
"""Rate limiter of this pod: enforces the limits that the adapter catalog sets for each adapter.

Policy only: the caller passes the time. A request that exceeds a limit is rejected and never queued, because queued
requests would fill the queue that all adapters share. The client decides whether to retry. The request manager calls
the limiter for each request.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from quire_engine.text.admission.token_bucket import TokenBucket
from quire_spec.constants import AdapterName
from quire_spec.documents.adapter_catalog import AdapterLimits
from quire_spec.errors import Unavailable

BURST_S = 10.0
"""Capacity of a token bucket: an empty bucket is full again after this number of seconds. This capacity allows bursts
of requests that have hundreds of tokens each."""


class AdapterRateLimiter:
    """The number of open requests and the token bucket of each adapter."""

    def __init__(self) -> None:
        self._limits: Mapping[str, AdapterLimits] = {}
        self._buckets: dict[str, TokenBucket] = {}
        self._num_open: Counter[str] = Counter()

    def set_limits(self, limits: Mapping[str, AdapterLimits], now: float) -> None:
        """Replace all limits. Requests that are already open, and tokens that were already used, also count for the new
        limits."""
        self._limits = dict(limits)
        previous_buckets = self._buckets
        self._buckets = {
            name: previous_buckets.get(name) or TokenBucket(BURST_S * adapter_limits.maxTokensPerSecond, now)
            for name, adapter_limits in limits.items()
            if adapter_limits.maxTokensPerSecond is not None
        }

    def check(self, adapter_names: Sequence[AdapterName], now: float) -> None:
        """Check that each of the adapters of a request can have one more request.

        Raises:
            Unavailable: an adapter is at a limit; the message contains the limit and when to retry.
        """
        for adapter_name in adapter_names:
            if (limits := self._limits.get(adapter_name)) is not None:
                self._check_limits(adapter_name, limits, now)

    def acquire(self, adapter_names: Sequence[AdapterName]) -> None:
        """Count a request as open."""
        self._num_open.update(adapter_names)

    def release(self, adapter_names: Sequence[AdapterName]) -> None:
        """Count a request as ended."""
        for adapter_name in adapter_names:
            self._num_open[adapter_name] -= 1
            if not self._num_open[adapter_name]:
                del self._num_open[adapter_name]

    def consume(self, adapter_names: Sequence[AdapterName], num_tokens: int) -> None:
        """Take the tokens of a prompt, or generated tokens, from the buckets of the request's adapters."""
        for adapter_name in adapter_names:
            if (bucket := self._buckets.get(adapter_name)) is not None:
                bucket.available -= num_tokens

    def _check_limits(self, adapter_name: AdapterName, limits: AdapterLimits, now: float) -> None:
        max_concurrent, num_open = limits.maxConcurrentRequests, self._num_open[adapter_name]
        if max_concurrent is not None and num_open >= max_concurrent:
            raise Unavailable(
                f"adapter {adapter_name!r}: {num_open} requests are open and limits.maxConcurrentRequests is "
                f"{max_concurrent}; retry when one has ended, or raise the limit",
                retry_after_s=1.0,
            )
        if (bucket := self._buckets.get(adapter_name)) is not None and (rate := limits.maxTokensPerSecond):
            bucket.refill(rate, BURST_S * rate, now)
            if bucket.available <= 0:
                retry_after_s = bucket.wait_s(rate)
                raise Unavailable(
                    f"adapter {adapter_name!r}: rate limit reached, limits.maxTokensPerSecond is {rate}; retry in "
                    f"{retry_after_s:.1f} s, or raise the limit",
                    retry_after_s=retry_after_s,
                )
