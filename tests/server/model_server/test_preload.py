# SPDX-License-Identifier: Apache-2.0
"""The preload library, alone and in a real server.

In the server, a send to a full local socket waits, and child processes do not inherit connections.
"""

import asyncio
import os
import socket
import subprocess
import sys

import aiohttp
import pytest
from support.frontend_harness import BASE, scripted_text
from support.quire_serve import StreamedResponse

from quire_server.model_server import launch
from quire_server.model_server.preload import preload

FLOOD = """
import socket, threading, time
family = socket.AF_UNIX if {local} else socket.AF_INET
if {local}:
    out, into = socket.socketpair(family)
else:
    listening = socket.create_server(("127.0.0.1", 0))
    out, into = socket.create_connection(listening.getsockname()), listening.accept()[0]
out.setblocking(False)

def drain():
    time.sleep(0.3 if {local} else 30)
    num = 0
    while num < 17 * {messages}:
        num += len(into.recv(2**20))

reader = threading.Thread(target=drain, daemon=True)
reader.start()
for _ in range({messages}):
    out.send(b"x" * 17)
reader.join(20)
print("all received" if not reader.is_alive() else "lost")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = preload.find_or_build_library(tmp_path_factory.mktemp("library"))
    assert path is not None, "this test requires a C compiler"
    return path


def flood(library, name, local=True, messages=2000):
    """Run a process with argv[0] `name` that sends more than a socket's queue can hold; return its result."""
    program = FLOOD.format(local=local, messages=messages)
    env = dict(os.environ, LD_PRELOAD=str(library or ""))
    return subprocess.run(
        [name, "-c", program], executable=sys.executable, env=env, capture_output=True, text=True, timeout=60
    )


def test_send_waits_in_the_server(library):
    done = flood(library, "tritonserver")
    assert (done.stdout, done.stderr) == ("all received\n", "")


def test_send_fails_without_the_library():
    assert "BlockingIOError" in flood(None, "tritonserver").stderr


def test_send_fails_in_other_programs(library):
    assert "BlockingIOError" in flood(library, "stub").stderr


def test_send_fails_on_network_connections(library):
    assert "BlockingIOError" in flood(library, "tritonserver", local=False, messages=10**6).stderr


def test_uses_the_prebuilt_library(library, tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_NATIVE_CACHE", str(library.parent))
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert preload.find_or_build_library(tmp_path) == library
    assert preload.main() == 0


@pytest.mark.parametrize(("compiler", "reason"), [("/nowhere/cc", "No such file"), ("false", "library not built")])
def test_logs_a_warning_without_a_compiler(compiler, reason, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CC", compiler)
    monkeypatch.delenv("QUIRE_NATIVE_CACHE", raising=False)
    assert preload.find_or_build_library(tmp_path) is None
    assert "HTTP streams can lose text" in caplog.text
    assert reason in caplog.text
    assert not list(tmp_path.iterdir())


def test_prebuild_requires_the_cache_variable(monkeypatch, caplog):
    monkeypatch.delenv("QUIRE_NATIVE_CACHE", raising=False)
    assert preload.main() == 2
    assert "QUIRE_NATIVE_CACHE is not set" in caplog.text


@pytest.mark.server
def test_streams_lose_nothing_while_their_thread_in_the_server_is_blocked(running):
    """A load over HTTP blocks such a thread; meanwhile several times the capacity of its queue is sent."""
    running.write_model("blocking")
    url = f"http://127.0.0.1:{running.ports['http']}/v2"
    headers = {launch.KEY_HEADER: running.key}

    async def scenario() -> list[StreamedResponse]:
        async with aiohttp.ClientSession(headers=headers) as session:
            # Open this connection, and thereby its thread, before the streams.
            async with session.get(f"{url}/health/live") as response:
                await response.read()
            streams, tasks = await running.open_streams([BASE] * 32, "step=0.005", max_tokens=200)
            async with session.post(f"{url}/repository/models/blocking/load", json={}) as response:
                assert response.status == 200, await response.text()
            await asyncio.wait_for(asyncio.gather(*tasks), 30)
            return streams

    streams = asyncio.run(scenario())
    assert [(s.text, s.error) for s in streams] == [(scripted_text(200), None)] * 32
    running.remove_model("blocking")


@pytest.mark.server
def test_connection_closes_although_a_stub_was_started_meanwhile(running):
    """A stub that inherits the connection would keep it open."""
    with socket.create_connection(("127.0.0.1", running.ports["http"]), timeout=5) as connection:
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n")
        running.add_model("later")
        connection.sendall(b"Connection: close\r\n\r\n")
        assert b"".join(iter(lambda: connection.recv(4096), b"")).startswith(b"HTTP/1.1 200")
    running.remove_model("later")
