# SPDX-License-Identifier: Apache-2.0
"""Framing of HTTP: slow, endless, contradicting and smuggled requests, for the OpenAI port and the server's port."""

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial

from attack import Attack, Target

GROUP = "HTTP of the OpenAI port"
SLOW_LIMIT_S = 60.0
"""A body must be complete within 60 s, a head within 20 s on the OpenAI port."""
MIB = 2**20


def attacks() -> Iterator[Attack]:
    """Yield all attacks on the OpenAI port."""
    yield from _framings("openai", "/v1/completions", GROUP)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for name, lines in {
        "gzip": b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\n\x1f\x8b\x08\x00\x00",
        "deflate": b"Content-Encoding: deflate\r\nContent-Length: 1\r\n\r\nx",
        "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\n\r\n",
        "h2c": b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\n{}",
        "expectation": b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
        "unknown expectation": b"Expect: x\r\nContent-Length: 2\r\n\r\n{}",
        "text": b"Content-Length: 2\r\n\r\n{}",
        "foreign host": b"Host: evil.example\r\nContent-Length: 2\r\n\r\n{}",
        "no content type": b"content-type:\r\nContent-Length: 2\r\n\r\n{}",
        "two hosts": b"Host: evil.example\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
        "two keys": b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\nContent-Length: 2\r\n\r\n{}",
        "long key": b"Authorization: Bearer " + b"a" * 60_000 + b"\r\nContent-Length: 2\r\n\r\n{}",
        "request id": b"X-Request-Id: a\tb<script>\r\nContent-Length: 2\r\n\r\n{}",
        "trace": b"traceparent: 00-" + b"z" * 200 + b"\r\nContent-Length: 2\r\n\r\n{}",
        "forwarded": b"X-Forwarded-For: 127.0.0.1\r\nForwarded: for=127.0.0.1\r\nContent-Length: 2\r\n\r\n{}",
        "length of 1 GB": b"Content-Length: 1000000000\r\n\r\n" + b" " * 70_000_000,
        "foreign origin": b"Origin: https://evil.example\r\nContent-Length: 2\r\n\r\n{}",
    }.items():
        yield _raw(GROUP, name, "openai", head + lines)
    yield Attack(GROUP, "1,000 cancelled streams", partial(_cancel, count=1000, is_reset=False), limit_s=90.0)
    yield Attack(GROUP, "300 reset streams", partial(_cancel, count=300, is_reset=True), limit_s=60.0)
    yield Attack(GROUP, "500 idle connections", partial(_idle, port="openai", count=500), limit_s=SLOW_LIMIT_S)
    for count in (8, 16):
        yield Attack(GROUP, f"{count} readers that never read", partial(_never_read, count=count), limit_s=60.0)
    for count in (4, 12):
        yield Attack(GROUP, f"{count} held bodies", partial(_held_bodies, count=count), limit_s=SLOW_LIMIT_S + 60)


def server_framings() -> Iterator[Attack]:
    """Yield the attacks on the framing of the server's HTTP port."""
    group = "server HTTP"
    yield from _framings("http", "/v2/models/tales/generate", group)
    head = b"POST /v2/models/tales/generate HTTP/1.1\r\nHost: localhost\r\n"
    for weight in ("1e400", "nan", "", "-1", "x", "1.1", "0.12345", "1" * 60):
        yield _raw(
            group,
            f"weight {weight[:8]}",
            "http",
            b"GET /v2 HTTP/1.1\r\nAccept-Encoding: gzip;q=%b\r\n\r\n" % weight.encode(),
        )
    for length in ("99999999999", "-1", "x", "", "1" * 40, "2147483648", "0x10"):
        lines = f"Inference-Header-Content-Length: {length}\r\nContent-Length: 2\r\n\r\n{{}}".encode()
        yield _raw(group, f"length of the JSON {length[:8]}", "http", head + lines)
    for name, value in {
        "host": b"evil.example",
        "empty host": b"",
        "host with user": b"localhost@evil.example",
    }.items():
        yield _raw(group, name, "http", b"GET /v2 HTTP/1.1\r\nHost: %b\r\n\r\n" % value)
    for encoding in ("gzip", "deflate", "identity, gzip", "br"):
        yield _raw(
            group, encoding, "http", head + f"Content-Encoding: {encoding}\r\nContent-Length: 2\r\n\r\n{{}}".encode()
        )
    yield Attack(group, "300 idle connections", partial(_idle, port="http", count=300), limit_s=SLOW_LIMIT_S)


