# SPDX-License-Identifier: Apache-2.0
"""Merged deltas contain everything that the single ones contained, and the buffer is bounded."""

from hypothesis import given
from hypothesis import strategies as st

from quire_engine.text.output_delta_buffer import (
    MAX_BATCH_BYTES,
    MAX_PENDING_BYTES,
    MAX_PENDING_STREAM_BYTES,
    OutputDeltaBuffer,
)
from quire_spec.protocol.messages import OutputDelta


def make_delta(request: int, number: int, final: bool = False, logprobs: bool = False) -> OutputDelta:
    entry = [{str(number): {"logprob": -1.0, "rank": 1, "decoded_token": "x"}}] if logprobs else None
    reason = "stop" if final else None
    return OutputDelta(request, f"<{number}>", [number], reason, -1.0 * number, entry, 3, number + 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_merged_deltas_equal_the_single_ones(appends: list[tuple[int, bool]]):
    buffer = OutputDeltaBuffer()
    sent: list[OutputDelta] = []
    expected: dict[int, list[int]] = {}
    for number, (request, flush) in enumerate(appends):
        buffer.append(make_delta(request, number, logprobs=request == 0))
        expected.setdefault(request, []).append(number)
        if flush:
            sent += [delta for batch in buffer.drain() for delta in batch]
            assert buffer.drain() == []
    sent += [delta for batch in buffer.drain() for delta in batch]
    for request, numbers in expected.items():
        own = [delta for delta in sent if delta.id == request]
        assert "".join(delta.text for delta in own) == "".join(f"<{n}>" for n in numbers)
        assert [i for delta in own for i in delta.token_ids] == numbers
        assert own[-1].num_output_tokens == numbers[-1] + 1
        assert own[-1].cumulative_logprob == -1.0 * numbers[-1]
        if request == 0:
            assert [next(iter(p)) for delta in own for p in delta.logprobs or []] == [str(n) for n in numbers]
        else:
            assert all(delta.logprobs is None for delta in own)


def test_merged_delta_is_final_if_the_last_one_is():
    buffer = OutputDeltaBuffer()
    for number in range(3):
        buffer.append(make_delta(1, number, final=number == 2))
    ((merged,),) = buffer.drain()
    assert merged.final and merged.text == "<0><1><2>"


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30))
def test_outputs_are_merged_separately_and_the_final_delta_is_last(appends: list[tuple[int, bool]]):
    buffer = OutputDeltaBuffer()
    sent: list[OutputDelta] = []
    ends = [(0, False), (2, False), (1, True)]
    for number, (index, flush) in enumerate(appends + ends):
        num_left = len(appends) + len(ends) - number
        finish_reason = "stop" if num_left <= len(ends) else None
        buffer.append(
            OutputDelta(
                1,
                f"<{number}>",
                [number],
                finish_reason,
                num_output_tokens=99,
                index=index,
                other_outputs_pending=num_left > 1,
            )
        )
        if flush:
            sent += [delta for batch in buffer.drain() for delta in batch]
    assert [delta.final for delta in sent] == [False] * (len(sent) - 1) + [True]
    for output in range(3):
        numbers = [number for number, (index, _) in enumerate(appends + ends) if index == output]
        assert [i for delta in sent for i in delta.token_ids if delta.index == output] == numbers


def test_unread_stream_overflows():
    buffer = OutputDeltaBuffer()
    count = 0
    while buffer.overflow_reason is None:
        buffer.append(make_delta(1, count))
        count += 1
        assert count < MAX_PENDING_STREAM_BYTES
    assert count > 1000
    assert str(MAX_PENDING_STREAM_BYTES) in buffer.overflow_reason
    buffer.drain()
    assert buffer.overflow_reason is None


def test_many_unread_streams_overflow_together():
    buffer = OutputDeltaBuffer()
    big = OutputDelta(0, "x" * (MAX_PENDING_STREAM_BYTES // 2), [1])
    for request in range(2 * MAX_PENDING_BYTES // MAX_PENDING_STREAM_BYTES - 1):
        buffer.append(OutputDelta(request, big.text, [1]))
    assert buffer.overflow_reason is None
    buffer.append(OutputDelta(10**6, big.text, [1]))
    assert buffer.overflow_reason and str(MAX_PENDING_BYTES) in buffer.overflow_reason


def test_single_large_delta_does_not_overflow():
    buffer = OutputDeltaBuffer()
    buffer.append(OutputDelta(1, "x" * (MAX_PENDING_BYTES + 1), [1], "stop"))
    assert buffer.overflow_reason is None


def test_drained_deltas_are_split_into_bounded_batches():
    buffer = OutputDeltaBuffer()
    for request in range(5):
        buffer.append(OutputDelta(request, "x" * (MAX_BATCH_BYTES // 2), [1]))
    assert [len(batch) for batch in buffer.drain()] == [2, 2, 1]
    assert buffer.drain() == []
