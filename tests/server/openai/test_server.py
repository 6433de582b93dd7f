# SPDX-License-Identifier: Apache-2.0
"""The front's HTTP server before its pod stops: clients go elsewhere without an error."""

import asyncio
import socket

import uvicorn
from support.openai_front import connect

from quire_server.openai.http import server as server_module
from quire_server.openai.http.protocol import LimitedHttpProtocol
from quire_server.openai.http.server import FrontServer

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def application(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def exchange(reader, writer):
    """Send a request and return the headers of its response."""
    writer.write(REQUEST)
    return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)


async def close_before_the_pod_stops(folder):
    """Return the headers before and after the file exists, and what a used and an idle connection receive then."""
    config = uvicorn.Config(application, http=LimitedHttpProtocol, lifespan="off", log_config=None)
    server = FrontServer(config, None, folder / "closing")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        address = listener.getsockname()
        async with connect(address) as used, connect(address) as idle:
            before = await exchange(*used), await exchange(*idle)
            (folder / "closing").touch()
            async with asyncio.timeout(10):
                while b"connection: close" not in (after := await exchange(*used)):
                    await asyncio.sleep(0.05)
                end_of_used, end_of_idle = await used[0].read(), await idle[0].read()
        async with connect(address) as new:
            later = await exchange(*new)
        server.should_exit = True
        await serving
    return before, after, end_of_used, end_of_idle, later


def test_connections_end_after_a_response_and_idle_ones_soon(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "CLOSE_IDLE_AFTER_S", 0.2)
    before, after, end_of_used, end_of_idle, later = asyncio.run(close_before_the_pod_stops(tmp_path))
    assert all(b"200 OK" in head and b"connection: close" not in head for head in before)
    assert b"200 OK" in after
    assert (end_of_used, end_of_idle) == (b"", b"")
    assert b"200 OK" in later and b"connection: close" in later, "requests are still served"
