# SPDX-License-Identifier: Apache-2.0
"""Limits of connections and of held bodies: trailers, empty lines, framing, offers of HTTP/2, bytes per client."""

import asyncio
import contextlib
import itertools
import json
import random
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import uvicorn
from support.openai_front import connect

from quire_server.openai.app import Application
from quire_server.openai.http import message, protocol
from quire_server.openai.http.body_budget import UNCOUNTED_BYTES, BodyBudget
from quire_server.openai.http.protocol import MAX_HEAD_BYTES, LimitedHttpProtocol
from quire_server.openai.http.server import FrontServer
from quire_server.openai.settings import FrontSettings
from quire_spec.documents.pod_config import OpenAIConfig
from quire_spec.protocol.messages import OutputDelta

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


async def echo(scope, receive, send):
    """Answer with the headers and the body of the request."""
    body, more = b"", True
    while more:
        part = await receive()
        if part["type"] != "http.request":
            return
        body, more = body + part["body"], part["more_body"]
    names = [name.decode() for name, _ in scope["headers"]]
    answer = json.dumps({"headers": names, "body": body.decode()}).encode()
    headers = [(b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


@contextlib.asynccontextmanager
async def serving(application, folder: Path) -> AsyncIterator[tuple[str, int]]:
    config = uvicorn.Config(application, http=LimitedHttpProtocol, lifespan="off", log_config=None, ws="none")
    server = FrontServer(config, None, folder / "closing")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        yield listener.getsockname()
        server.should_exit = server.force_exit = True
        await task


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read one response; return its status and its body."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    length = int(next(line.split(b":")[1] for line in head.lower().splitlines() if line.startswith(b"content-length")))
    return int(head.split()[1]), await reader.readexactly(length)


async def test_trailers_are_read_within_limits_and_ignored(tmp_path):
    async with serving(echo, tmp_path) as address, connect(address) as (reader, writer):
        writer.write(CHUNKED + b"2\r\nhi\r\n0\r\nX-Sum: 1\r\nAuthorization: Bearer x\r\n\r\n")
        status, body = await answer_of(reader)
        document = json.loads(body)
        assert status == 200 and document["body"] == "hi"
        assert document["headers"] == ["host", "content-type", "transfer-encoding"]
        writer.write(CHUNKED + b"2\r\nhi\r\n0\r\n\r\n")
        assert (await answer_of(reader))[0] == 200, "the connection stays in use"


@pytest.mark.parametrize(
    "endless",
    [b"0\r\n" + b"X: y\r\n" * 20_000, b"0\r\nX: " + b"y" * 100_000, b"2;" + b"a" * 100_000, b"0" * 100_000],
    ids=["many trailers", "long trailer", "chunk extension", "chunk size"],
)
async def test_framing_without_an_end_is_not_buffered(tmp_path, endless):
    own = psutil.Process()
    async with serving(echo, tmp_path) as address, connect(address) as (reader, writer):
        writer.write(CHUNKED + b"2\r\nhi\r\n")
        before = own.memory_info().rss
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(endless)
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            answer = await asyncio.wait_for(reader.read(), 10)
            assert answer == b"" or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
        assert own.memory_info().rss - before < 20 * len(endless)


async def test_chunks_of_one_byte_are_served(tmp_path):
    async with serving(echo, tmp_path) as address, connect(address) as (reader, writer):
        writer.write(CHUNKED + b"1;a=b\r\nx\r\n" * 50_000 + b"0\r\n\r\n")
        _, body = await answer_of(reader)
        assert json.loads(body)["body"] == "x" * 50_000


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"POST / HT", HEAD], ids=["nothing", "empty line", "line", "head"])
@pytest.mark.parametrize("is_used", [False, True])
async def test_a_connection_without_a_complete_head_is_closed(tmp_path, monkeypatch, sent, is_used):
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.3)
    async with serving(echo, tmp_path) as address, connect(address) as (reader, writer):
        if is_used:
            writer.write(HEAD + b"Content-Length: 0\r\n\r\n")
            assert (await answer_of(reader))[0] == 200
        writer.write(sent)
        if is_used and not sent:
            # The timer of idle connections is longer.
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(), 1)
        else:
            assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_an_empty_line_before_a_request_is_allowed(tmp_path):
    async with serving(echo, tmp_path) as address, connect(address) as (reader, writer):
        for _ in range(3):
            writer.write(b"\r\n")
            await asyncio.sleep(0.05)
            writer.write(HEAD + b"Content-Length: 2\r\n\r\nhi")
            assert json.loads((await answer_of(reader))[1])["body"] == "hi"


