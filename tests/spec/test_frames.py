# SPDX-License-Identifier: Apache-2.0
"""Frames and messages: whatever goes in comes out, in whatever pieces it arrives."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_spec.errors import Internal, InvalidArgument, NotFound, error_from
from quire_spec.frames import HEAD_BYTES, VERSION, Decoder, encode
from quire_spec.messages import (
    Abort,
    Call,
    Cancel,
    Event,
    Events,
    Generate,
    Hello,
    Reply,
    SequenceResult,
    Stats,
    StepResult,
    Submit,
)

MESSAGES = [
    Hello("frontend", "sql", 12),
    Submit(1, "sql", "h\u00e9llo \U0001f600", None, {"temperature": 0.5}, True),
    Submit(2, "sql", None, [1, 2, 3], {}, False, cache_salt="tenant"),
    Cancel([1, 2]),
    Events([Event(1, "a", [5]), Event(2, finish_reason="stop", logprobs=[{"5": {"logprob": -0.5}}])]),
    Generate(7, [1, 2], {"max_tokens": 3}, adapter="sha256:ab"),
    Abort([7]),
    StepResult([SequenceResult(7, [9], "length", [[[9, -0.25, 1]]])], [7], Stats(num_running=1)),
    Call(1, "load_adapter", {"digest": "d"}),
    Reply(1, None, "NOT_FOUND", "no"),
]


@given(st.lists(st.sampled_from(MESSAGES), max_size=8), st.integers(1, 64))
def test_round_trip_in_pieces(messages, size):
    stream = b"".join(map(encode, messages))
    decoder = Decoder()
    got = [m for i in range(0, len(stream), size) for m in decoder.feed(stream[i : i + size])]
    assert got == messages


@pytest.mark.parametrize(
    "stream",
    [
        struct.pack("<IB", 2, VERSION + 1) + b"[]",
        struct.pack("<IB", 2**31, VERSION),
        struct.pack("<IB", 2, VERSION) + b"[]",
        struct.pack("<IB", 9, VERSION) + b'["Nope",1',
        struct.pack("<IB", 10, VERSION) + b'["Nope",1]',
        struct.pack("<IB", 13, VERSION) + b'["Abort",1,2]',
        struct.pack("<IB", 2, VERSION) + b"\xff\xff",
    ],
)
def test_a_broken_stream_is_refused(stream):
    with pytest.raises(Internal):
        list(Decoder().feed(stream))


def test_errors_keep_their_code():
    assert isinstance(error_from("NOT_FOUND", "x"), NotFound)
    assert isinstance(error_from("INVALID_ARG", "x"), InvalidArgument)
    assert isinstance(error_from("of another version", "x"), Internal)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 700))
def test_a_frame_that_is_too_long_is_dropped_and_the_next_is_read(kinds, size):
    sent = [[Cancel([1, 2]), Cancel([7] * 400), Submit(9, "sql", "x" * 2000, None, {}, True)][kind] for kind in kinds]
    stream = b"".join(map(encode, sent))
    dropped = []
    decoder = Decoder(500, lambda head, length: dropped.append((head, length)))
    got = [m for i in range(0, len(stream), size) for m in decoder.feed(stream[i : i + size])]
    bodies = [encode(m)[5:] for m in sent]
    assert got == [m for m, body in zip(sent, bodies, strict=True) if len(body) <= 500]
    assert dropped == [(body[:HEAD_BYTES], len(body)) for body in bodies if len(body) > 500]
    assert len(decoder._buffer) == 0
