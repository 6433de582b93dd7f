# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests that read sources: short retry delays, no ambient credentials, and a web server with an adapter."""

import pytest
from support.fake_sources import FakeHttpServer, start_server
from support.fetching import files_under

AMBIENT = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_WEB_IDENTITY_TOKEN_FILE", "HF_TOKEN")
PROXIES = ("HTTP_PROXY", "http_proxy")


@pytest.fixture(autouse=True)
def isolated_sources(monkeypatch):
    for name in (*AMBIENT, *PROXIES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("quire_server.downloads.resumable_download._FIRST_RETRY_S", 0.01)


@pytest.fixture
async def serve():
    """Return a function that starts a server with a handler and returns its URL."""
    servers = []

    async def start(handle, tls=None):
        servers.append(await start_server(handle, tls))
        return str(servers[-1].make_url("/")).rstrip("/")

    yield start
    for server in servers:
        await server.close()


@pytest.fixture
async def web(serve):
    files = FakeHttpServer(files_under("/loras/sql"))
    files.url = f"{await serve(files.handle)}/loras/sql"
    return files
