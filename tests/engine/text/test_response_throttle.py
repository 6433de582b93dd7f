# SPDX-License-Identifier: Apache-2.0
"""Waiting responses go out together, at a bounded rate over any time; the first after a pause at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.text.response_throttle import ResponseThrottle


@given(st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 64)), min_size=1, max_size=50))
def test_what_goes_out_when_it_may_is_bounded_over_any_time(steps):
    pace, now, sent = ResponseThrottle(500), 0.0, []
    for pause, count in steps:
        now += pause
        if pace.delay_s(now) == 0:
            pace.record_sent(count, now)
            sent.append((now, count))
    for i, (start, _) in enumerate(sent):
        for end, _ in sent[i:]:
            between = sum(count for at, count in sent if start <= at < end)
            assert between <= 500 * (end - start) + 1e-6


def test_a_stream_alone_does_not_wait():
    pace = ResponseThrottle(500)
    for step in range(100):
        assert pace.delay_s(step * 0.004) == 0
        pace.record_sent(1, step * 0.004)


def test_many_streams_wait_for_as_long_as_they_took():
    pace = ResponseThrottle(500)
    pace.record_sent(64, 10.0)
    assert pace.delay_s(10.03) == pytest.approx(0.098)
    pace.record_sent(5, 10.03)  # that could not wait
    assert pace.delay_s(10.03) == pytest.approx(0.108)
    assert pace.delay_s(10.2) == 0


def test_no_rate_is_no_wait():
    pace = ResponseThrottle(None)
    pace.record_sent(10**6, 1.0)
    assert pace.delay_s(1.0) == 0
