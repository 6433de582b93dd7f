# SPDX-License-Identifier: Apache-2.0
"""Fake sources: an HTTP server with ranges, the Hugging Face hub, S3, a raw TCP server and a proxy.

Tests cannot use the real hub or a real bucket. The clients, obstore and huggingface_hub, are real.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import re
import ssl
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.test_utils import TestServer


@dataclass
class FakeHttpServer:
    """Files by path, served with ETag, Range, If-Range and If-Match; can cut connections and omit sizes."""

    files: dict[str, bytes]
    cut_after_bytes: list[int] = field(default_factory=list)
    """Bytes after which each of the next GET responses is cut."""
    files_after_cuts: dict[str, bytes] = field(default_factory=dict)
    """Files that replace others after the last cut."""
    send_etags: bool = True
    honor_conditions: bool = True
    """Implement If-Range and If-Match; some servers implement only Range."""
    chunked: bool = False
    """Omit Content-Length."""
    send_rest: asyncio.Event | None = None
    """If set, five eighths of the weights are sent immediately and the rest when the event is set."""
    requests: list[web.Request] = field(default_factory=list)
    is_down: bool = False

    def paths(self, method: str = "GET") -> list[str]:
        return [r.path for r in self.requests if r.method == method]

    def ranges(self) -> list[str]:
        return [r.headers.get("Range", "") for r in self.requests if r.method == "GET"]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        if self.is_down:
            return web.Response(status=503)
        return await self.respond(request, self.files.get(request.path))

    async def respond(self, request: web.Request, data: bytes | None) -> web.StreamResponse:
        if data is None:
            return web.Response(status=404)
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        headers = {"ETag": etag} if self.send_etags else {}
        if self.honor_conditions and request.headers.get("If-Match", etag) != etag:
            return web.Response(status=412)
        status, start, end = 200, 0, len(data)
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if match and (not self.honor_conditions or request.headers.get("If-Range", etag) == etag):
            start = int(match[1])
            if start >= len(data):
                return web.Response(status=416, headers={"Content-Range": f"bytes */{len(data)}"})
            end = min(int(match[2] or end) + bool(match[2]), end)
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
            status = 206
        response = web.StreamResponse(status=status, headers=headers)
        if not self.chunked or request.method == "HEAD":
            response.content_length = end - start
        await response.prepare(request)
        if request.method == "GET":
            await self._send(request, response, data[start:end])
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, data: bytes) -> None:
        if self.cut_after_bytes:
            await response.write(data[: self.cut_after_bytes.pop(0)])
            assert request.transport is not None
            request.transport.close()
            if not self.cut_after_bytes:
                self.files.update(self.files_after_cuts)
        elif self.send_rest and request.path.endswith(".safetensors"):
            await response.write(data[: len(data) * 5 // 8])
            await self.send_rest.wait()
            await response.write(data[len(data) * 5 // 8 :])
        else:
            await response.write(data)


async def start_server(handle, tls: ssl.SSLContext | None = None) -> TestServer:
    """Start a server that passes every request to `handle`."""
    app = web.Application(client_max_size=2**20)
    app.router.add_route("*", "/{path:.*}", handle)
    server = TestServer(app, scheme="https" if tls else "http")
    await server.start_server(ssl=tls)
    return server


@dataclass
class RawServer:
    """A server that sends `response`, HTTP or not, to each connection's first request, and then closes."""

    response: bytes
    pause_s: float = 0.0
    """Before each byte of the body."""
    requests: list[bytes] = field(default_factory=list)

    async def start(self) -> str:
        """Listen; returns its URL."""
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            head, end, body = self.response.partition(b"\r\n\r\n")
            pieces = [body[i : i + 1] for i in range(len(body))] if self.pause_s else [body]
            writer.write(head + end)
            for piece in pieces:
                await asyncio.sleep(self.pause_s)
                writer.write(piece)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@dataclass
class FakeProxy:
    """A proxy for CONNECT that requires `credentials` (user:password), else it responds with 407."""

    credentials: str
    is_forbidden: bool = False
    """Respond with 403 to every request."""
    targets: list[str] = field(default_factory=list)
    """Target of each CONNECT."""

    async def start(self, tls: ssl.SSLContext | None = None) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", 0, ssl=tls)
        return self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.split("\r\n")[0].split()
        self.targets.append(target)
        is_authorized = f"Basic {base64.b64encode(self.credentials.encode()).decode()}" in head
        if self.is_forbidden or not is_authorized or method != "CONNECT":
            writer.write(b"HTTP/1.1 403 No\r\n\r\n" if self.is_forbidden else b"HTTP/1.1 407 Who\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            host, _, port = target.rpartition(":")
            upstream = await asyncio.open_connection(host, int(port))
            await asyncio.gather(_pump(reader, upstream[1]), _pump(upstream[0], writer))
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()


class FakeHub:
    """One repository with one commit; like the hub, it redirects large files to `cdn` on another host."""

    def __init__(self, http_server: FakeHttpServer, repo: str, commit: str, token: str | None, cdn: str) -> None:
        self.http_server, self.repo, self.commit, self.token, self.cdn = http_server, repo, commit, token, cdn
        self.requests: list[web.Request] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        match = re.fullmatch(rf"/{self.repo}/resolve/([^/]+)/(.+)", request.path)
        if not match or (self.token and request.headers.get("Authorization") != f"Bearer {self.token}"):
            return web.Response(status=401, headers={"X-Error-Code": "RepoNotFound"})
        revision, name = match.groups()
        data = self.http_server.files.get(f"/{name}")
        if revision not in ("main", self.commit):
            return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        if data is None:
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": self.commit}
        if name.endswith(".safetensors"):
            headers["X-Linked-Etag"] = f'"{hashlib.sha256(data).hexdigest()}"'
            headers["X-Linked-Size"] = str(len(data))
            return web.Response(status=302, headers=headers | {"Location": f"{self.cdn}/{name}?signature=s3cr3t"})
        headers["ETag"] = f'"{hashlib.sha1(data).hexdigest()}"'
        return web.Response(status=200, headers=headers, body=data)


class FakeS3:
    """The read part of S3, with signatures checked (AWS Signature Version 4, in the query)."""

    def __init__(self, http_server: FakeHttpServer, key_id: str | None = None, secret: str = "") -> None:
        self.http_server, self.key_id, self.secret = http_server, key_id, secret

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.key_id is not None and not self._is_signed(request):
            code = "<Error><Code>AccessDenied</Code></Error>"
            return web.Response(status=403, text=code, content_type="application/xml")
        self.http_server.requests.append(request)
        return await self.http_server.respond(request, self.http_server.files.get(request.path))

    def _is_signed(self, request: web.Request) -> bool:
        query = dict(request.query)
        key_id, _, scope = query.get("X-Amz-Credential", "").partition("/")
        if key_id != self.key_id or "Authorization" in request.headers:
            return False
        raw = sorted(part for part in request.rel_url.raw_query_string.split("&") if "X-Amz-Signature=" not in part)
        headers = [request.method, request.rel_url.raw_path, "&".join(raw), f"host:{request.headers['Host']}"]
        canonical = "\n".join([*headers, "", query["X-Amz-SignedHeaders"], "UNSIGNED-PAYLOAD"])
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        message = f"{query['X-Amz-Algorithm']}\n{query['X-Amz-Date']}\n{scope}\n{digest}"
        key = f"AWS4{self.secret}".encode()
        for part in (*scope.split("/"), message):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        return hmac.compare_digest(key.hex(), query["X-Amz-Signature"])
