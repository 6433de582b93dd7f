# SPDX-License-Identifier: Apache-2.0
"""Texts of errors are short and can be encoded, also if they contain values of a client."""

import time

from hypothesis import given
from hypothesis import strategies as st

from quire_spec.errors import MAX_ERROR_BYTES, InvalidArgument, error_text, truncated_repr

ANY_TEXT = st.text(st.characters() | st.just("\ud800"), max_size=200)
VALUES = st.recursive(
    ANY_TEXT | st.integers() | st.floats() | st.none() | st.binary(max_size=100),
    lambda v: st.lists(v, max_size=30) | st.dictionaries(ANY_TEXT, v, max_size=5) | st.tuples(v) | st.tuples(v, v),
    max_leaves=30,
)


@given(VALUES)
def test_a_value_is_shown_like_its_repr(value: object) -> None:
    text = repr(value)
    assert truncated_repr(value) == (text if len(text) <= 80 else text[:77] + "...")


def test_only_the_start_of_a_value_is_read() -> None:
    start = time.process_time()
    nested: list[object] = []
    for _ in range(5000):
        nested = [nested]
    for value in ([[1]] * 4_000_000, "x" * 100_000_000, {str(i): i for i in range(100_000)}, nested, 10**6000):
        assert len(truncated_repr(value)) <= 80
    assert time.process_time() - start < 1


@given(st.text(st.characters() | st.just("\ud800"), max_size=3000).map(lambda text: text * 3))
def test_a_message_has_a_limit(text: str) -> None:
    shown = error_text(InvalidArgument(text))
    assert len(shown.encode()) <= MAX_ERROR_BYTES
    if len(text.encode(errors="replace")) <= MAX_ERROR_BYTES:
        assert shown == text.encode(errors="replace").decode()
    else:
        assert shown.endswith("...") and shown[:-3] in text.encode(errors="replace").decode()
