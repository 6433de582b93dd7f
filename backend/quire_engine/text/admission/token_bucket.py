# SPDX-License-Identifier: Apache-2.0
"""Token bucket: an average rate, with bursts."""

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """The units, such as tokens or requests, that can be used at once. Their number is negative after a request that
    used more than were available."""

    available: float
    refilled_at: float
    """Time at which `available` was last updated."""

    def refill(self, rate: float, capacity: float, now: float) -> None:
        """Add `rate` units for each second since the last call, up to `capacity`."""
        self.available = min(capacity, self.available + rate * (now - self.refilled_at))
        self.refilled_at = now

    def wait_s(self, rate: float) -> float:
        """Return the seconds after which a request is accepted again; 0 if it is accepted now."""
        return max(0.0, (1 - self.available) / rate)
