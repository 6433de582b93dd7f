# SPDX-License-Identifier: Apache-2.0
"""Exponential backoff: how long to wait before a retry. Called by everything that retries; it does not sleep itself."""

import random

_MAX_DOUBLINGS = 60
"""2**60 seconds are beyond every cap; without a limit a long outage would end in an OverflowError."""


def backoff(attempt: int, first: float, cap: float, jitter: float = 0.0) -> float:
    """Return the seconds to wait before retry `attempt`, counted from 0: `first`, doubled each time, at most `cap`.

    `jitter` is the largest fraction that is subtracted at random, so that clients that failed together do not retry
    together.
    """
    delay = min(first * 2.0 ** min(attempt, _MAX_DOUBLINGS), cap)
    return delay * random.uniform(1.0 - jitter, 1.0) if jitter else delay
