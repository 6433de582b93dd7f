# SPDX-License-Identifier: Apache-2.0
"""Weighted sums of adapters are read exactly, and each invalid one is refused with the part that is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_spec.documents.adapter_sum import MAX_PARTS, WeightedAdapter, is_sum, parse_sum, sum_digest
from quire_spec.errors import InvalidArgument

NAMES = st.from_regex(r"[A-Za-z0-9]([-A-Za-z0-9._]{0,8}[A-Za-z0-9])?", fullmatch=True)
WEIGHTS = st.floats(-100, 100)


@given(parts=st.lists(st.tuples(NAMES, WEIGHTS), min_size=1, max_size=MAX_PARTS, unique_by=lambda part: part[0]))
def test_every_sum_is_read(parts):
    text = ",".join(f"{name}:{weight!r}" for name, weight in parts)
    assert parse_sum(text) == tuple(WeightedAdapter(name, weight) for name, weight in parts)


@given(name=NAMES)
def test_a_name_is_no_sum(name):
    assert parse_sum(name) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "must be NAME:WEIGHT") for text in ("a,b", "a:", ":1", "a:0.5,", ",a:1", "a:0.5,b", "a:x", "a:1:2")),
        *((f"a:{weight}", "must be NAME:WEIGHT") for weight in ("nan", "inf", "-inf", "1e9", "-100.1", "1_0", " 1")),
        ("a:\uff11", "must be NAME:WEIGHT"),
        ("a:0.5,a:0.5", "'a' occurs twice"),
        (",".join(f"a{i}:1" for i in range(9)), "9 parts, at most 8 are allowed"),
    ],
)
def test_invalid_sums_are_refused(text, message):
    with pytest.raises(InvalidArgument, match=message):
        parse_sum(text)


@given(
    parts=st.lists(st.tuples(NAMES, WEIGHTS), min_size=1, max_size=4, unique_by=lambda part: part[0]), data=st.data()
)
def test_digest_depends_on_adapters_and_weights_but_not_on_their_order(parts, data):
    digest = sum_digest(parts)
    assert is_sum(digest) and sum_digest(data.draw(st.permutations(parts))) == digest
    (name, weight), *others = parts
    assert sum_digest([(name, weight + 1), *others]) != digest != sum_digest([(f"{name}x", weight), *others])
