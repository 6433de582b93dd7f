# SPDX-License-Identifier: Apache-2.0
"""Frames and messages: every message that the annotations allow survives a round trip, in chunks of any size.

An invalid payload belongs only to the requests of its header.
"""

import math
import struct
import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hostile_frames import PAYLOADS, UNKNOWN_KIND, hostile_frame

from quire_spec.engine.pooling_params import PoolingParams
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import Code, Internal, InvalidArgument, NotFound, error_from_code
from quire_spec.protocol import framing
from quire_spec.protocol.framing import MAGIC, FrameDecoder, InvalidFrame, Oversized, encode_frame
from quire_spec.protocol.messages import (
    MESSAGE_TYPES,
    AbortSequences,
    Call,
    CancelRequests,
    Failure,
    GenerateRequest,
    Hello,
    Message,
    OutputDelta,
    OutputDeltas,
    RequestMessage,
    SchedulerStats,
    SequenceDelta,
    SequenceRequest,
    StartedSequence,
    StepResult,
    to_raw,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
HEADER_BYTES = struct.calcsize("<HBHI")
IDS_END = 2**64
IDS = st.integers(0, IDS_END - 1)


def values_of(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Return a strategy for the values that an annotation allows."""
    hint = getattr(hint, "__supertype__", hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(arg, name) for arg in args])
    if origin is typing.Annotated:
        return bounded(args[0], args[1], name)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is list:
        return st.lists(values_of(args[0], name), max_size=3)
    if origin is tuple:
        if args[-1] is ...:
            return st.lists(values_of(args[0], name), max_size=3).map(tuple)
        return st.tuples(*(values_of(arg) for arg in args))
    if origin is dict:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return structs(hint)
    scalars: dict[Any, st.SearchStrategy[Any]] = {
        type(None): st.none(),
        bool: st.booleans(),
        int: IDS if name in ("id", "ids", "parent_id") else st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=8),
        Code: st.sampled_from(Code),
        msgspec.Raw: JSON.map(lambda value: to_raw(value, name)),
        Any: JSON,
    }
    return scalars[hint]


def bounded(hint: Any, meta: msgspec.Meta, name: str) -> st.SearchStrategy[Any]:
    """Return a strategy for the values that an annotation with bounds allows."""
    if hint is float:
        return st.floats(meta.ge, meta.le)
    if hint is int:
        return st.integers(meta.ge, IDS_END - 1 if name == "id" else meta.le)
    if hint is str and meta.pattern:  # a key
        return st.binary(min_size=32, max_size=32).map(bytes.hex)
    if hint is str:
        return st.text(min_size=meta.min_length or 0, max_size=min(8, meta.max_length or 8))
    return values_of(hint, name)


def structs(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Return a strategy for the instances of a struct; a field with a default can be omitted."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = msgspec.structs.fields(cls)
    required = {field.name: values_of(hints[field.name], field.name) for field in fields if field.required}
    optional = {field.name: values_of(hints[field.name], field.name) for field in fields if not field.required}
    return st.fixed_dictionaries(required, optional=optional).map(lambda values: cls(**values))


MESSAGES = st.one_of(map(structs, MESSAGE_TYPES))


@settings(max_examples=300)
@given(st.lists(MESSAGES, max_size=4), st.integers(1, 200))
def test_every_message_survives_a_round_trip_in_chunks(messages: list[Message], size: int):
    stream = b"".join(map(encode_frame, messages))
    decoder = FrameDecoder()
    assert [m for i in range(0, len(stream), size) for m in decoder.feed(stream[i : i + size])] == messages
    assert not decoder._buffer and not decoder._num_to_drop


@settings(max_examples=500)
@given(MESSAGES, st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_of_a_payload_end_only_its_requests(message: Message, changes: list[tuple[float, int]]):
    frame = bytearray(encode_frame(message))
    start = HEADER_BYTES + 8 * len(message.request_ids)
    for position, byte in changes:
        frame[start + int(position * (len(frame) - start))] = byte
    following = CancelRequests([1])
    first, second = FrameDecoder().feed(bytes(frame) + encode_frame(following))
    assert second == following
    if isinstance(first, InvalidFrame):
        assert list(first.request_ids) == list(message.request_ids)
    elif isinstance(first, RequestMessage):
        encode_frame(Failure(first.id, Code.INTERNAL, "the answer has the same id"))


def test_all_messages_are_frozen_and_have_no_untyped_objects():
    assert len({cls.__struct_config__.tag for cls in MESSAGE_TYPES}) == len(MESSAGE_TYPES)
    for cls in MESSAGE_TYPES:
        assert cls.__struct_config__.frozen and cls.__struct_config__.array_like
        for name, hint in typing.get_type_hints(cls).items():
            assert "Any" not in str(hint), (cls, name)


def test_floats_without_a_json_form_survive():
    [message] = FrameDecoder().feed(encode_frame(OutputDeltas([OutputDelta(1, cumulative_logprob=math.nan)])))
    assert isinstance(message, OutputDeltas)
    value = message.deltas[0].cumulative_logprob
    assert value is not None and math.isnan(value)


@pytest.mark.parametrize("start", [b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n", struct.pack("<HBHI", MAGIC + 1, 1, 0, 1)])
def test_a_corrupt_header_ends_the_stream(start: bytes):
    with pytest.raises(Internal, match="the stream is corrupt"):
        list(FrameDecoder().feed(start))


def pack(*values: Any) -> bytes:
    """Return values as MessagePack."""
    return msgspec.msgpack.encode(values)


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
@pytest.mark.parametrize("kind", [*(cls.__name__ for cls in MESSAGE_TYPES), UNKNOWN_KIND])
def test_an_invalid_payload_belongs_to_the_requests_of_its_header(kind: int | str, payload: bytes):
    stream = encode_frame(AbortSequences([1])) + hostile_frame(kind, [5], payload) + encode_frame(CancelRequests([2]))
    for size in (1, 7, len(stream)):
        decoder = FrameDecoder()
        first, invalid, last = (m for i in range(0, len(stream), size) for m in decoder.feed(stream[i : i + size]))
        assert (first, last) == (AbortSequences([1]), CancelRequests([2]))
        assert isinstance(invalid, InvalidFrame) and list(invalid.request_ids) == [5]
        assert kind in (UNKNOWN_KIND, invalid.message_type and invalid.message_type.__name__)


def test_a_type_that_is_not_accepted_is_dropped():
    decoder = FrameDecoder([Hello])
    invalid, hello = decoder.feed(encode_frame(Failure(3, Code.INTERNAL, "x")) + encode_frame(Hello("stub")))
    assert isinstance(invalid, InvalidFrame) and list(invalid.request_ids) == [3] and hello == Hello("stub")


@settings(max_examples=40)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 700))
def test_drops_oversize_frame_and_reads_the_next(kinds: list[int], size: int):
    sent = [
        [
            CancelRequests([1]),
            Call(8, "m", to_raw("y" * 900, "x")),
            GenerateRequest(9, "sql", "x" * 2000, None, SamplingParams(), True),
        ][kind]
        for kind in kinds
    ]
    stream = b"".join(map(encode_frame, sent))
    decoder = FrameDecoder(max_payload_bytes=500)
    received = [m for i in range(0, len(stream), size) for m in decoder.feed(stream[i : i + size])]
    for message, result in zip(sent, received, strict=True):
        if isinstance(message, CancelRequests):
            assert result == message
        else:
            assert isinstance(result, InvalidFrame) and isinstance(result.error, Oversized)
            assert list(result.request_ids) == [message.id] and result.error.num_bytes > 500
    assert not decoder._buffer


@pytest.mark.parametrize("value", ["\ud800", 2**64, [[]]], ids=["surrogate", "big integer", "depth"])
def test_a_value_that_cannot_be_encoded_names_its_field(value: Any):
    if isinstance(value, list):
        for _ in range(100_000):
            value = [value]
    with pytest.raises(InvalidArgument, match="tools: cannot be sent to another process"):
        to_raw(value, "tools")


def test_a_message_that_cannot_be_encoded_is_an_error_of_its_sender(monkeypatch: pytest.MonkeyPatch):
    for model, pooling, field in (("\ud800", None, "model"), ("m", PoolingParams(dimensions=2**64), "dimensions")):
        with pytest.raises(InvalidArgument, match=f"^{field}: cannot be sent"):
            encode_frame(GenerateRequest(1, model, "x", None, SamplingParams(), True, pooling=pooling))
    with pytest.raises(InvalidArgument, match="GenerateRequest: cannot be sent"):
        encode_frame(GenerateRequest(-1, "base", "x", None, SamplingParams(), True))
    monkeypatch.setattr(framing, "MAX_PAYLOAD_BYTES", 1000)
    with pytest.raises(Oversized, match=r"SequenceRequest: the message has 1.* bytes, but at most 1000"):
        encode_frame(SequenceRequest(1, [5] * 1000, SamplingParams()))


@pytest.mark.parametrize("problem", ["surrogate", "oversize"])
def test_an_item_that_cannot_be_encoded_fails_alone(problem: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(framing, "MAX_PAYLOAD_BYTES", 2000)
    bad_text = "\ud800" if problem == "surrogate" else "x" * 3000
    deltas = [OutputDelta(i, bad_text if i == 3 else f"text {i}") for i in range(7)]
    received = [d for m in FrameDecoder().feed(encode_frame(OutputDeltas(deltas))) for d in m.deltas]
    assert [d.id for d in received] == list(range(7))
    assert [d for d in received if d.id != 3] == deltas[:3] + deltas[4:]
    assert received[3].final and received[3].error_code is Code.INTERNAL

    results = [SequenceDelta(i, [i], error=bad_text if i == 3 else "") for i in range(7)]
    steps = list(
        FrameDecoder().feed(encode_frame(StepResult(results, [StartedSequence(3, 0.5)], SchedulerStats(num_running=7))))
    )
    assert [r.id for step in steps for r in step.results] == list(range(7))
    assert [r.error_code for step in steps for r in step.results] == [None] * 3 + [Code.INTERNAL] + [None] * 3
    assert [started for step in steps for started in step.started] == [StartedSequence(3, 0.5)]
    assert all(step.stats == SchedulerStats(num_running=7) for step in steps)


def test_an_item_that_cannot_be_decoded_fails_alone():
    tag = OutputDeltas.__struct_config__.tag
    items = [[1, "good", [5]], [2, "wrong", "no list"], [], [4, "also good", [6]]]
    [message] = FrameDecoder().feed(hostile_frame(tag, [1, 2, 3, 4], pack(tag, items)))
    assert [(d.id, d.error_code) for d in message.deltas] == [
        (1, None), (2, Code.INTERNAL), (3, Code.INTERNAL), (4, None),
    ]  # fmt: skip
    assert [d.text for d in message.deltas if d.error_code is None] == ["good", "also good"]
    # If the message cannot be divided into items, all its requests fail, but no other request.
    [invalid] = FrameDecoder().feed(hostile_frame(tag, [1, 2], pack(tag, items)[:-2]))
    assert isinstance(invalid, InvalidFrame) and list(invalid.request_ids) == [1, 2]


def test_errors_keep_their_code():
    assert isinstance(error_from_code("NOT_FOUND", "x"), NotFound)
    assert isinstance(error_from_code("INVALID_ARG", "x"), InvalidArgument)
    assert isinstance(error_from_code("of another version", "x"), Internal)
    assert Failure.from_error(1, NotFound("no \ud800")) == Failure(1, Code.NOT_FOUND, "no ?")
