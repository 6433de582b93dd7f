# SPDX-License-Identifier: Apache-2.0
"""Who may write to a service, by its mark: at any time at most one of several operators."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_operator.controller.status.ownership import EXPIRE_S, FIELD, RENEW_S, evaluate_ownership

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def marked(identity, age_s=0.0):
    renewed_at = (NOW - timedelta(seconds=age_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {FIELD: {"identity": identity, "renewedAt": renewed_at}}


@pytest.mark.parametrize(
    ("status", "is_own", "writes"),
    [
        ({}, True, True),
        (marked("a"), True, False),
        (marked("a", RENEW_S + 1), True, True),
        (marked("a", 10 * EXPIRE_S), True, True),
        (marked("b"), False, False),
        (marked("b", EXPIRE_S - 1), False, False),
        (marked("b", EXPIRE_S + 1), True, True),
        # A clock that is far ahead does not hold a service for ever.
        (marked("b", -EXPIRE_S - 1), True, True),
        ({FIELD: {"identity": "b"}}, True, True),
        ({FIELD: {"identity": "b", "renewedAt": "x"}}, True, True),
        ({FIELD: {"identity": "b", "renewedAt": "2026-01-02T03:04:05"}}, True, True),
    ],
)
def test_the_mark_decides(status, is_own, writes):
    found = evaluate_ownership(status, "a", NOW)
    assert (found.is_own, found.new_mark is not None) == (is_own, writes)
    assert found.owner == ("a" if is_own else "b")
    if found.new_mark:
        after = evaluate_ownership({FIELD: found.new_mark}, "a", NOW)
        assert after.is_own and after.new_mark is None
        assert not evaluate_ownership({FIELD: found.new_mark}, "c", NOW).is_own


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 3 * EXPIRE_S)), max_size=20))
def test_a_valid_mark_has_one_owner(passes):
    """Operators look at a service at any times; each write is seen by the others, as the API server guarantees."""
    status, now = {}, NOW
    for identity, pause_s in passes:
        now += timedelta(seconds=pause_s)
        found = evaluate_ownership(status, identity, now)
        if found.new_mark:
            status = {FIELD: found.new_mark}
        if found.is_own:
            others = {"a", "b", "c"} - {identity}
            assert not any(evaluate_ownership(status, other, now).is_own for other in others)
