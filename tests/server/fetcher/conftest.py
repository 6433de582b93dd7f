# SPDX-License-Identifier: Apache-2.0
"""What holds for every fetch, and the servers that more than one protocol needs."""

import pytest
from support.fetching import at
from support.sources import Files, Raw, serve


@pytest.fixture(autouse=True)
def _no_ambient_identity(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "HF_TOKEN", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch):
    monkeypatch.setattr("quire_server.sources.resumable_download._FIRST_RETRY_S", 0.01)


@pytest.fixture
async def web():
    files = Files(at("/loras/sql"))
    server = await serve(files.handle)
    files.url = str(server.make_url("/loras/sql"))
    yield files
    await server.close()


@pytest.fixture
async def raw():
    servers = []

    async def start(answer, pause_s=0.0):
        servers.append(Raw(answer, pause_s))
        return servers[-1], await servers[-1].start()

    yield start
    for server in servers:
        await server.close()