@pytest.mark.parametrize("value", [b"h2c", b"  H2C "])
async def test_a_body_after_an_offer_of_http2_is_read(tmp_path, value):
    """Java's HttpClient offers HTTP/2 by default."""
    head = HEAD + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade:%b\r\nHTTP2-Settings: AA\r\n" % value
    async with serving(echo, tmp_path) as address, connect(address) as (reader, writer):
        for _ in range(2):
            body = b"text \r\nUpgrade: h2c\r\n"
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            status, answer = await answer_of(reader)
            assert status == 200 and json.loads(answer)["body"] == body.decode()


async def test_large_bodies_wait_for_room_and_small_ones_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(message, "BODY_TIMEOUT_S", 2.0)
    rejected: list[object] = []
    text = SimpleNamespace(report_rejected=rejected.append)
    settings = FrontSettings(run_dir=Path(), served_name="base", host="127.0.0.1", openai=OpenAIConfig())
    application = Application(settings, text)  # type: ignore[arg-type]
    budget = application._body_budget = BodyBudget(300_000, 200_000)
    head = HEAD.replace(b"POST /", b"POST /v1/completions")

    async def request(address, body: bytes, num_sent: int) -> int:
        async with connect(address) as (reader, writer):
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body[:num_sent])
            return (await answer_of(reader))[0]

    invalid = b'{"best_of": "' + b"x" * 100_000 + b'"}'
    async with serving(application, tmp_path) as address:
        held = [asyncio.create_task(request(address, invalid, 10)) for _ in range(4)]
        await asyncio.sleep(0.3)
        assert budget.num_held_bytes == len(invalid)
        assert await request(address, b'{"best_of": ""}', 100) == 400, "a small body does not wait"
        assert not any(task.done() for task in held)
        # When the first one gives up, another one can get its room, just before it gives up, too.
        assert sorted(await asyncio.gather(*held)) in ([408, 503, 503, 503], [408, 408, 503, 503])
        assert budget.num_held_bytes == 0
        assert await asyncio.gather(*(request(address, invalid, 10**6) for _ in range(8))) == [400] * 8
        assert budget.num_held_bytes == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_runs_holds_no_body(tmp_path, stream):
    sinks: dict[int, Callable[[OutputDelta], object]] = {}

    async def sampling_defaults() -> dict[str, object]:
        return {}

    text = SimpleNamespace(
        sampling_defaults=sampling_defaults,
        new_id=itertools.count(1).__next__,
        submit=lambda request, sink: sinks.update({request.id: sink}),
        cancel=lambda ids: None,
    )
    settings = FrontSettings(run_dir=Path(), served_name="base", host="127.0.0.1", openai=OpenAIConfig())
    application = Application(settings, text)  # type: ignore[arg-type]
    body = json.dumps({"prompt": "x" * 2 * UNCOUNTED_BYTES, "stream": stream, "n": 2, "temperature": 0}).encode()
    head = HEAD.replace(b"POST /", b"POST /v1/completions")
    async with serving(application, tmp_path) as address, connect(address) as (reader, writer):
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(10):
            while len(sinks) < 2:
                await asyncio.sleep(0.01)
        assert application._body_budget.num_held_bytes == 0
        for request_id, sink in sinks.items():
            sink(OutputDelta(request_id, "a", [1], "stop"))
        status, answer = await answer_of(reader) if not stream else (200, b"a")
        assert status == 200 and b"a" in answer


async def test_the_budget_is_exact_after_any_order_of_events():
    budget = BodyBudget(1_000_000, 400_000)
    random_source = random.Random(5)
    peaks: list[tuple[int, int]] = []

    async def hold(client: str, num_bytes: int) -> None:
        held = await budget.reserve(client, num_bytes)
        peaks.append((budget.num_held_bytes, budget._held[client]))
        try:
            await asyncio.sleep(random_source.random() / 100)
        finally:
            if held:
                budget.release(client, held)

    tasks = [
        asyncio.create_task(hold(random_source.choice("abcd"), random_source.randrange(UNCOUNTED_BYTES, 300_000)))
        for _ in range(300)
    ]
    while not all(task.done() for task in tasks):
        random_source.choice(tasks).cancel() if random_source.random() < 0.2 else None
        await asyncio.sleep(0.001)
    assert budget.num_held_bytes == 0 and not budget._waiters and not budget._held
    assert max(total for total, _ in peaks) <= 1_000_000 and max(own for _, own in peaks) <= 400_000
    assert len(peaks) > 100


def test_limits_are_consistent():
    assert MAX_HEAD_BYTES <= UNCOUNTED_BYTES
