# SPDX-License-Identifier: Apache-2.0
"""The front fetches images only over HTTPS, from hosts of the allow list, at public addresses, and within limits."""

import ssl

import aiohttp
import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.fake_sources import start_server

from quire_server.openai.errors import ApiError
from quire_server.openai.images import image_loader
from quire_server.openai.images.image_loader import ImageLoader
from quire_server.openai.images.image_parts import ImageUrl
from quire_sources.http.borders import Borders

PATH = "messages[0].content[0].image_url"
HOSTS = ["localhost", "127.0.0.1", "10.0.0.1", "169.254.169.254", "[::1]", "[::ffff:7f00:1]", "[fd00::1]"]


async def load(url: str, *allowed: str) -> bytes:
    [data] = await ImageLoader(allowed).load([ImageUrl(PATH, url)])
    return data


@pytest.mark.parametrize("host", HOSTS)
async def test_an_allowed_host_with_a_private_address_is_refused(host):
    with pytest.raises(ApiError, match="are not allowed"):
        await load(f"https://{host}/a.png")
    with pytest.raises(ApiError, match=r"never reads from loopback|its address is private") as error:
        await load(f"https://{host}/a.png", host.strip("[]"))
    assert error.value.status == 400 and error.value.message.startswith(PATH)


@pytest.fixture
async def server(monkeypatch):
    """Serve images with a certificate that clients trust, at an address that counts as public."""
    authority, context = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    client_context = ssl.create_default_context()
    authority.configure_trust(client_context)
    monkeypatch.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", client_context)
    monkeypatch.setattr(Borders, "refusal", lambda *_: None)
    monkeypatch.setattr(image_loader, "MAX_IMAGE_BYTES", 1000)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")  # it would resolve the name itself

    async def handle(request: web.Request) -> web.StreamResponse:
        sizes = {"/a.png": 10, "/large.png": 1001}
        if request.path in sizes:
            return web.Response(body=b"a" * sizes[request.path])
        if request.path == "/endless.png":
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(100):
                await response.write(b"a" * 100)
            return response
        if request.path == "/away.png":
            return web.Response(status=302, headers={"Location": "https://elsewhere.example/a.png"})
        return web.Response(status=404)

    server: TestServer = await start_server(handle, context)
    yield f"https://localhost:{server.port}"
    await server.close()


async def test_images_of_allowed_hosts_are_fetched_within_limits(server):
    assert await load(f"{server}/a.png", "LOCALHOST") == b"a" * 10
    for name, message in (
        ("large", "has more than 1000 bytes"),
        ("endless", "has more than 1000 bytes"),
        ("away", "redirects to another host, which is not followed"),
        ("missing", "does not exist; check the URL"),
    ):
        with pytest.raises(ApiError, match=message):
            await load(f"{server}/{name}.png", "localhost")
    with pytest.raises(ApiError, match="no response from"):
        await load("https://localhost:1/a.png", "localhost")
