# SPDX-License-Identifier: Apache-2.0
"""Short retry delays and no ambient credentials for every test, and servers that several protocols need."""

import pytest
from support.fake_sources import FakeHttpServer, RawServer, start_server
from support.fetching import files_under


@pytest.fixture(autouse=True)
def _no_ambient_identity(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "HF_TOKEN", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch):
    monkeypatch.setattr("quire_server.downloads.resumable_download._FIRST_RETRY_S", 0.01)


@pytest.fixture
async def web():
    files = FakeHttpServer(files_under("/loras/sql"))
    server = await start_server(files.handle)
    files.url = str(server.make_url("/loras/sql"))
    yield files
    await server.close()


@pytest.fixture
async def raw():
    servers = []

    async def start(answer, pause_s=0.0):
        servers.append(RawServer(answer, pause_s))
        return servers[-1], await servers[-1].start()

    yield start
    for server in servers:
        await server.close()
