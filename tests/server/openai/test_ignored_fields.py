# SPDX-License-Identifier: Apache-2.0
"""A field that the server does not know is ignored, named in a header and counted, or rejected if this is configured. A
field that would change the output is never ignored."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.openai_front import running_front

from quire_server.openai.errors import ApiError
from quire_server.openai.http.ignored_fields import MAX_HEADER_BYTES, MAX_NAMES, IgnoredFields
from quire_server.openai.request_fields import UNSUPPORTED_FIELDS, GenerationFields, parse_fields

pytestmark = pytest.mark.timeout(120)

HEADER = "x-quire-ignored-fields"
CHAT = {"model": "base", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "vendor": 1}, "cache_control": {"type": "ephemeral"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 1}, "x": 1}, "y": 2}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}], "seen_by_templates": 1}]
ITEMS = [{"role": "user", "content": "Hi", "phase": "final"}]
RESPONSE_TOOL = {"type": "function", "name": "f", "vendor": 1}
RESPONSE = {"model": "base", "input": "Hi", "max_output_tokens": 2}
REQUESTS = {
    "/v1/completions": [
        ({"model": "base", "prompt": "a", "max_tokens": 1, "max_token": 3, "x-y.z": None}, ["max_token"]),
        ({"prompt": "a", "max_tokens": 1, "stream": True, "stream_options": {"other": 1}}, ["stream_options.other"]),
        ({"prompt": "a", "max_tokens": 1, "user": "a", "metadata": {"a": "b"}, "store": True}, []),
    ],
    "/v1/chat/completions": [
        (CHAT | {"tools": [TOOL], "tool_choice": "none"}, ["tools.cache_control", "tools.function.vendor"]),
        (
            CHAT | {"tool_choice": "none", "stream": True, "rid": "1", "return_logprob": False},
            ["rid", "return_logprob"],
        ),
        (CHAT | {"response_format": FORMAT, "max_tokens": 9}, ["response_format.y", "response_format.json_schema.x"]),
        (CHAT | {"messages": PARTS}, ["messages.content.cache_control"]),
    ],
    "/v1/responses": [
        (RESPONSE | {"reasoning": {"depth": 1}, "text": {"shape": "x"}}, ["reasoning.depth", "text.shape"]),
        (RESPONSE | {"input": ITEMS, "tools": [RESPONSE_TOOL], "tool_choice": "none"}, ["input.phase", "tools.vendor"]),
        (RESPONSE | {"moderation": {}}, ["moderation"]),
    ],
    "/tokenize": [({"prompt": "a", "fast": True}, ["fast"])],
    "/detokenize": [({"tokens": [5], "fast": True}, ["fast"])],
}
CASES = [(path, body, names) for path, cases in REQUESTS.items() for body, names in cases]


@pytest.fixture(scope="module")
def chat_front(tmp_path_factory):
    """A front for a checkpoint with a chat template."""
    with running_front(tmp_path_factory.mktemp("lenient")) as front:
        yield front


@pytest.fixture(scope="module")
def strict_front(tmp_path_factory):
    with running_front(tmp_path_factory.mktemp("strict"), {"rejectUnknownFields": True}) as front:
        yield front


def num_counted(front) -> float:
    text = front.request("/metrics").body
    return float(re.search(r"^quire_requests_with_ignored_fields_total\{[^}]*\} (\S+)", text, re.M)[1])


@pytest.mark.parametrize(("path", "body", "names"), CASES, ids=str)
def test_an_unknown_field_is_ignored_named_and_counted(chat_front, path, body, names):
    before = num_counted(chat_front)
    answer = chat_front.request(path, body)
    assert answer.status == 200, answer.body
    assert sorted(filter(None, answer.headers.get(HEADER, "").split(","))) == sorted(names)
    assert num_counted(chat_front) == before + bool(names)


@pytest.mark.parametrize(("path", "body", "names"), CASES, ids=str)
def test_a_strict_server_rejects_an_unknown_field(strict_front, path, body, names):
    answer = strict_front.request(path, body)
    if not names:
        assert answer.status == 200 and HEADER not in answer.headers
        return
    assert answer.status == 400 and "is not a field of this request" in answer.message
    assert answer.body["error"]["param"] in names
    if "max_token" in names:
        assert "did you mean max_tokens?" in answer.message


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_FIELDS))
def test_a_field_that_changes_the_output_is_rejected(name):
    ignored = IgnoredFields()
    with pytest.raises(ApiError, match=rf"^{name}: is not supported by this server"):
        parse_fields({name: {"some": ["value"]}}, GenerationFields, ignored)
    for value in UNSUPPORTED_FIELDS[name]:
        parse_fields({name: value}, GenerationFields, ignored)
    assert not ignored


def test_the_header_and_the_counter_of_an_error(chat_front):
    before = num_counted(chat_front)
    answer = chat_front.complete(prompt="a", temperature=-1, vendor=1)
    assert answer.status == 400 and answer.headers[HEADER] == "vendor" and num_counted(chat_front) == before + 1


@given(
    st.dictionaries(st.text(max_size=700) | st.text("ab,\n\r: ", max_size=9), st.none() | st.integers(), max_size=40)
)
def test_the_header_is_short_and_plain(document):
    ignored = IgnoredFields()
    ignored.check(document, frozenset({"a"}))
    header = ignored.header()
    assert bool(header) == bool(ignored) == any(value is not None for name, value in document.items() if name != "a")
    for _, value in header:
        names = value.decode().split(",")
        assert len(value) <= MAX_HEADER_BYTES and 1 <= len(names) <= MAX_NAMES == 16
        assert all(re.fullmatch(r"[A-Za-z0-9_.-]+", name) for name in names)
