# SPDX-License-Identifier: Apache-2.0
"""Traces: prompts share exactly the blocks with equal ids, and each wrong line is named."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.simulation.trace import TraceRequest, read_trace
from quire_spec.errors import InvalidArgument

GOOD = {"timestamp": 0, "input_length": 4, "output_length": 1}


@given(
    st.lists(st.integers(0, 2**40), min_size=1, max_size=6),
    st.lists(st.integers(0, 2**40), min_size=1, max_size=6),
    st.integers(16, 64),
    st.integers(2000, 200_000),
)
def test_prompts_share_the_blocks_with_equal_ids(ids, others, block_tokens, vocab_size):
    num_shared = next(
        (i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others))
    )
    prompts = [
        TraceRequest(0, len(h) * block_tokens, 1, tuple(h)).prompt(vocab_size, block_tokens) for h in (ids, others)
    ]
    equal = next((i for i, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b), min(map(len, prompts)))
    assert equal // block_tokens == num_shared
    assert all(0 <= token < vocab_size for prompt in prompts for token in prompt)


def test_ids_that_end_with_equal_digits_differ():
    prompts = {tuple(TraceRequest(0, 16, 1, (i,)).prompt(100, 16)) for i in (1, 101, 10_101, 100, 10_000)}
    assert len(prompts) == 5


def test_the_first_request_is_the_start(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(GOOD | {"timestamp": t}) for t in (1_700_000_000_000, 1_700_000_000_500)))
    assert [request.arrival_s for request in read_trace(path)] == [0.0, 0.5]


@given(st.lists(st.integers(1, 300), min_size=2, max_size=20), st.integers(16, 64))
def test_prompts_without_ids_share_nothing(lengths, block_tokens):
    requests = [TraceRequest(0, length, 1, line=line) for line, length in enumerate(lengths, 1)]
    beginnings = {tuple(r.prompt(50_000, block_tokens)[:5]) for r in requests if r.num_input_tokens >= 5}
    assert len(beginnings) == sum(length >= 5 for length in lengths)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{", "not JSON"),
        ("[1]", "not an object"),
        (json.dumps(GOOD | {"timestamp": -1}), "timestamp"),
        (json.dumps(GOOD | {"timestamp": float("nan")}), "timestamp"),
        (json.dumps(GOOD | {"timestamp": True}), "timestamp"),
        (json.dumps(GOOD | {"input_length": 0}), "input_length"),
        (json.dumps(GOOD | {"output_length": "5"}), "output_length"),
        (json.dumps(GOOD | {"hash_ids": 5}), "hash_ids"),
        (json.dumps(GOOD | {"hash_ids": [1, -1]}), "hash_ids"),
        (json.dumps(GOOD | {"hash_ids": [2**60]}), "hash_ids"),
        (json.dumps(GOOD | {"adapter": 5}), "adapter"),
        (json.dumps({"timestamp": 0}), "input_length"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, field):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(InvalidArgument, match=rf"line 2: .*{field}"):
        read_trace(path)


def test_unsorted_and_empty_traces_are_rejected(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(GOOD | {"timestamp": t}) for t in (5, 4)))
    with pytest.raises(InvalidArgument, match=r"line 2: timestamp: 4 is before .* 5; sort"):
        read_trace(path)
    path.write_text("\n")
    with pytest.raises(InvalidArgument, match="no request"):
        read_trace(path)
