# SPDX-License-Identifier: Apache-2.0
"""Framing and messages: round trip of arbitrary chunks, corrupt streams, and oversize frames."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_spec.errors import Internal, InvalidArgument, NotFound, error_from_code
from quire_spec.protocol.framing import HEAD_BYTES, VERSION, FrameDecoder, encode_frame
from quire_spec.protocol.messages import (
    AbortSequences,
    CancelRequests,
    ControlRequest,
    ControlResponse,
    GenerateRequest,
    Hello,
    OutputDelta,
    OutputDeltas,
    SchedulerStats,
    SequenceDelta,
    SequenceRequest,
    StepResult,
)

MESSAGES = [
    Hello("frontend", "sql", 12),
    GenerateRequest(1, "sql", "h\u00e9llo \U0001f600", None, {"temperature": 0.5}, True),
    GenerateRequest(2, "sql", None, [1, 2, 3], {}, False, cache_salt="tenant"),
    CancelRequests([1, 2]),
    OutputDeltas([OutputDelta(1, "a", [5]), OutputDelta(2, finish_reason="stop", logprobs=[{"5": {"logprob": -0.5}}])]),
    SequenceRequest(7, [1, 2], {"max_tokens": 3}, adapter_digest="sha256:ab"),
    AbortSequences([7]),
    StepResult([SequenceDelta(7, [9], "length", [[[9, -0.25, 1]]])], [(7, 0.25)], SchedulerStats(num_running=1)),
    ControlRequest(1, "load_adapter", {"digest": "d"}),
    ControlResponse(1, None, "NOT_FOUND", "no"),
]


@settings(max_examples=40)
@given(st.lists(st.sampled_from(MESSAGES), max_size=8), st.integers(1, 64))
def test_round_trip_in_chunks(messages, size):
    stream = b"".join(map(encode_frame, messages))
    decoder = FrameDecoder()
    decoded = [m for i in range(0, len(stream), size) for m in decoder.feed(stream[i : i + size])]
    assert decoded == messages


@pytest.mark.parametrize(
    "stream",
    [
        struct.pack("<IB", 2, VERSION + 1) + b"[]",
        struct.pack("<IB", 2**31, VERSION),
        struct.pack("<IB", 2, VERSION) + b"[]",
        struct.pack("<IB", 9, VERSION) + b'["Nope",1',
        struct.pack("<IB", 10, VERSION) + b'["Nope",1]',
        struct.pack("<IB", 22, VERSION) + b'["AbortSequences",1,2]',
        struct.pack("<IB", 2, VERSION) + b"\xff\xff",
    ],
)
def test_rejects_corrupt_stream(stream):
    with pytest.raises(Internal):
        list(FrameDecoder().feed(stream))


def test_errors_keep_their_code():
    assert isinstance(error_from_code("NOT_FOUND", "x"), NotFound)
    assert isinstance(error_from_code("INVALID_ARG", "x"), InvalidArgument)
    assert isinstance(error_from_code("of another version", "x"), Internal)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 700))
def test_drops_oversize_frame_and_reads_the_next(kinds, size):
    sent = [
        [CancelRequests([1, 2]), CancelRequests([7] * 400), GenerateRequest(9, "sql", "x" * 2000, None, {}, True)][kind]
        for kind in kinds
    ]
    stream = b"".join(map(encode_frame, sent))
    dropped = []
    decoder = FrameDecoder(500, lambda head, length: dropped.append((head, length)))
    decoded = [m for i in range(0, len(stream), size) for m in decoder.feed(stream[i : i + size])]
    bodies = [encode_frame(m)[5:] for m in sent]
    assert decoded == [m for m, body in zip(sent, bodies, strict=True) if len(body) <= 500]
    assert dropped == [(body[:HEAD_BYTES], len(body)) for body in bodies if len(body) > 500]
    assert len(decoder._buffer) == 0