def _framings(port: str, path: str, group: str) -> Iterator[Attack]:
    line = f"POST {path} HTTP/1.1\r\n".encode()
    host = b"Host: localhost\r\nContent-Type: application/json\r\n"
    head = line + host
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    for name, data in {
        "two lengths": head + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
        "equal lengths": head + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
        "negative length": head + b"Content-Length: -1\r\n\r\n",
        "signed length": head + b"Content-Length: +2\r\n\r\n{}",
        "hexadecimal length": head + b"Content-Length: 0x2\r\n\r\n{}",
        "huge length": head + b"Content-Length: 99999999999999999999\r\n\r\n",
        "length and chunks": head + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "chunks and length": head + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
        "unknown encoding": head + b"Transfer-Encoding: x\r\n\r\n",
        "chunked twice": head + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        "space before colon": head + b"Content-Length : 2\r\n\r\n{}",
        "folded header": head + b"X: a\r\n b\r\nContent-Length: 2\r\n\r\n{}",
        "bare line feeds": head.replace(b"\r\n", b"\n") + b"Content-Length: 2\n\n{}",
        "bare carriage return": head + b"X: a\rb\r\nContent-Length: 2\r\n\r\n{}",
        "NUL in header": head + b"X: a\0b\r\nContent-Length: 2\r\n\r\n{}",
        "NUL in path": line.replace(b" HTTP", b"\0 HTTP") + host + b"\r\n",
        "header without colon": head + b"nothing\r\n\r\n",
        "empty name": head + b": x\r\n\r\n",
        "HTTP/0.9": b"GET /\r\n\r\n",
        "HTTP/1.0": line.replace(b"1.1", b"1.0") + host + b"Content-Length: 2\r\n\r\n{}",
        "HTTP/3.0": line.replace(b"1.1", b"3.0") + host + b"\r\n",
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
        "TLS": bytes.fromhex("16030100c8010000c40303") + b"\0" * 200,
        "unknown method": line.replace(b"POST", b"BREW") + host + b"Content-Length: 0\r\n\r\n",
        "lower-case method": line.replace(b"POST", b"post") + host + b"Content-Length: 0\r\n\r\n",
        "negative chunk": chunked + b"-1\r\nx\r\n0\r\n\r\n",
        "huge chunk": chunked + b"ffffffffffffffff\r\n",
        "long chunk": chunked + b"1\r\nxyz\r\n0\r\n\r\n",
        "chunk extensions": chunked + (b"1;" + b"a" * 1000 + b"\r\n \r\n") * 2000 + b"0\r\n\r\n",
        "endless extension": chunked + b"1;" + b"a" * 8 * MIB,
        "one-byte chunks": chunked + b"1\r\n \r\n" * 200_000 + b"0\r\n\r\n",
        "endless trailer": chunked + b"0\r\nX: " + b"a" * 8 * MIB,
        "many trailers": chunked + b"0\r\n" + b"X: a\r\n" * 500_000 + b"\r\n",
        "large head": head + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
        "many headers": head + b"".join(b"X-%d: a\r\n" % i for i in range(5000)) + b"\r\n",
        "endless head": head + b"X: " + b"a" * 4 * MIB,
        "long path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n" + host + b"\r\n",
        "many empty lines": b"\r\n" * 100_000 + b"GET /v2 HTTP/1.1\r\n" + host + b"\r\n",
        "smuggled": head + b"Content-Length: 5\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "absolute URL": b"GET http://evil.example/v2 HTTP/1.1\r\n" + host + b"\r\n",
        "asterisk": b"OPTIONS * HTTP/1.1\r\n" + host + b"\r\n",
        "CONNECT": b"CONNECT evil.example:443 HTTP/1.1\r\n" + host + b"\r\n",
        "TRACE": b"TRACE / HTTP/1.1\r\n" + host + b"\r\n",
        "dots": b"GET /../../etc/passwd HTTP/1.1\r\n" + host + b"\r\n",
        "encoded dots": b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\n" + host + b"\r\n",
        "encoded NUL": b"GET /v2%00 HTTP/1.1\r\n" + host + b"\r\n",
        "invalid escape": b"GET /%zz HTTP/1.1\r\n" + host + b"\r\n",
        "non-ASCII path": "GET /\u4f60 HTTP/1.1\r\n".encode() + host + b"\r\n",
        "two spaces": b"GET  /v2  HTTP/1.1\r\n" + host + b"\r\n",
        "random bytes": bytes(range(256)) * 200,
    }.items():
        yield _raw(group, f"{name}", port, data)
    yield _raw(group, "pipeline of 2,000", port, b"GET /none HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000, limit_s=30.0)
    unfinished = {"head": head, "line": line[:20], "chunk": chunked + b"5\r\nx"}
    unfinished["body"] = head + b"Content-Length: 90\r\n\r\n{"
    for name, data in unfinished.items():
        yield _raw(group, f"unfinished {name}", port, data, limit_s=SLOW_LIMIT_S)
        yield _raw(group, f"half-closed {name}", port, data, limit_s=SLOW_LIMIT_S, half_close=True)
        yield Attack(group, f"slow {name}", partial(_slow, port=port, data=data), limit_s=SLOW_LIMIT_S)
    yield _raw(group, "empty line", port, b"\r\n", limit_s=SLOW_LIMIT_S)


def _raw(group: str, name: str, port: str, data: bytes, limit_s: float = 20.0, half_close: bool = False) -> Attack:
    async def send(target: Target, data: bytes) -> str:
        return await target.raw(port, data, half_close=half_close)

    # The server does not answer what looks like an unfinished request, but closes it at its limit.
    is_closed_late = port == "http"
    return Attack(group, f"{port}: {name}", partial(send, data=data), SLOW_LIMIT_S if is_closed_late else limit_s)


async def _slow(target: Target, port: str, data: bytes) -> str:
    """Send one byte per second after the start of a request, until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.ports[port])
    try:
        writer.write(data)
        answer = asyncio.create_task(reader.read(100))
        with contextlib.suppress(ConnectionError):
            while not answer.done():
                writer.write(b"a")
                await writer.drain()
                await asyncio.wait({answer}, timeout=1)
        try:
            return (await answer).split(b"\r\n")[0].decode(errors="replace").removeprefix("HTTP/1.1 ") or "closed"
        except ConnectionError:
            return "closed"
    finally:
        writer.close()


async def _cancel(target: Target, count: int, is_reset: bool) -> str:
    """Open streams and close each of them after its head."""
    body = b'{"model": "tales", "prompt": "x", "max_tokens": 200, "stream": true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {target.flood_key}\r\n".encode()
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)

    async def one() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", target.ports["openai"])
        writer.write(head + body)
        await writer.drain()
        if is_reset:
            writer.transport.abort()
        writer.close()

    for _ in range(count // 20):
        await asyncio.gather(*(one() for _ in range(20)), return_exceptions=True)
        await asyncio.sleep(0.05)
    return await target.post("/v1/completions", {"model": "tales", "prompt": "x", "max_tokens": 1})


async def _idle(target: Target, port: str, count: int) -> str:
    """Open connections that send nothing until each of them is closed."""

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.ports[port])
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    await asyncio.gather(*(one() for _ in range(count)))
    return "closed"


async def _never_read(target: Target, count: int) -> str:
    """Request long streams and read nothing; then check that another request is answered."""
    options = b'"max_tokens": 1000, "ignore_eos": true, "stream": true, "n": 8, "logprobs": 5'
    body = b'{"model": "tales", "prompt": "x", %b}' % options
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {target.flood_key}\r\n".encode()
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    writers = []
    for _ in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", target.ports["openai"], limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(head + body)
        writers.append(writer)
    await asyncio.sleep(2)
    try:
        return await target.post("/v1/completions", {"model": "tales", "prompt": "x", "max_tokens": 1})
    finally:
        for writer in writers:
            writer.transport.abort()


async def _held_bodies(target: Target, count: int) -> str:
    """Hold bodies that are complete except for their last byte."""
    size = 8_000_000
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {target.flood_key}\r\n".encode()
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % size

    async def one() -> str:
        return await target.raw("openai", head, b" " * (size - 1))

    return min(await asyncio.gather(*(one() for _ in range(count))))
