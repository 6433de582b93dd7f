# SPDX-License-Identifier: Apache-2.0
"""A pod that stops, as Kubernetes stops it: first the preStop wait, then SIGTERM."""

import asyncio
import http.client
import json
import signal
import socket
import threading
from itertools import pairwise

import psutil
import pytest
import tritonclient.grpc as grpcclient
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quire_serve import example_document, grpc_text, running_service

from quire_spec import constants

pytestmark = [pytest.mark.server, pytest.mark.timeout(240)]

STORY = "Once upon a time"
LONG = {"max_tokens": 1800, "ignore_eos": True, "temperature": 0.8}
GENERATE = {"text_input": STORY, "max_tokens": 4}
COMPLETE = {"model": "pirate", "prompt": STORY, "max_tokens": 4}
REQUESTS = {
    "http": ("POST", "/v2/models/pirate/generate", GENERATE),
    "http stream": ("POST", "/v2/models/pirate/generate_stream", GENERATE | {"stream": True}),
    "http metadata": ("GET", "/v2/models/pirate", None),
    "openai": ("POST", "/v1/completions", COMPLETE),
    "openai stream": ("POST", "/v1/completions", COMPLETE | {"stream": True}),
    "health": ("GET", "/health/ready", None),
    "health metrics": ("GET", "/metrics", None),
}
"""Method, path and body of requests by the name of their port, to which a word can be added."""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    with running_service(example_document(), tmp_path_factory.mktemp("stop")) as service:
        yield service


class KeptConnection:
    """An HTTP connection that a client keeps between its requests."""

    def __init__(self, service, name):
        self.method, self.path, self.body = REQUESTS[name]
        self.connection = http.client.HTTPConnection("127.0.0.1", service.ports[name.split()[0]], timeout=30)
        self.connection.connect()
        self.connection.auto_open = False

    def send(self):
        """Return the status, and whether the server ends the connection. Raises an error if it has ended before."""
        response, _ = self.exchange()
        return response.status, response.getheader("Connection", "").lower() == "close"

    def exchange(self):
        """Send the request. Return the response and its body."""
        body = None if self.body is None else json.dumps(self.body)
        headers = {"Connection": "keep-alive", "Content-Type": "application/json"}
        self.connection.request(self.method, self.path, body, headers)
        response = self.connection.getresponse()
        return response, response.read().decode()


class KeptChannel:
    """A gRPC client that sends one request after the other over one channel, in a thread, until `stop`."""

    def __init__(self, service):
        self.address = f"127.0.0.1:{service.ports['grpc']}"
        self.num_answers, self.errors = 0, []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self):
        with grpcclient.InferenceServerClient(self.address) as client:
            while not self._stopped.is_set():
                answers = []
                client.start_stream(lambda result, error: answers.append(error or result))  # noqa: B023
                client.async_stream_infer("pirate", [grpc_text(STORY)], parameters={"max_tokens": 2})
                client.stop_stream()
                self.errors += [str(answer) for answer in answers if isinstance(answer, Exception)]
                self.num_answers += bool(answers)

    def stop(self):
        self._stopped.set()
        self._thread.join()


def grpc_peers(service):
    """Return the ports of this process's connections to the gRPC port."""
    connections = psutil.Process().net_connections()
    return {c.laddr.port for c in connections if c.raddr and c.raddr.port == service.ports["grpc"]}


