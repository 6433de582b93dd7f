# SPDX-License-Identifier: Apache-2.0
"""ControlClient over a real Unix socket: responses, errors with their codes, timeouts, and the end of the peer."""

import asyncio
import contextlib

import pytest

from quire_server.clients.control_client import ConnectionLost, ControlClient
from quire_spec.errors import InvalidArgument, Unavailable
from quire_spec.protocol import framing
from quire_spec.protocol.messages import ControlRequest, ControlResponse, Hello


class Peer:
    """The server of the connection; a test sets `on_call`."""

    def __init__(self):
        self.hellos, self.writers = [], []

    def on_call(self, call, writer):
        writer.write(framing.encode_frame(ControlResponse(call.id, call.args)))

    async def connected(self, reader, writer):
        self.writers.append(writer)
        decoder = framing.FrameDecoder()
        while data := await reader.read(4096):
            for message in decoder.feed(data):
                if isinstance(message, Hello):
                    self.hellos.append(message)
                elif isinstance(message, ControlRequest):
                    self.on_call(message, writer)
        writer.close()


@pytest.fixture
async def peer(tmp_path):
    peer = Peer()
    server = await asyncio.start_unix_server(peer.connected, tmp_path / "s")
    peer.path = tmp_path / "s"
    yield peer
    server.close()
    for writer in peer.writers:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def connected_client(peer):
    control = await ControlClient.connect("core", peer.path)
    yield control
    await control.close()


async def test_concurrent_calls_accept_responses_in_any_order(peer):
    responses = []

    def respond_in_reverse(call, writer):
        responses.append(ControlResponse(call.id, call.args["n"]))
        if len(responses) == 20:
            for response in reversed(responses):
                writer.write(framing.encode_frame(response))

    peer.on_call = respond_in_reverse
    async with connected_client(peer) as control:
        results = await asyncio.gather(*(control.call("x", {"n": n}, timeout_s=60) for n in range(20)))
    assert results == list(range(20))
    assert [h.role for h in peer.hellos] == ["supervisor"]


async def test_error_keeps_its_code(peer):
    peer.on_call = lambda call, writer: writer.write(
        framing.encode_frame(ControlResponse(call.id, None, "INVALID_ARG", "rank 64"))
    )
    async with connected_client(peer) as control:
        with pytest.raises(InvalidArgument, match="rank 64"):
            await control.call("load_adapter", timeout_s=60)


async def test_timeout_names_the_method_and_late_response_is_dropped(peer):
    calls = []
    peer.on_call = lambda call, writer: calls.append((call, writer))
    async with connected_client(peer) as control:
        with pytest.raises(Unavailable, match=r"core: no response to 'status' within 0\.05 s"):
            await control.call("status", timeout_s=0.05)
        # On a busy machine the call can time out before the peer has read it.
        async with asyncio.timeout(10):
            while not calls:
                await asyncio.sleep(0.01)
        call, writer = calls[0]
        writer.write(framing.encode_frame(ControlResponse(call.id, "late")))
        peer.on_call = lambda call, writer: writer.write(framing.encode_frame(ControlResponse(call.id, "in time")))
        assert await control.call("status", timeout_s=60) == "in time"


async def test_end_of_the_peer_fails_every_call(peer):
    peer.on_call = lambda call, writer: writer.close()
    async with connected_client(peer) as control:
        with pytest.raises(ConnectionLost, match="core: connection closed before it replied"):
            await control.call("status", timeout_s=60)
        async with asyncio.timeout(10):
            await control.closed.wait()
        with pytest.raises(ConnectionLost, match="core: the connection was closed before 'status'"):
            await control.call("status", timeout_s=60)


async def test_corrupt_stream_closes_the_connection(peer):
    peer.on_call = lambda call, writer: writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    async with connected_client(peer) as control:
        with pytest.raises(ConnectionLost):
            await control.call("status", timeout_s=60)


async def test_connect_fails_without_a_listener(tmp_path):
    with pytest.raises(FileNotFoundError):
        await ControlClient.connect("core", tmp_path / "absent")
