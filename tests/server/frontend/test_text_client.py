# SPDX-License-Identifier: Apache-2.0
"""TextClient over real sockets: open requests when the connection ends, and reconnection. tests/spec/protocol tests the
client that it runs."""

import os
import queue
import socket
import struct
import threading
import time

import pytest
from support.frontend_harness import wait_until

from quire_server.frontend.text_client import TextClient
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import Code
from quire_spec.protocol.framing import MAGIC, FrameDecoder, encode_frame
from quire_spec.protocol.messages import (
    CancelRequests,
    GenerateRequest,
    Hello,
    OutputDelta,
    OutputDeltas,
    RequestRejected,
)


class Listener:
    """Server side of the connection, one connection at a time."""

    def __init__(self, path):
        self.path = path
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(path))
        self.listening.listen()
        self.listening.settimeout(5)
        self.peer = None

    def accept(self):
        """Accept the next connection; return its Hello."""
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

    def send(self, *deltas):
        self.peer.sendall(encode_frame(OutputDeltas(list(deltas))))

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
def deltas():
    return queue.Queue()


@pytest.fixture
def client(path, deltas):
    client = TextClient(path, "sql", deltas.put)
    yield client
    client.close()
    wait_until(
        lambda: not [t for t in threading.enumerate() if t.name.startswith("text-")], 5, "without client threads"
    )


def submit(request_id, prompt="x"):
    return GenerateRequest(request_id, "sql", prompt, None, SamplingParams(), True)


def test_sends_hello_first(listener, client):
    assert listener.accept() == Hello("stub", "sql", os.getpid())


def test_sends_requests_and_cancels_and_receives_deltas(listener, client, deltas):
    listener.accept()
    client.submit(submit(1, "h\u00e9 \U0001f600"))
    assert listener.read() == submit(1, "h\u00e9 \U0001f600")
    client.submit(submit(2))
    listener.read()
    sent = [OutputDelta(1, "a", [1]), OutputDelta(2, "b", [2]), OutputDelta(1, "", [], "stop")]
    listener.send(*sent)
    assert [deltas.get(timeout=60) for _ in sent] == sent
    client.cancel(2)
    assert listener.read() == CancelRequests([2])


def test_reports_rejections_only_while_connected(path, client, deltas):
    client.report_rejected(Code.NOT_FOUND)
    # The queue is in order: once this request failed, the report before it was dropped.
    client.submit(submit(1))
    assert deltas.get(timeout=60).error_code == "UNAVAILABLE"
    listener = Listener(path)
    try:
        listener.accept()
        client.report_rejected(Code.INVALID_ARG)
        assert listener.read() == RequestRejected(Code.INVALID_ARG)
    finally:
        listener.close()


def test_end_of_the_connection_fails_only_open_requests(listener, client, deltas):
    listener.accept()
    for request_id in (1, 2, 3, 4):
        client.submit(submit(request_id))
        listener.read()
    listener.send(OutputDelta(1, "done", [1], "stop"))
    assert deltas.get(timeout=60).final
    client.cancel(2)
    listener.read()
    listener.hang_up()
    failed = [deltas.get(timeout=60) for _ in range(2)]
    assert {delta.id for delta in failed} == {3, 4}
    assert {delta.error_code for delta in failed} == {"UNAVAILABLE"}
    assert "is restarting; retry later" in failed[0].error
    assert deltas.empty()


NOISE = {
    "bytes": b"\xff" * 64,
    "header": struct.pack("<HBHI", MAGIC - 1, 5, 0, 0),
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_a_corrupt_stream_ends_the_connection_and_its_requests(listener, client, deltas, noise):
    listener.accept()
    client.submit(submit(1))
    listener.read()
    listener.peer.sendall(noise)
    assert deltas.get(timeout=60).error_code == "UNAVAILABLE"
    assert listener.accept().role == "stub"


def test_submit_does_not_block_if_the_peer_does_not_read(listener, client, deltas):
    listener.accept()
    started_at = time.monotonic()
    for request_id in range(8):
        client.submit(submit(request_id, "x" * 2**20))
    assert time.monotonic() - started_at < 20, "submit blocks"
    listener.send(OutputDelta(0, "still read"))
    assert deltas.get(timeout=60).text == "still read"
    listener.hang_up()
    # The first was being written; the others failed or were sent on the next connection.
    assert deltas.get(timeout=60).error_code == "UNAVAILABLE"


def test_close_fails_open_requests(listener, path, deltas):
    client = TextClient(path, "sql", deltas.put)
    listener.accept()
    client.submit(submit(1))
    listener.read()
    client.close()
    assert deltas.get(timeout=60).error_code == "UNAVAILABLE"
    assert listener.read() is None


def test_many_threads_submit_over_one_connection(listener, client, deltas):
    listener.accept()

    def submit_50(first):
        for request_id in range(first, first + 50):
            client.submit(submit(request_id, "x" * 1000))

    threads = [threading.Thread(target=submit_50, args=(100 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    received_ids = {listener.read().id for _ in range(400)}
    for thread in threads:
        thread.join()
    assert received_ids == {100 * i + k for i in range(8) for k in range(50)}