def test_a_grpc_connection_ends_by_its_age_without_a_failed_call(own):
    with grpcclient.InferenceServerClient(f"127.0.0.1:{own.ports['grpc']}") as held:
        # A stream stays open on its connection, as long as it lives.
        answers = []
        held.start_stream(lambda result, error: answers.append(error or result))
        held.async_stream_infer("pirate", [grpc_text(STORY)], parameters={"max_tokens": 2})
        own.wait(lambda: len(answers) == 1, 10, "the first answer of the stream")
        (held_port,) = grpc_peers(own)
        channel = KeptChannel(own)
        own.wait(lambda: len(grpc_peers(own)) == 2, 10, "a second connection")
        first = grpc_peers(own)
        age = own.wait(lambda: grpc_peers(own) - first, 3 * constants.GRPC_CONNECTION_AGE_S, "a new connection")
        own.wait(lambda: len(grpc_peers(own)) == 2, 10, "the end of the first connection")
        channel.stop()
        held.async_stream_infer("pirate", [grpc_text(STORY)], parameters={"max_tokens": 2})
        own.wait(lambda: len(answers) == 2, 10, "the second answer of the stream")
        held.stop_stream()
    assert age > constants.GRPC_CONNECTION_AGE_S / 2
    assert held_port in first
    assert channel.errors == []
    assert channel.num_answers > 10
    assert not [answer for answer in answers if isinstance(answer, Exception)]


def test_the_wait_before_the_stop_ends_each_connection_after_its_response(own):
    """No request fails: neither the next one on a kept connection, nor one on a new connection."""
    kept = {name: KeptConnection(own, name) for name in REQUESTS}
    assert {name: connection.send() for name, connection in kept.items()} == dict.fromkeys(REQUESTS, (200, False))
    (own.folder / "run" / constants.CLOSING_FILE).touch()
    for name, connection in kept.items():
        own.wait(lambda: connection.send() == (200, True), 5, f"{name}: the end of its connection")  # noqa: B023
        with pytest.raises((http.client.NotConnected, ConnectionError)):
            connection.send()
        assert KeptConnection(own, name).send() == (200, True)
    assert own.health() == (200, {"ready": True, "reason": ""})
    channel = KeptChannel(own)
    own.wait(lambda: channel.num_answers > 2, 10, "answers over gRPC")
    channel.stop()
    assert channel.errors == []


@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_header_bytes=st.integers(0, 5000))
def test_requests_in_pieces_are_whole_in_the_wait(own, data, num_header_bytes):
    """The preload library adds a header to what the server reads, at any split of a request after its first line. A
    first line in pieces gets status 404 from the server of release 24.10, at any time."""
    method, path, document = REQUESTS["http"]
    body = json.dumps(document)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n"
    head += f"X-Padding: {'x' * num_header_bytes}\r\nContent-Length: {len(body)}\r\n\r\n"
    request = (head + body).encode()
    cuts = sorted(data.draw(st.sets(st.integers(request.index(b"\n") + 1, len(request) - 1), max_size=3)))
    with socket.create_connection(("127.0.0.1", own.ports["http"]), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start, end in pairwise([0, *cuts, len(request)]):
            connection.sendall(request[start:end])
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert (response.status, json.loads(response.read())["model_name"]) == (200, "pirate")


def test_after_the_wait_new_requests_get_503_and_open_ones_end(own):
    """The last test of the module, because it ends the service."""

    rejections = {}

    def is_rejected(name):
        response, body = KeptConnection(own, name).exchange()
        if response.status != 200:
            rejections[name] = response.status, response.getheader("Retry-After"), body
        return response.status != 200

    async def scenario():
        streams, tasks = await own.open_streams(["tales"] * 2, STORY, **LONG)
        own.child_processes()
        own.process.send_signal(signal.SIGTERM)
        for name in ("openai", "http"):
            await asyncio.to_thread(own.wait, lambda name=name: is_rejected(name), 10, f"a rejection on {name}")
        assert not any(task.done() for task in tasks), "the streams are too short for this test"
        await asyncio.wait(tasks, timeout=60)
        return streams

    assert [stream.error for stream in asyncio.run(scenario())] == [None, None]
    assert rejections["openai"][:2] == (503, "1")
    # The server has no other status for errors of its generate routes than 400.
    assert rejections["http"][0] == 400
    assert all("draining" in body for _, _, body in rejections.values())
    assert own.process.wait(40) == 0
