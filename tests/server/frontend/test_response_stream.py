# SPDX-License-Identifier: Apache-2.0
"""ResponseStream: order, coalescing, exclusive ownership, exactly one final response."""

import queue
import random
import threading

import numpy as np
import pytest

from quire_server.frontend import tensors
from quire_server.frontend.response_stream import MAX_PENDING_TOKENS, ResponseStream
from quire_spec.errors import Cancelled
from quire_spec.protocol.messages import OutputDelta


def stream(streams=True, request_id=1):
    inputs = {"text_input": np.array([b"x"], np.object_), "stream": np.array([streams])}
    _, options = tensors.parse_request(request_id, "m", "m", inputs, "{}")
    return ResponseStream(request_id, options, object(), 0.0)


def token(number, final=False):
    return OutputDelta(1, f"{number} ", [number], "stop" if final else None, num_output_tokens=number + 1)


def test_first_delta_enqueues_and_later_ones_are_buffered():
    s = stream()
    assert [s.push(token(i)) for i in range(3)] == [True, False, False]
    assert [delta.token_ids for delta in s.pop_deltas()] == [[0], [1], [2]]
    assert not s.release()
    assert s.push(token(3))


def test_without_streaming_it_is_enqueued_once_at_the_end():
    s = stream(streams=False)
    assert not s.push(token(0))
    assert s.try_acquire()
    assert not s.release()
    assert s.push(token(1, final=True))
    assert len(s.pop_deltas()) == 2


def test_push_back_returns_the_delta_and_drops_later_ones():
    s = stream()
    assert s.push(token(0))
    assert not s.push(OutputDelta(1, error_code="INTERNAL", error="x"))
    *_, error = s.pop_deltas()
    s.push_back(error)
    assert not s.push(token(1))
    assert s.pop_deltas() == [error]
    assert not s.release()


def test_fail_replaces_pending_deltas_and_is_final():
    s = stream()
    s.push(token(0))
    assert not s.fail(Cancelled("gone"))
    (delta,) = s.pop_deltas()
    assert (delta.error_code, delta.error, s.failed_locally) == ("CANCELLED", "gone", True)
    assert not s.push(token(1))
    assert not s.fail(Cancelled("again"))
    assert not s.release()


def test_fail_does_not_affect_a_finished_request():
    s = stream()
    assert s.push(token(0, final=True))
    assert not s.fail(Cancelled("gone"))
    assert s.pop_deltas() == [token(0, final=True)]
    assert not s.failed_locally


@pytest.mark.parametrize("final", [True, False])
def test_pending_tokens_are_bounded(final):
    s = stream()
    s.push(OutputDelta(1, "x", list(range(MAX_PENDING_TOKENS))))
    s.push(OutputDelta(1, "y", [1], "stop" if final else None))
    deltas = s.pop_deltas()
    assert len(deltas) == (2 if final else 1)
    assert s.failed_locally is not final
    assert deltas[-1].error_code == (None if final else "UNAVAILABLE")
    assert ("reads too slowly" in deltas[-1].error) is not final


def test_bound_does_not_apply_without_streaming():
    s = stream(streams=False)
    for index in range(3):
        must_enqueue = s.push(
            OutputDelta(1, "x", list(range(MAX_PENDING_TOKENS)), "length", index=index, other_outputs_pending=index < 2)
        )
        assert must_enqueue == (index == 2)
    assert [delta.index for delta in s.pop_deltas()] == [0, 1, 2] and not s.failed_locally


def test_threads_keep_order_and_send_one_final_response():
    """Sender threads, a reader thread and a cancelling thread, as in a stub."""
    to_send, sent = queue.SimpleQueue(), {}
    streams = {i: stream(request_id=i) for i in range(40)}

    def push_tokens():
        for number in range(30):
            for s in streams.values():
                if s.push(token(number, final=number == 29)):
                    to_send.put(s)

    def cancel_randomly():
        draw = random.Random(1)
        for _ in range(2000):
            s = draw.choice(list(streams.values()))
            failed = s.request_id % 4 == 0 and draw.random() < 0.1 and s.fail(Cancelled("gone"))
            if failed or (s.try_acquire() and s.release()):
                to_send.put(s)

    def send():
        while (s := to_send.get()) is not None:
            sent.setdefault(s.request_id, []).extend(s.pop_deltas())
            if s.release():
                to_send.put(s)

    senders = [threading.Thread(target=send) for _ in range(4)]
    others = [threading.Thread(target=push_tokens), threading.Thread(target=cancel_randomly)]
    for thread in senders + others:
        thread.start()
    for thread in others:
        thread.join()
    for _ in senders:
        to_send.put(None)
    for thread in senders:
        thread.join()
    while not to_send.empty():
        sent.setdefault((s := to_send.get()).request_id, []).extend(s.pop_deltas())
    for request_id in streams:
        deltas = sent[request_id]
        assert [delta.final for delta in deltas].count(True) == 1
        assert deltas[-1].final
        numbers = [delta.token_ids[0] for delta in deltas if delta.token_ids]
        assert numbers == list(range(len(numbers)))
