# SPDX-License-Identifier: Apache-2.0
"""Calls over a real Unix socket: answers, errors with their codes, deadlines, and the end of the other side."""

import asyncio
import contextlib

import pytest

from quire_server.clients.control_client import ConnectionLost, ControlClient
from quire_spec.errors import InvalidArgument, Unavailable
from quire_spec.protocol import framing
from quire_spec.protocol.messages import ControlRequest, ControlResponse, Hello


class Peer:
    """The other end: what it does with a call is the test's to say."""

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
async def dialled(peer):
    control = await ControlClient.connect("core", peer.path)
    yield control
    await control.close()


async def test_calls_are_answered_side_by_side_in_any_order(peer):
    held = []

    def hold(call, writer):
        held.append(ControlResponse(call.id, call.args["n"]))
        if len(held) == 20:
            for reply in reversed(held):
                writer.write(framing.encode_frame(reply))

    peer.on_call = hold
    async with dialled(peer) as control:
        answers = await asyncio.gather(*(control.call("x", {"n": n}, timeout_s=5) for n in range(20)))
    assert answers == list(range(20))
    assert [h.role for h in peer.hellos] == ["supervisor"]


async def test_an_error_keeps_its_code(peer):
    peer.on_call = lambda call, writer: writer.write(
        framing.encode_frame(ControlResponse(call.id, None, "INVALID_ARG", "rank 64"))
    )
    async with dialled(peer) as control:
        with pytest.raises(InvalidArgument, match="rank 64"):
            await control.call("load_adapter", timeout_s=5)


async def test_a_silent_peer_is_an_error_with_the_name_of_the_call_and_a_late_answer_is_dropped(peer):
    late = []
    peer.on_call = lambda call, writer: late.append((call, writer))
    async with dialled(peer) as control:
        with pytest.raises(Unavailable, match=r"core: no answer to 'status' within 0\.05 s"):
            await control.call("status", timeout_s=0.05)
        # On a busy machine the call may be given up before the peer has read it.
        async with asyncio.timeout(10):
            while not late:
                await asyncio.sleep(0.01)
        call, writer = late[0]
        writer.write(framing.encode_frame(ControlResponse(call.id, "late")))
        peer.on_call = lambda call, writer: writer.write(framing.encode_frame(ControlResponse(call.id, "in time")))
        assert await control.call("status", timeout_s=5) == "in time"


async def test_the_end_of_the_peer_ends_every_call_at_once(peer):
    peer.on_call = lambda call, writer: writer.close()
    async with dialled(peer) as control:
        with pytest.raises(ConnectionLost):
            await control.call("status", timeout_s=60)
        async with asyncio.timeout(10):
            await control.closed.wait()
        with pytest.raises(ConnectionLost, match="gone before 'status'"):
            await control.call("status", timeout_s=60)


async def test_a_broken_stream_is_the_end(peer):
    peer.on_call = lambda call, writer: writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    async with dialled(peer) as control:
        with pytest.raises(ConnectionLost):
            await control.call("status", timeout_s=60)


async def test_nobody_listens(tmp_path):
    with pytest.raises(FileNotFoundError):
        await ControlClient.connect("core", tmp_path / "absent")
