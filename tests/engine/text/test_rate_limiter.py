# SPDX-License-Identifier: Apache-2.0
"""Limits of an adapter hold for it and for nobody else, and what it may have it gets."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.text.rate_limiter import BURST_S, AdapterRateLimiter
from quire_spec.documents.adapter_catalog import AdapterCatalog, AdapterLimits
from quire_spec.errors import ConfigError, Unavailable


def test_requests_that_are_open_are_limited():
    quotas = AdapterRateLimiter()
    quotas.set_limits({"sql": AdapterLimits(maxConcurrentRequests=2)}, 0.0)
    for _ in range(2):
        quotas.check("sql", 0.0)
        quotas.acquire("sql")
    with pytest.raises(Unavailable, match=r"'sql': 2 of its requests are open and limits.maxConcurrentRequests is 2"):
        quotas.check("sql", 0.0)
    quotas.check("other", 0.0)
    quotas.check(None, 0.0)
    quotas.release("sql")
    quotas.check("sql", 0.0)
    # What is open counts through a change of limits, also for those that had none.
    quotas.set_limits({"sql": AdapterLimits(maxConcurrentRequests=1)}, 0.0)
    with pytest.raises(Unavailable):
        quotas.check("sql", 0.0)
    quotas.set_limits({}, 0.0)
    quotas.check("sql", 0.0)


def test_tokens_are_limited_on_average():
    quotas = AdapterRateLimiter()
    quotas.set_limits({"sql": AdapterLimits(maxTokensPerSecond=100)}, 0.0)
    quotas.check("sql", 0.0)
    quotas.consume("sql", 1250)
    with pytest.raises(Unavailable, match=r"limits.maxTokensPerSecond is 100; try again in 2\.5 s"):
        quotas.check("sql", 0.0)
    quotas.set_limits({"sql": AdapterLimits(maxTokensPerSecond=100)}, 1.0)
    with pytest.raises(Unavailable, match=r"try again in 1\.5 s"):
        quotas.check("sql", 1.0)
    quotas.check("sql", 2.51)


@given(
    rate=st.integers(1, 1000),
    requests=st.lists(st.tuples(st.floats(0, 20), st.integers(1, 5000)), min_size=1, max_size=60),
)
def test_nobody_takes_more_than_its_rate_and_who_waits_as_told_is_let_in(rate: int, requests: list[tuple[float, int]]):
    quotas, now, taken, largest = AdapterRateLimiter(), 0.0, 0, max(tokens for _, tokens in requests)
    quotas.set_limits({"a": AdapterLimits(maxTokensPerSecond=rate)}, now)
    for pause, tokens in requests:
        now += pause
        try:
            quotas.check("a", now)
        except Unavailable as error:
            (said,) = re.findall(r"again in ([\d.]+) s", str(error))
            now += float(said) + 0.05  # it is told with one decimal
            quotas.check("a", now)
        quotas.consume("a", tokens)
        taken += tokens
        assert taken <= rate * (now + BURST_S) + largest


def test_a_limit_that_lets_nothing_through_is_refused():
    entry = {"name": "a", "source": {"path": "/a"}, "limits": {"maxTokensPerSecond": 0}}
    with pytest.raises(ConfigError, match=r"adapters\[0\]\.limits\.maxTokensPerSecond: must be at least 1, got 0"):
        AdapterCatalog.from_json({"adapters": [entry]})
