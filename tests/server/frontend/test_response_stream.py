# SPDX-License-Identifier: Apache-2.0
"""An open request between events and responses: order, coalescing, one holder, one end."""

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
    _, wanted = tensors.parse_request(request_id, "m", "m", inputs, "{}")
    return ResponseStream(request_id, wanted, object(), 0.0)


def token(number, final=False):
    return OutputDelta(1, f"{number} ", [number], "stop" if final else None, num_output_tokens=number + 1)


def test_the_first_event_queues_it_and_the_others_gather():
    s = stream()
    assert [s.push(token(i)) for i in range(3)] == [True, False, False]
    assert [event.token_ids for event in s.drain()] == [[0], [1], [2]]
    assert not s.release()
    assert s.push(token(3))


def test_what_comes_while_it_is_held_queues_it_again():
    s = stream()
    assert s.push(token(0))
    s.drain()
    assert not s.push(token(1))
    assert s.release()


def test_without_streaming_it_is_queued_once_at_the_end():
    s = stream(streams=False)
    assert not s.push(token(0))
    assert s.try_acquire()
    assert not s.release()
    assert s.push(token(1, final=True))
    assert len(s.drain()) == 2


def test_what_is_given_back_comes_again_and_nothing_after_it():
    s = stream()
    assert s.push(token(0))
    assert not s.push(OutputDelta(1, error_code="INTERNAL", error="x"))
    *_, error = s.drain()
    s.push_back(error)
    assert not s.push(token(1))
    assert s.drain() == [error]
    assert not s.release()


def test_only_one_holds_it():
    s = stream()
    assert s.try_acquire()
    assert not s.try_acquire()
    assert not s.push(token(0))
    assert s.release()
    assert not s.try_acquire()


def test_a_cut_replaces_what_waits_and_is_the_end():
    s = stream()
    s.push(token(0))
    assert not s.fail(Cancelled("gone"))
    (event,) = s.drain()
    assert (event.error_code, event.error, s.failed_locally) == ("CANCELLED", "gone", True)
    assert not s.push(token(1))
    assert not s.fail(Cancelled("again"))
    assert not s.release()


def test_a_finished_request_is_not_cut():
    s = stream()
    assert s.push(token(0, final=True))
    assert not s.fail(Cancelled("gone"))
    assert s.drain() == [token(0, final=True)]
    assert not s.failed_locally


@pytest.mark.parametrize("final", [True, False])
def test_what_may_wait_is_bounded(final):
    s = stream()
    s.push(OutputDelta(1, "x", list(range(MAX_PENDING_TOKENS))))
    s.push(OutputDelta(1, "y", [1], "stop" if final else None))
    events = s.drain()
    assert len(events) == (2 if final else 1)
    assert s.failed_locally is not final
    assert events[-1].error_code == (None if final else "UNAVAILABLE")
    assert ("too slow" in events[-1].error) is not final


def test_several_outputs_may_be_long_when_all_are_sent_at_once():
    s = stream(streams=False)
    for index in range(3):
        queued = s.push(
            OutputDelta(1, "x", list(range(MAX_PENDING_TOKENS)), "length", index=index, other_outputs_pending=index < 2)
        )
        assert queued == (index == 2)
    assert [event.index for event in s.drain()] == [0, 1, 2] and not s.failed_locally


def test_threads_keep_order_and_send_one_end():
    """Senders, a reader that delivers, and a canceller, as in a stub."""
    to_send, sent = queue.SimpleQueue(), {}
    streams = {i: stream(request_id=i) for i in range(40)}

    def deliver():
        for number in range(30):
            for s in streams.values():
                if s.push(token(number, final=number == 29)):
                    to_send.put(s)

    def disturb():
        for _ in range(2000):
            s = random.choice(list(streams.values()))
            cut = s.request_id % 4 == 0 and random.random() < 0.1 and s.fail(Cancelled("gone"))
            if cut or (s.try_acquire() and s.release()):
                to_send.put(s)

    def send():
        while (s := to_send.get()) is not None:
            sent.setdefault(s.request_id, []).extend(s.drain())
            if s.release():
                to_send.put(s)

    senders = [threading.Thread(target=send) for _ in range(4)]
    others = [threading.Thread(target=deliver), threading.Thread(target=disturb)]
    for thread in senders + others:
        thread.start()
    for thread in others:
        thread.join()
    for _ in senders:
        to_send.put(None)
    for thread in senders:
        thread.join()
    while not to_send.empty():
        sent.setdefault((s := to_send.get()).request_id, []).extend(s.drain())
    for request_id in streams:
        events = sent[request_id]
        assert [event.final for event in events].count(True) == 1
        assert events[-1].final
        numbers = [event.token_ids[0] for event in events if event.token_ids]
        assert numbers == list(range(len(numbers)))
