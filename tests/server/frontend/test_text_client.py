# SPDX-License-Identifier: Apache-2.0
"""The stub's connection to the text process, over real sockets: what is open when it ends, and how it comes back."""

import os
import queue
import socket
import subprocess
import sys
import threading
import time

import pytest
from support.frontend_harness import wait_until

from quire_server.frontend.text_client import TextClient
from quire_spec.protocol.framing import FrameDecoder, encode_frame
from quire_spec.protocol.messages import (
    CancelRequests,
    GenerateRequest,
    Hello,
    OutputDelta,
    OutputDeltas,
    RequestRejected,
)


class Listener:
    """The text process's end: one connection at a time."""

    def __init__(self, path):
        self.path = path
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(path))
        self.listening.listen()
        self.listening.settimeout(5)
        self.peer = None

    def accept(self):
        """Take the next connection; its Hello."""
        if self.peer is not None:
            self.peer.close()
        self.peer, _ = self.listening.accept()
        self.peer.settimeout(5)
        self.decoder, self.messages = FrameDecoder(), []
        return self.read()

    def read(self):
        while not self.messages:
            data = self.peer.recv(65536)
            if not data:
                return None
            self.messages += self.decoder.feed(data)
        return self.messages.pop(0)

    def send(self, *events):
        self.peer.sendall(encode_frame(OutputDeltas(list(events))))

    def hang_up(self):
        self.peer.close()
        self.peer = None

    def close(self):
        if self.peer is not None:
            self.peer.close()
        self.listening.close()
        self.path.unlink(missing_ok=True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "text.sock"


@pytest.fixture
def listener(path):
    listener = Listener(path)
    yield listener
    listener.close()


@pytest.fixture
def events():
    return queue.Queue()


@pytest.fixture
def client(path, events):
    client = TextClient(path, "sql", events.put)
    yield client
    client.close()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("text-")], 5, "rid of threads")


def submit(request_id, prompt="x"):
    return GenerateRequest(request_id, "sql", prompt, None, {}, True)


def test_says_hello_before_any_request(listener, client):
    assert listener.accept() == Hello("frontend", "sql", os.getpid())


def test_requests_events_and_cancels_pass(listener, client, events):
    listener.accept()
    client.submit(submit(1, "h\u00e9 \U0001f600"))
    assert listener.read() == submit(1, "h\u00e9 \U0001f600")
    sent = [OutputDelta(1, "a", [1]), OutputDelta(2, "b", [2]), OutputDelta(1, "", [], "stop")]
    listener.send(*sent)
    assert [events.get(timeout=5) for _ in sent] == sent
    client.cancel(2)
    assert listener.read() == CancelRequests([2])


def test_refusals_are_told_to_who_is_there(path, client, events):
    client.report_rejected("NOT_FOUND")
    # One after the other: what fails here tells that the one before it went nowhere.
    client.submit(submit(1))
    assert events.get(timeout=5).error_code == "UNAVAILABLE"
    listener = Listener(path)
    try:
        listener.accept()
        client.report_rejected("INVALID_ARG")
        assert listener.read() == RequestRejected("INVALID_ARG")
    finally:
        listener.close()


def test_the_end_of_the_connection_fails_what_is_open_and_nothing_else(listener, client, events):
    listener.accept()
    for request_id in (1, 2, 3, 4):
        client.submit(submit(request_id))
        listener.read()
    listener.send(OutputDelta(1, "done", [1], "stop"))
    assert events.get(timeout=5).final
    client.cancel(2)
    listener.read()
    listener.hang_up()
    failed = [events.get(timeout=5) for _ in range(2)]
    assert {event.id for event in failed} == {3, 4}
    assert {event.error_code for event in failed} == {"UNAVAILABLE"}
    assert "restarts" in failed[0].error
    assert events.empty()


def test_it_connects_again_without_a_request(listener, client):
    listener.accept()
    listener.hang_up()
    assert listener.accept() == Hello("frontend", "sql", os.getpid())


def test_away_at_first_then_there(path, client, events):
    client.submit(submit(1))
    assert events.get(timeout=5).error_code == "UNAVAILABLE"
    listener = Listener(path)
    try:
        listener.accept()
        client.submit(submit(2))
        assert listener.read() == submit(2)
    finally:
        listener.close()
    assert events.get(timeout=5).id == 2


NOISE = {
    "bytes": b"\xff" * 64,
    "message": encode_frame(Hello("text", "", 1)),
    "event": encode_frame(OutputDeltas([OutputDelta([], "", [], "stop")])),
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_noise_ends_the_connection_and_its_requests(listener, client, events, noise):
    listener.accept()
    client.submit(submit(1))
    listener.read()
    listener.peer.sendall(noise)
    assert events.get(timeout=5).error_code == "UNAVAILABLE"
    assert listener.accept().role == "frontend"


def test_submit_does_not_wait_for_a_peer_that_does_not_read(listener, client, events):
    listener.accept()
    started = time.monotonic()
    for request_id in range(8):
        client.submit(submit(request_id, "x" * 2**20))
    assert time.monotonic() - started < 20, "for ever, if it did"
    listener.send(OutputDelta(100, "still read"))
    assert events.get(timeout=5).id == 100
    listener.hang_up()
    # The first was being written; the others found nobody or the next connection.
    assert events.get(timeout=5).error_code == "UNAVAILABLE"


def test_close_fails_what_is_open(listener, path, events):
    client = TextClient(path, "sql", events.put)
    listener.accept()
    client.submit(submit(1))
    listener.read()
    client.close()
    assert events.get(timeout=5).error_code == "UNAVAILABLE"
    assert listener.read() is None


def test_many_threads_submit_over_one_connection(listener, client, events):
    listener.accept()

    def some(first):
        for request_id in range(first, first + 50):
            client.submit(submit(request_id, "x" * 1000))

    threads = [threading.Thread(target=some, args=(100 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    came = {listener.read().id for _ in range(400)}
    for thread in threads:
        thread.join()
    assert came == {100 * i + k for i in range(8) for k in range(50)}


def test_nothing_heavy_is_imported():
    code = "import sys, quire_server.frontend.text_client, quire_server.frontend.response_stream; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"asyncio", "aiohttp", "ssl", "torch", "tokenizers", "quire_spec.engine.config"} & set(
        done.stdout.split()
    )
