# SPDX-License-Identifier: Apache-2.0
"""Delays before retries double up to a cap, with less than the full delay where jitter is asked for."""

from quire_spec.backoff import backoff


def test_delays_double_up_to_the_cap():
    assert [backoff(attempt, 0.5, 8.0) for attempt in (0, 1, 4, 5, 10**6)] == [0.5, 1.0, 8.0, 8.0, 8.0]


def test_jitter_only_shortens_a_delay():
    delays = {backoff(1, 0.5, 8.0, jitter=0.5) for _ in range(100)}
    assert len(delays) > 1 and min(delays) >= 0.5 and max(delays) <= 1.0
