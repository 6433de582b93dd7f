# SPDX-License-Identifier: Apache-2.0
"""An open request between events and responses: order, coalescing, one holder, one end."""

import queue
import random
import threading

import numpy as np
import pytest

from quire_server import wire
from quire_server.stream import MAX_PENDING_TOKENS, Stream
from quire_spec.errors import Cancelled
from quire_spec.messages import Event


def stream(streams=True, request_id=1):
    inputs = {"text_input": np.array([b"x"], np.object_), "stream": np.array([streams])}
    _, wanted = wire.read_request(request_id, "m", "m", inputs, "{}")
    return Stream(request_id, wanted, object(), 0.0)


def token(number, final=False):
    return Event(1, f"{number} ", [number], "stop" if final else None, num_output_tokens=number + 1)


def test_the_first_event_queues_it_and_the_others_gather():
    s = stream()
    assert [s.put(token(i)) for i in range(3)] == [True, False, False]
    assert [event.token_ids for event in s.take()] == [[0], [1], [2]]
    assert not s.release()
    assert s.put(token(3))


def test_what_comes_while_it_is_held_queues_it_again():
    s = stream()
    assert s.put(token(0))
    s.take()
    assert not s.put(token(1))
    assert s.release()


def test_without_streaming_it_is_queued_once_at_the_end():
    s = stream(streams=False)
    assert not s.put(token(0))
    assert s.hold()
    assert not s.release()
    assert s.put(token(1, final=True))
    assert len(s.take()) == 2


def test_what_is_given_back_comes_again_and_nothing_after_it():
    s = stream()
    assert s.put(token(0))
    assert not s.put(Event(1, error_code="INTERNAL", error="x"))
    *_, error = s.take()
    s.give_back(error)
    assert not s.put(token(1))
    assert s.take() == [error]
    assert not s.release()


def test_only_one_holds_it():
    s = stream()
    assert s.hold()
    assert not s.hold()
    assert not s.put(token(0))
    assert s.release()
    assert not s.hold()


def test_a_cut_replaces_what_waits_and_is_the_end():
    s = stream()
    s.put(token(0))
    assert not s.cut(Cancelled("gone"))
    (event,) = s.take()
    assert (event.error_code, event.error, s.cut_off) == ("CANCELLED", "gone", True)
    assert not s.put(token(1))
    assert not s.cut(Cancelled("again"))
    assert not s.release()


def test_a_finished_request_is_not_cut():
    s = stream()
    assert s.put(token(0, final=True))
    assert not s.cut(Cancelled("gone"))
    assert s.take() == [token(0, final=True)]
    assert not s.cut_off


@pytest.mark.parametrize("final", [True, False])
def test_what_may_wait_is_bounded(final):
    s = stream()
    s.put(Event(1, "x", list(range(MAX_PENDING_TOKENS))))
    s.put(Event(1, "y", [1], "stop" if final else None))
    events = s.take()
    assert len(events) == (2 if final else 1)
    assert s.cut_off is not final
    assert events[-1].error_code == (None if final else "UNAVAILABLE")
    assert ("too slow" in events[-1].error) is not final


def test_several_outputs_may_be_long_when_all_are_sent_at_once():
    s = stream(streams=False)
    for index in range(3):
        queued = s.put(Event(1, "x", list(range(MAX_PENDING_TOKENS)), "length", index=index, more=index < 2))
        assert queued == (index == 2)
    assert [event.index for event in s.take()] == [0, 1, 2] and not s.cut_off


def test_threads_keep_order_and_send_one_end():
    """Senders, a reader that delivers, and a canceller, as in a stub."""
    to_send, sent = queue.SimpleQueue(), {}
    streams = {i: stream(request_id=i) for i in range(40)}

    def deliver():
        for number in range(30):
            for s in streams.values():
                if s.put(token(number, final=number == 29)):
                    to_send.put(s)

    def disturb():
        for _ in range(2000):
            s = random.choice(list(streams.values()))
            cut = s.id % 4 == 0 and random.random() < 0.1 and s.cut(Cancelled("gone"))
            if cut or (s.hold() and s.release()):
                to_send.put(s)

    def send():
        while (s := to_send.get()) is not None:
            sent.setdefault(s.id, []).extend(s.take())
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
        sent.setdefault((s := to_send.get()).id, []).extend(s.take())
    for request_id in streams:
        events = sent[request_id]
        assert [event.final for event in events].count(True) == 1
        assert events[-1].final
        numbers = [event.token_ids[0] for event in events if event.token_ids]
        assert numbers == list(range(len(numbers)))
