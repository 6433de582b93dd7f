# SPDX-License-Identifier: Apache-2.0
"""Limits of an adapter apply to that adapter only, and requests within the limits are accepted."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.text.admission.rate_limiter import BURST_S, AdapterRateLimiter
from quire_spec.documents.adapter_catalog import AdapterCatalog, AdapterLimits
from quire_spec.errors import ConfigError, Unavailable


def test_open_requests_are_limited():
    limiter = AdapterRateLimiter()
    limiter.set_limits({"sql": AdapterLimits(maxConcurrentRequests=2)}, 0.0)
    for _ in range(2):
        limiter.check(("sql",), 0.0)
        limiter.acquire(("sql",))
    with pytest.raises(Unavailable, match=r"'sql': 2 requests are open and limits.maxConcurrentRequests is 2"):
        limiter.check(("sql",), 0.0)
    limiter.check(("other",), 0.0)
    limiter.check((), 0.0)
    limiter.release(("sql",))
    limiter.check(("sql",), 0.0)
    # Open requests still count after a change of limits, also for an adapter that had none.
    limiter.set_limits({"sql": AdapterLimits(maxConcurrentRequests=1)}, 0.0)
    with pytest.raises(Unavailable):
        limiter.check(("sql",), 0.0)
    limiter.set_limits({}, 0.0)
    limiter.check(("sql",), 0.0)


def test_limits_of_each_part_of_a_sum_apply():
    limiter, both = AdapterRateLimiter(), ("sql", "other")
    limiter.set_limits({"sql": AdapterLimits(maxConcurrentRequests=1, maxTokensPerSecond=10)}, 0.0)
    limiter.acquire(both)
    with pytest.raises(Unavailable, match="'sql': 1 requests are open"):
        limiter.check(both, 0.0)
    limiter.check(("other",), 0.0)
    limiter.release(both)
    limiter.consume(both, 500)
    with pytest.raises(Unavailable, match="maxTokensPerSecond is 10"):
        limiter.check(("other", "sql"), 0.0)


def test_tokens_per_second_are_limited():
    limiter = AdapterRateLimiter()
    limiter.set_limits({"sql": AdapterLimits(maxTokensPerSecond=100)}, 0.0)
    limiter.check(("sql",), 0.0)
    limiter.consume(("sql",), 1250)
    with pytest.raises(Unavailable, match=r"limits.maxTokensPerSecond is 100; retry in 2\.5 s"):
        limiter.check(("sql",), 0.0)
    limiter.set_limits({"sql": AdapterLimits(maxTokensPerSecond=100)}, 1.0)
    with pytest.raises(Unavailable, match=r"retry in 1\.5 s"):
        limiter.check(("sql",), 1.0)
    limiter.check(("sql",), 2.51)


@given(
    rate=st.integers(1, 1000),
    requests=st.lists(st.tuples(st.floats(0, 20), st.integers(1, 5000)), min_size=1, max_size=60),
)
def test_rate_is_never_exceeded_and_a_retry_after_the_given_time_is_accepted(
    rate: int, requests: list[tuple[float, int]]
):
    limiter, now, num_consumed, largest = AdapterRateLimiter(), 0.0, 0, max(tokens for _, tokens in requests)
    limiter.set_limits({"a": AdapterLimits(maxTokensPerSecond=rate)}, now)
    for pause, tokens in requests:
        now += pause
        try:
            limiter.check(("a",), now)
        except Unavailable as error:
            (retry_after_s,) = re.findall(r"retry in ([\d.]+) s", str(error))
            now += float(retry_after_s) + 0.05  # the message has one decimal
            limiter.check(("a",), now)
        limiter.consume(("a",), tokens)
        num_consumed += tokens
        assert num_consumed <= rate * (now + BURST_S) + largest


def test_limit_of_zero_is_rejected():
    entry = {"name": "a", "source": {"path": "/a"}, "limits": {"maxTokensPerSecond": 0}}
    with pytest.raises(ConfigError, match=r"adapters\[0\]\.limits\.maxTokensPerSecond: must be at least 1, got 0"):
        AdapterCatalog.from_json({"adapters": [entry]})
