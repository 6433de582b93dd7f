# SPDX-License-Identifier: Apache-2.0
"""The input of a batch: any line is a request or an error, each exactly once, in little memory."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_server.batch import input_file
from quire_server.batch.id_set import IdSet
from quire_server.batch.input_file import InputFile
from quire_server.batch.request_line import BadLine, RequestLine, parse_line
from quire_spec.errors import ConfigError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "p"}}


def read_all(path, is_done=lambda line_id: False):
    with InputFile(path, is_done) as file:
        num_lines, requests, bad_lines = file.count_lines(), [], []
        while True:
            window = file.next_window()
            assert window.requests == sorted(window.requests, key=lambda request: request.sort_key)
            requests += window.requests
            bad_lines += window.bad_lines
            if window.is_last:
                return num_lines, requests, bad_lines


@given(st.lists(st.integers(0, 60).map(str)), st.integers(0, 60).map(str))
def test_an_id_set_is_a_set(ids, other):
    id_set, expected = IdSet(), set()
    for item in ids:
        assert id_set.add(item) is (item not in expected)
        expected.add(item)
    assert len(id_set) == len(expected) and (other in id_set) is (other in expected)


def test_an_id_set_grows_and_stays_small():
    id_set = IdSet()
    assert all(id_set.add(f"request-{i}") for i in range(50_000))
    assert not id_set.add("request-0") and "request-49999" in id_set and "request-50000" not in id_set
    assert id_set._slots.itemsize * len(id_set._slots) <= 24 * 50_000


@given(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_line_is_a_request_or_an_error(line):
    assert isinstance(parse_line(1, line), BadLine)


@given(
    st.dictionaries(st.sampled_from([*GOOD, "x"]), JSON),
    st.dictionaries(st.sampled_from(["model", "prompt", "messages", "input", "stream"]), JSON),
)
def test_a_line_with_any_fields_is_a_request_or_an_error(fields, body):
    document = {**GOOD, "body": body, **fields}
    line = parse_line(1, json.dumps(document).encode())
    if isinstance(line, RequestLine):
        assert (line.custom_id, line.url, line.body) == (document["custom_id"], document["url"], document["body"])
        assert not line.body.get("stream")
    else:
        assert line.message.startswith("line 1: ") and len(line.message) <= 300


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"custom_id": ""}, "invalid_custom_id"),
        ({"custom_id": "x" * 513}, "invalid_custom_id"),
        ({"method": "GET"}, "invalid_method"),
        ({"url": "/v1/models"}, "invalid_url"),
        ({"url": ["/v1/completions"]}, "invalid_url"),
        ({"body": "text"}, "invalid_body"),
        ({"body": {"stream": True}}, "invalid_body"),
        ({"body": {"model": 3}}, "invalid_body"),
    ],
)
def test_an_error_names_the_field(change, code):
    line = parse_line(4, json.dumps({**GOOD, **change}).encode())
    assert isinstance(line, BadLine) and line.code == code
    assert next(iter(change)) in line.message and line.message.startswith("line 4: ")


def test_windows_are_bounded_and_contain_each_line_once(tmp_path, monkeypatch):
    monkeypatch.setattr(input_file, "WINDOW_LINES", 7)
    monkeypatch.setattr(input_file, "MAX_LINE_BYTES", 1000)
    lines = [json.dumps({**GOOD, "custom_id": f"r{i}", "body": {"model": "ab"[i % 2]}}) for i in range(40)]
    lines[3], lines[5], lines[9] = "", "x" * 5000, lines[8]
    path = tmp_path / "in.jsonl"
    path.write_text("\ufeff" + "\n".join(lines))
    num_lines, requests, bad_lines = read_all(path)
    assert num_lines == 40
    assert sorted(int(r.custom_id[1:]) for r in requests) == sorted(set(range(40)) - {3, 5, 9})
    assert [b.code for b in bad_lines] == ["line_too_long", "duplicate_custom_id"]
    done = {requests[0].custom_id, bad_lines[0].id}
    _, rest, bad_rest = read_all(path, done.__contains__)
    assert len(rest) == len(requests) - 1 and bad_rest == bad_lines[1:]
    # A corrected line is another line.
    lines[5] = json.dumps({**GOOD, "custom_id": "r5"})
    path.write_text("\n".join(lines))
    assert "r5" in {r.custom_id for r in read_all(path, done.__contains__)[1]}


def test_an_input_that_cannot_be_read_twice_is_rejected(tmp_path):
    for path in (tmp_path / "absent", tmp_path, "/dev/null"):
        with pytest.raises(ConfigError, match="--input"):
            InputFile(tmp_path / path, lambda line_id: False)
