# SPDX-License-Identifier: Apache-2.0
"""Exponential backoff: compute how many seconds to wait before a retry. This module only computes the delay; the caller
sleeps."""

import random

_MAX_DOUBLINGS = 60
"""Maximum number of times that the delay is doubled. A delay of 2**60 seconds is longer than every cap. Without this
maximum, a long outage would raise OverflowError."""


def backoff(attempt: int, first: float, cap: float, jitter: float = 0.0) -> float:
    """Return how many seconds to wait before retry `attempt`: min(cap, first * 2**attempt). The first retry has the
    number 0.

    With `jitter`, a random fraction of the result is then subtracted. The fraction is at most `jitter`. Because of
    this, clients that failed at the same time retry at different times.
    """
    delay = min(first * 2.0 ** min(attempt, _MAX_DOUBLINGS), cap)
    return delay * random.uniform(1.0 - jitter, 1.0) if jitter else delay
