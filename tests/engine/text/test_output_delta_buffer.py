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
from quire_spec.protocol.messages import OutputDelta, TokenLogprob


def make_delta(request: int, number: int, index: int = 0, ends: bool = False) -> OutputDelta:
    """Return delta `number` of an output. Requests have log probabilities if their id is 0, and output 0 ends last."""
    entry = [[TokenLogprob(number, -1.0, 1, "x")]] if request == 0 else None
    finish_reason = "stop" if ends else None
    return OutputDelta(
        request, f"<{number}>", [number], finish_reason, -1.0 * number, entry, 3, number + 1,
        index=index, other_outputs_pending=index > 0,
    )  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.booleans()), max_size=60))
def test_merged_deltas_equal_the_single_ones(appends: list[tuple[int, int, bool]]):
    """The outputs of a request are merged separately, and its final delta is the last one."""
    buffer = OutputDeltaBuffer()
    sent: list[OutputDelta] = []
    expected: dict[tuple[int, int], list[int]] = {}
    ends = [(request, index, False) for index in (1, 0) for request in range(3)]
    for number, (request, index, flush) in enumerate(appends + ends):
        buffer.append(make_delta(request, number, index, ends=number >= len(appends)))
        expected.setdefault((request, index), []).append(number)
        if flush:
            sent += [delta for batch in buffer.pop_batches() for delta in batch]
            assert buffer.pop_batches() == []
    sent += [delta for batch in buffer.pop_batches() for delta in batch]
    for (request, index), numbers in expected.items():
        own = [delta for delta in sent if (delta.id, delta.index) == (request, index)]
        assert "".join(delta.text for delta in own) == "".join(f"<{n}>" for n in numbers)
        assert [i for delta in own for i in delta.token_ids] == numbers
        assert own[-1].num_output_tokens == numbers[-1] + 1
        assert own[-1].cumulative_logprob == -1.0 * numbers[-1]
        logprobs = [position[0].token_id for delta in own for position in delta.logprobs or []]
        assert logprobs == (numbers if request == 0 else [])
    for request in range(3):
        finals = [delta.final for delta in sent if delta.id == request]
        assert finals == [False] * (len(finals) - 1) + [True]


def test_unread_stream_overflows():
    buffer = OutputDeltaBuffer()
    count = 0
    while buffer.overflow_reason is None:
        buffer.append(make_delta(1, count))
        count += 1
        assert count < MAX_PENDING_STREAM_BYTES
    assert count > 1000
    assert str(MAX_PENDING_STREAM_BYTES) in buffer.overflow_reason
    buffer.pop_batches()
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


def test_popped_deltas_are_split_into_bounded_batches():
    buffer = OutputDeltaBuffer()
    for request in range(5):
        buffer.append(OutputDelta(request, "x" * (MAX_BATCH_BYTES // 2), [1]))
    assert [len(batch) for batch in buffer.pop_batches()] == [2, 2, 1]
    assert buffer.pop_batches() == []
