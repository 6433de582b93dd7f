# SPDX-License-Identifier: Apache-2.0
"""Client and Server over a real Unix socket: calls, requests, invalid frames, timeouts, and the end of either side."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.hostile_frames import PAYLOADS, UNKNOWN_KIND, hostile_frame

from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import Code, Internal, InvalidArgument, NotFound, Unavailable
from quire_spec.protocol import framing
from quire_spec.protocol.client import Client, ConnectionLost
from quire_spec.protocol.connection import Connection
from quire_spec.protocol.framing import encode_frame
from quire_spec.protocol.messages import (
    Call,
    CancelRequests,
    GenerateRequest,
    Hello,
    Message,
    OutputDelta,
    OutputDeltas,
    Reply,
    RequestRejected,
    to_raw,
)
from quire_spec.protocol.request_client import RequestClient
from quire_spec.protocol.server import Server


class Limits(msgspec.Struct, frozen=True):
    """Typed argument of a method."""

    size: int
    name: str = "x"


class Peer(Server):
    """A server whose methods the tests call. It records its messages; a test can write bytes to its connections."""

    def __init__(self, path: Path, max_payload_bytes: int = framing.MAX_PAYLOAD_BYTES) -> None:
        methods = (self.echo, self.add, self.fail, self.crash, self.panic, self.wait, self.hang_up, self.surrogate)
        super().__init__(methods, (GenerateRequest, CancelRequests, RequestRejected), max_payload_bytes)
        self.path = path
        self.connections: list[Connection] = []
        self.messages: list[Message] = []
        self.gate = asyncio.Event()
        self.num_cancelled = 0
        self.on_generate: Callable[[Connection, GenerateRequest], None] = lambda connection, request: None

    def write(self, data: bytes) -> None:
        """Send bytes on the last connection."""
        transport = self.connections[-1]._transport
        assert transport is not None
        transport.write(data)

    async def echo(self, value: Any) -> Any:
        return value

    def add(self, limits: Limits, more: list[int] | None = None) -> Limits:
        return Limits(limits.size + sum(more or ()), limits.name)

    def fail(self) -> None:
        raise NotFound("no adapter \ud800")

    def crash(self) -> None:
        raise KeyError("secret")

    def panic(self) -> None:
        raise BaseException("in native code")

    async def wait(self) -> str:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return "in time"

    def hang_up(self) -> None:
        self.connections[-1].abort()

    def surrogate(self) -> str:
        return "\ud800"

    def on_connected(self, connection: Connection) -> None:
        self.connections.append(connection)

    def on_request(self, connection: Connection, message: Message) -> None:
        self.messages.append(message)
        if isinstance(message, GenerateRequest):
            self.on_generate(connection, message)


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[Peer]:
    peer = Peer(tmp_path / "s")
    async with peer.listening(peer.path):
        yield peer


@contextlib.asynccontextmanager
async def connected(peer: Peer) -> AsyncIterator[RequestClient]:
    """Return a connected client, whose peer has read its Hello."""
    client = RequestClient(peer.path, Hello("stub", "sql"))
    await client.connect()
    assert await client.call("echo", int, {"value": 1}) == 1
    yield client
    await client.close()


async def until(check: Callable[[], object]) -> None:
    """Wait until `check()` returns a true value."""
    async with asyncio.timeout(10):
        while not check():
            await asyncio.sleep(0.005)


def request_of(client: RequestClient, prompt: str = "fox") -> GenerateRequest:
    return GenerateRequest(client.new_id(), "base", prompt, None, SamplingParams(), True)


async def test_concurrent_calls_are_typed_on_both_sides(peer: Peer):
    async with connected(peer) as client:
        results = await asyncio.gather(
            *(client.call("add", Limits, {"limits": Limits(n), "more": [1, 2]}) for n in range(20))
        )
        assert results == [Limits(n + 3) for n in range(20)]
        assert await client.call("echo", dict[str, Any], {"value": {"a": [1, None]}}) == {"a": [1, None]}
        assert peer.connections[0].peer == Hello("stub", "sql")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "add: Object missing required field `limits`"),
        ({"limits": {"size": "x"}}, r"add: Expected `int`, got `str` - at `\$\.limits\.size`"),
        ({"limits": {"size": 1}, "less": []}, "add: Object contains unknown field `less`"),
        ({"limits": {"size": 1}, "more": "\ud800"}, "add: cannot be sent to another process"),
    ],
    ids=["missing", "type", "unknown", "surrogate"],
)
async def test_a_wrong_argument_is_an_error_of_its_call(peer: Peer, args: dict[str, Any], message: str):
    async with connected(peer) as client:
        other = asyncio.create_task(client.call("wait", str))
        with pytest.raises(InvalidArgument, match=message):
            await client.call("add", Limits, args)
        peer.gate.set()
        assert await other == "in time"


async def test_errors_keep_their_code_and_a_crash_reveals_nothing(peer: Peer):
    async with connected(peer) as client:
        with pytest.raises(NotFound, match=r"no adapter \?"):
            await client.call("fail", type(None))
        with pytest.raises(Internal, match="crash: internal error; see the log") as crash:
            await client.call("crash", type(None))
        assert "secret" not in str(crash.value)
        with pytest.raises(Internal, match="panic: internal error; see the log"):
            await client.call("panic", type(None))
        with pytest.raises(InvalidArgument, match="method 'nope' is unknown; use one of echo, add, "):
            await client.call("nope", type(None))
        with pytest.raises(InvalidArgument, match="surrogate: cannot be sent"):
            await client.call("surrogate", str)
        with pytest.raises(Internal, match="the result of 'echo' is invalid"):
            await client.call("echo", int, {"value": "x"})


async def test_timeout_names_the_method_and_a_late_reply_is_dropped(peer: Peer):
    async with connected(peer) as client:
        with pytest.raises(Unavailable, match=r"the text process did not respond to 'wait' within 0\.05 s"):
            await client.call("wait", str, timeout_s=0.05)
        peer.gate.set()
        assert await client.call("wait", str, timeout_s=60) == "in time"


async def test_the_end_of_the_peer_fails_every_call_and_request(peer: Peer):
    async with connected(peer) as client:
        deltas: list[OutputDelta] = []
        client.submit(request_of(client), deltas.append)
        with pytest.raises(ConnectionLost, match="the text process ended and is restarting; retry later"):
            await client.call("hang_up", type(None))
        await asyncio.wait_for(client.closed.wait(), 10)
        with pytest.raises(ConnectionLost, match="the text process is starting or restarting; retry later"):
            await client.call("echo", int, {"value": 1})
        client.submit(request_of(client), deltas.append)
        assert [(d.final, d.error_code) for d in deltas] == [(True, Code.UNAVAILABLE)] * 2


@pytest.mark.parametrize("by_peer", [True, False])
async def test_only_an_end_by_the_peer_is_a_warning(peer: Peer, caplog: pytest.LogCaptureFixture, by_peer: bool):
    async with connected(peer) as client:
        if by_peer:
            peer.connections[-1].abort()
        else:
            await client.close()
        await asyncio.wait_for(client.closed.wait(), 10)
    assert ("text process disconnected num_open=0" in caplog.messages) == by_peer


async def test_connect_fails_without_a_listener_and_run_connects_again(tmp_path: Path):
    client = Client(tmp_path / "s", Hello("supervisor"), "core")
    with pytest.raises(FileNotFoundError):
        await client.connect()
    task = asyncio.create_task(client.run())
    for _ in range(3):
        peer = Peer(tmp_path / "s")
        async with peer.listening(peer.path):
            await until(lambda: client.is_connected)
            assert await client.call("echo", int, {"value": 2}) == 2
            peer.connections[-1].abort()
        await until(lambda: not client.is_connected)
    task.cancel()


async def test_a_peer_that_closes_each_connection_is_not_flooded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    connections = []

    async def close_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        writer.close()

    monkeypatch.setattr("quire_spec.protocol.client.RECONNECT_INTERVAL_S", 0.1)
    server = await asyncio.start_unix_server(close_at_once, tmp_path / "socket")
    task = asyncio.create_task(Client(tmp_path / "socket", Hello("stub"), "the text process").run())
    await asyncio.sleep(0.45)
    task.cancel()
    server.close()
    assert 1 < len(connections) <= 5


async def test_calls_end_with_the_server_but_not_with_their_caller(tmp_path: Path):
    peer = Peer(tmp_path / "s")
    async with peer.listening(peer.path):
        async with connected(peer) as client:
            call = asyncio.create_task(client.call("wait", str))
            await until(lambda: peer._calls)
        with pytest.raises(ConnectionLost):
            await call
        await asyncio.sleep(0.02)
        assert peer.num_cancelled == 0 and peer._calls
    assert peer.num_cancelled == 1


async def test_a_message_that_cannot_be_sent_fails_alone(peer: Peer, monkeypatch: pytest.MonkeyPatch):
    async with connected(peer) as client:
        deltas: list[OutputDelta] = []
        open_request = request_of(client)
        client.submit(open_request, deltas.append)
        monkeypatch.setattr(framing, "MAX_PAYLOAD_BYTES", 5000)
        for prompt in ("\ud800", "x" * 6000):
            client.submit(request_of(client, prompt), deltas.append)
        assert [(d.id, d.error_code) for d in deltas] == [(open_request.id + i, Code.INVALID_ARG) for i in (1, 2)]
        for value in ("\ud800", "x" * 6000):
            with pytest.raises(InvalidArgument):
                await client.call("echo", str, {"value": value})
        await until(lambda: peer.messages)
        peer.connections[-1].send(OutputDeltas([OutputDelta(open_request.id, "a", [1], "stop")]))
        await until(lambda: len(deltas) == 3)
        assert deltas[-1].text == "a"


WRONG = PAYLOADS | {"oversize": b"x" * 6000}


@pytest.mark.parametrize("payload", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("kind", ["Call", "GenerateRequest", "Reply", UNKNOWN_KIND])
async def test_a_frame_that_a_server_cannot_accept_fails_alone(tmp_path: Path, kind: int | str, payload: bytes):
    peer = Peer(tmp_path / "s", max_payload_bytes=5000)
    async with peer.listening(peer.path), connected(peer) as client:
        deltas: list[OutputDelta] = []
        requests = [request_of(client) for _ in range(2)]
        for request in requests:
            client.submit(request, deltas.append)
        other_call = asyncio.create_task(client.call("wait", str))
        await until(lambda: peer._calls)
        connection = client._connection
        assert connection is not None and connection._transport is not None
        connection._transport.write(hostile_frame(kind, [requests[0].id], payload))
        await until(lambda: deltas)
        assert (
            deltas[0].id == requests[0].id and deltas[0].final and deltas[0].error_code in ("INVALID_ARG", "INTERNAL")
        )
        peer.connections[-1].send(OutputDeltas([OutputDelta(requests[1].id, "a", [1], "stop")]))
        peer.gate.set()
        assert await other_call == "in time"
        await until(lambda: len(deltas) == 2)
        assert deltas[1].text == "a"


@pytest.mark.parametrize("payload", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("kind", ["OutputDeltas", "Reply", "GenerateRequest", UNKNOWN_KIND])
async def test_a_frame_that_a_client_cannot_accept_fails_alone(peer: Peer, kind: int | str, payload: bytes):
    async with connected(peer) as client:
        deltas: list[OutputDelta] = []
        requests = [request_of(client) for _ in range(2)]
        for request in requests:
            client.submit(request, deltas.append)
        calls = [asyncio.create_task(client.call("wait", str)) for _ in range(2)]
        await until(lambda: len(peer._calls) == 2)
        first_call_id = min(client._calls)
        peer.write(hostile_frame(kind, [requests[0].id, first_call_id], payload))
        with pytest.raises(Internal, match="the text process: "):
            await calls[0]
        assert [(d.id, d.error_code) for d in deltas] == [(requests[0].id, Code.INTERNAL)]
        # The text process must not generate more tokens for this request.
        await until(lambda: CancelRequests([requests[0].id]) in peer.messages)
        peer.connections[-1].send(OutputDeltas([OutputDelta(requests[1].id, "a", [1], "stop")]))
        peer.gate.set()
        assert await calls[1] == "in time"
        assert [d.text for d in deltas] == ["", "a"] and client.is_connected


@pytest.mark.parametrize("data", [b"HTTP/1.1 200 OK\r\n\r\n", encode_frame(Reply(1, to_raw(1, "x")))[:-1]])
async def test_a_corrupt_or_truncated_stream_ends_the_connection(peer: Peer, data: bytes):
    async with connected(peer) as client:
        call = asyncio.create_task(client.call("wait", str))
        await until(lambda: peer._calls)
        peer.write(data)
        transport = peer.connections[-1]._transport
        assert transport is not None
        transport.close()
        with pytest.raises(ConnectionLost):
            await call


@pytest.mark.parametrize("first", [CancelRequests([1]), Call(1, "echo", to_raw({}, "x")), Hello("wizard")])  # type: ignore[arg-type]
async def test_the_first_message_must_be_hello(peer: Peer, first: Message):
    reader, writer = await asyncio.open_unix_connection(peer.path)
    writer.write(encode_frame(first))
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


async def test_a_sink_that_raises_ends_only_its_request(peer: Peer):
    async with connected(peer) as client:
        deltas: list[OutputDelta] = []
        requests = [request_of(client) for _ in range(2)]
        client.submit(requests[0], lambda delta: 1 / 0)
        client.submit(requests[1], deltas.append)
        await until(lambda: len(peer.messages) == 2)
        peer.connections[-1].send(OutputDeltas([OutputDelta(r.id, "a", [1]) for r in requests]))
        await until(lambda: CancelRequests([requests[0].id]) in peer.messages)
        assert [d.id for d in deltas] == [requests[1].id] and client.is_connected
