# SPDX-License-Identifier: Apache-2.0
"""The body of a request is decoded within limits, and never blocks the event loop for long."""

import functools
import json
import time
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_server.openai.errors import ApiError
from quire_server.openai.http import json_body
from quire_server.openai.http.json_body import MAX_OBJECTS, MAX_VALUES, decode_object

MAX_BODY = 8 * 2**20

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\[{,:', max_size=4), inner, max_size=4),
    max_leaves=20,
)


def filled(start: str, part: str, end: str) -> bytes:
    """Return a body of 8 MiB that repeats a part."""
    return (start + part * ((MAX_BODY - len(start) - len(end)) // len(part)) + end).encode()


@functools.cache
def max_cpu_s() -> float:
    """Return half of the CPU time in which the standard library decodes as many bytes of numbers."""
    body = filled("[", "1,", "1]")
    return min(cpu_seconds(lambda: json.loads(body)) for _ in range(3)) / 2


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_a_body_is_decoded_as_json(document: dict[str, object]) -> None:
    assert decode_object(json.dumps(document).encode()) == document


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_values_are_counted_exactly(document: dict[str, object]) -> None:
    """Text that looks like JSON inside of strings does not count."""

    def count(value: object) -> tuple[int, int]:
        """Return the number of strings, lists and objects, and the number of commas."""
        if isinstance(value, str):
            return 1, 0
        if isinstance(value, dict):
            counts = [count(item) for item in value.values()]
            return 1 + len(value) + sum(c[0] for c in counts), max(0, len(value) - 1) + sum(c[1] for c in counts)
        if isinstance(value, list):
            counts = [count(item) for item in value]
            return 1 + sum(c[0] for c in counts), max(0, len(value) - 1) + sum(c[1] for c in counts)
        return 0, 0

    num_objects, num_commas = count(document)
    body = msgspec.json.encode(document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "MAX_OBJECTS", num_objects)
        patch.setattr(json_body, "MAX_VALUES", num_commas + 1)
        assert decode_object(body) == document
        patch.setattr(json_body, "MAX_OBJECTS", num_objects - 1)
        if body.count(b",") + body.count(b"[") + body.count(b"{") > num_objects - 1:
            with pytest.raises(ApiError, match="too many entries"):
                decode_object(body)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (filled('{"model":"m","allowed_token_ids":[', "1,", "1]}"), "allowed_token_ids"),
        (filled('{"prompt":[', "[],", "[]]}"), "prompt"),
        (filled('{"messages":[', '"",', '""]}'), "messages"),
        (filled('{"a":', "[", "1}"), "a|body"),
        (filled('{"logit_bias":{', '"1":1,', '"1":1}}'), "logit_bias|body"),
        (("{" + ",".join(f'"k{i}":1' for i in range(600_000)) + "}").encode(), "body"),
        (filled('{"tools":[', "{},", "{}]}"), "tools"),
        (filled("[", "[[]],", "0]"), "body"),
    ],
    ids=["ids", "lists", "strings", "depth", "bias", "keys", "objects", "no object"],
)
def test_a_large_body_is_rejected_quickly(body: bytes, field: str) -> None:
    assert len(body) > 6 * 2**20
    with pytest.raises(ApiError, match=rf"^({field}): (too many entries|is not JSON)") as error:
        decode_object(body)
    assert error.value.status == 400
    assert min(cpu_seconds(lambda: decode_object(body), ApiError) for _ in range(3)) < max_cpu_s()


@pytest.mark.parametrize(
    "document",
    [
        {"prompt": "[{," * 2_500_000},
        {"prompt": '\\"[' * 1_000_000},
        {"prompt": list(range(MAX_VALUES - 1))},
        {"prompt": [str(i) for i in range(MAX_OBJECTS - 10)]},
        {"messages": [{"role": "user", "content": "a, [b]" * 20} for _ in range(20_000)]},
    ],
    ids=["text", "escapes", "ids", "prompts", "messages"],
)
def test_a_large_valid_body_is_decoded_quickly(document: dict[str, object]) -> None:
    body = msgspec.json.encode(document)
    assert decode_object(body) == document
    assert min(cpu_seconds(lambda: decode_object(body)) for _ in range(3)) < 2 * max_cpu_s()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (r'{"prompt": "a \ud800"}', "prompt"),
        (r'{"messages": [{"role": "user", "content": "\udc00x"}]}', r"messages\[0\].content"),
        (
            r'{"messages": [{"role": "user", "content": [{"text": "\uD83D \uDE00"}]}]}',
            r"messages\[0\].content\[0\].text",
        ),
        (r'{"a": "\ud83d\ude00", "stop": ["b", "\ud83d"]}', r"stop\[1\]"),
        (r'{"\ud83d": 1}', "body"),
    ],
)
def test_a_lone_surrogate_is_named_with_its_field(body: str, field: str) -> None:
    with pytest.raises(ApiError, match=rf"^{field}: contains a lone surrogate"):
        decode_object(body.encode())


def cpu_seconds(function: Callable[[], object], expected: type[Exception] | None = None) -> float:
    start = time.process_time()
    if expected is None:
        function()
    else:
        with pytest.raises(expected):
            function()
    return time.process_time() - start
