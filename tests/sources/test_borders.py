# SPDX-License-Identifier: Apache-2.0
"""Borders of the readers: forbidden addresses in every spelling, names that change, redirects, and quoted responses."""

import asyncio
import socket
from contextlib import asynccontextmanager
from ipaddress import ip_network

import pytest
from aiohttp import web as aio
from hypothesis import given
from hypothesis import strategies as st
from support.own_address import own_address

from quire_sources.factory import SourceFactory, SourceOptions
from quire_sources.http import borders as module
from quire_sources.http.borders import PRIVATE_NETWORKS, Borders
from quire_sources.reader import read_range
from quire_spec.documents.sources import HttpSource, HuggingFaceSource, S3Source, Source
from quire_spec.errors import ConfigError, Unavailable

OWN = own_address()
OPEN = Borders((*map(ip_network, PRIVATE_NETWORKS), ip_network(f"{OWN}/32")))
LOCAL = "never reads from loopback or link-local addresses"
PRIVATE = "private and not in the chart's value sources.allowedCIDRs; add its network"
SECRET = "INTERNAL-SECRET-42"


@asynccontextmanager
async def serving(handler, host=OWN):
    """Serve every path with a handler; yield the port."""
    app = aio.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = aio.AppRunner(app)
    await runner.setup()
    site = aio.TCPSite(runner, host, 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def read(source, borders=OPEN, **options):
    async with SourceFactory(SourceOptions(borders=borders, **options), lambda ref: {}) as sources:
        return await read_range(sources.open_reader(source), "config.json", 0, 100)


def http(url):
    return Source(http=HttpSource(url))


async def answers(request):
    return aio.Response(text="{}")


# Addresses.


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1", LOCAL),
        ("127.255.0.3", LOCAL),
        ("0.0.0.0", LOCAL),
        ("0.1.2.3", LOCAL),
        ("169.254.169.254", LOCAL),
        ("169.254.170.23", LOCAL),
        ("168.63.129.16", LOCAL),
        ("100.100.100.200", LOCAL),
        ("224.0.0.1", LOCAL),
        ("::1", LOCAL),
        ("::", LOCAL),
        ("fe80::1%eth0", LOCAL),
        ("fd00:ec2::254", LOCAL),
        ("::ffff:127.0.0.1", LOCAL),
        ("::ffff:169.254.169.254", LOCAL),
        ("64:ff9b::169.254.169.254", LOCAL),
        ("2002:a9fe:a9fe::", LOCAL),
        ("255.255.255.255", PRIVATE),
        ("10.0.0.1", None),
        ("fd12::1", None),
        ("::ffff:10.0.0.1", None),
        ("198.18.0.1", PRIVATE),
        ("8.8.8.8", None),
        ("2606:4700::1111", None),
    ],
)
def test_addresses_by_default(address, message):
    refusal = Borders().refusal(address)
    assert (refusal is None) == (message is None) and (message or "") in (refusal or "")


@given(st.ip_addresses(network="127.0.0.0/8") | st.ip_addresses(network="169.254.0.0/16"), st.booleans())
def test_no_network_allows_local_addresses(address, mapped):
    everything = Borders.parse("0.0.0.0/0,::/0")
    assert everything.refusal(f"::ffff:{address}" if mapped else str(address))


@given(st.sampled_from(PRIVATE_NETWORKS).flatmap(lambda network: st.ip_addresses(network=network)))
def test_private_addresses_need_their_network(address):
    assert Borders.parse("").refusal(str(address))
    if Borders().refusal(str(address)) is None:
        assert Borders.parse(f"{address}/{address.max_prefixlen}").refusal(str(address)) is None


def test_rejects_wrong_networks():
    with pytest.raises(ConfigError, match=r"sources.allowedCIDRs: .*10.0.0.1/8.* host bits set; write networks like"):
        Borders.parse("10.0.0.1/8")


# Connections.


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "017700000001", "0", "[::1]", "[::ffff:7f00:1]",
             "localhost", "[::ffff:127.0.0.1]", "localhost."],
)  # fmt: skip
async def test_no_spelling_of_a_loopback_address_is_read(host):
    requests = []

    async def handler(request):
        requests.append(request)
        return aio.Response(text="{}")

    async with serving(handler, "127.0.0.1") as port:
        # Some spellings are not valid, others are resolved.
        with pytest.raises(Unavailable, match=f"{LOCAL}|not valid|Name or service not known"):
            await read(http(f"http://{host}:{port}/m"))
        with pytest.raises(Unavailable, match=LOCAL):
            await read(Source(s3=S3Source("s3://bucket/m", endpoint=f"http://127.0.0.1:{port}")))
        assert requests == []
        assert await read(http(f"http://127.0.0.1:{port}/m"), borders=None) == b"{}", "without borders"


async def test_a_private_address_is_read_only_if_it_is_allowed():
    async with serving(answers) as port:
        for source in (
            http(f"http://{OWN}:{port}/m"),
            Source(s3=S3Source("s3://b/m", endpoint=f"http://{OWN}:{port}")),
        ):
            assert await read(source) == b"{}"
            with pytest.raises(Unavailable, match=PRIVATE) as error:
                await read(source, Borders.parse(""))
            assert "config.json" in str(error.value)


async def test_a_name_is_connected_at_the_address_that_was_checked(monkeypatch):
    """DNS rebinding: the name has an allowed address at the first look and a forbidden one later."""
    looks = []

    class Resolver:
        async def resolve(self, host, port, family):
            looks.append(host)
            address = OWN if len(looks) == 1 else "127.0.0.1"
            return [{"hostname": host, "host": address, "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}]

        async def close(self):
            pass

    monkeypatch.setattr(module, "ThreadedResolver", Resolver)
    async with serving(answers) as port:
        assert await read(http(f"http://model.example:{port}/m")) == b"{}"
        assert looks == ["model.example"]
        with pytest.raises(Unavailable, match=LOCAL):
            await read(http(f"http://model.example:{port}/m"))


async def test_an_allowed_address_of_a_name_is_used_beside_a_forbidden_one(monkeypatch):
    class Resolver:
        async def resolve(self, host, port, family):
            entry = {"hostname": host, "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}
            return [{**entry, "host": address} for address in ("127.0.0.1", OWN)]

        async def close(self):
            pass

    monkeypatch.setattr(module, "ThreadedResolver", Resolver)
    async with serving(answers) as port:
        assert await read(http(f"http://model.example:{port}/m")) == b"{}"


async def test_an_administrators_proxy_can_have_any_address_and_is_no_source(monkeypatch):
    asked = []

    async def proxy(request):
        asked.append(request.raw_path)
        return aio.Response(text="{}")

    async with serving(proxy, "127.0.0.1") as port:
        monkeypatch.setenv("http_proxy", f"http://localhost:{port}")
        monkeypatch.setenv("no_proxy", "localhost")
        assert await read(http("http://model.example/m")) == b"{}"
        assert asked == ["http://model.example/m/config.json"]
        for url in (f"http://localhost:{port}/m", "http://169.254.169.254/m"):
            monkeypatch.setenv("no_proxy", "localhost,169.254.169.254")
            with pytest.raises(Unavailable, match=LOCAL):
                await read(http(url))
        assert len(asked) == 1


# Redirects.


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_stay_on_the_host(status):
    async def handler(request):
        places = {"/m/config.json": "/other/config.json", "/away/config.json": "http://elsewhere.example/config.json"}
        if request.path in places:
            return aio.Response(status=status, headers={"Location": places[request.path]})
        return aio.Response(text="{}")

    async with serving(handler) as port:
        assert await read(http(f"http://{OWN}:{port}/m")) == b"{}"
        with pytest.raises(Unavailable, match="redirects to another host, which is not followed") as error:
            await read(http(f"http://{OWN}:{port}/away"))
        assert "elsewhere" not in str(error.value)


async def test_the_hub_is_trusted_and_its_redirects_are_checked():
    async def hub(request):
        if "redirect" in request.path:
            return aio.Response(status=302, headers={"Location": f"http://{target}/config.json"})
        return aio.Response(text="{}", headers={"X-Repo-Commit": "0" * 40, "ETag": '"a"'})

    async with serving(hub, "127.0.0.1") as port, serving(answers) as storage:
        endpoint = f"http://127.0.0.1:{port}"
        target = f"{OWN}:{storage}"
        for repo in ("org/m", "org/redirect"):
            assert await read(Source(huggingFace=HuggingFaceSource(repo)), hub_endpoint=endpoint) == b"{}"
        target = f"localhost:{storage}"
        with pytest.raises(Unavailable, match=LOCAL):
            await read(Source(huggingFace=HuggingFaceSource("org/redirect")), hub_endpoint=endpoint)


async def test_a_source_cannot_use_a_connection_of_the_hub():
    async def hub(request):
        return aio.Response(text="{}", headers={"X-Repo-Commit": "0" * 40, "ETag": '"a"'})

    async with serving(hub, "127.0.0.1") as port:
        options = SourceOptions(borders=OPEN, hub_endpoint=f"http://localhost:{port}")
        async with SourceFactory(options, lambda ref: {}) as sources:
            hub_reader = sources.open_reader(Source(huggingFace=HuggingFaceSource("org/m")))
            assert await read_range(hub_reader, "config.json", 0, 100) == b"{}"
            with pytest.raises(Unavailable, match=LOCAL):
                await read_range(sources.open_reader(http(f"http://localhost:{port}")), "config.json", 0, 100)


# Errors do not quote responses.


@pytest.mark.parametrize(
    "response",
    [
        f"{SECRET}\r\n",
        f"SSH-2.0-{SECRET}\r\n\r\n",
        f"HTTP/1.1 200 {SECRET}\r\nX {SECRET}: a\r\n\r\n",
        f"HTTP/1.1 200 OK\r\nContent-Encoding: {SECRET}\r\nContent-Length: 2\r\n\r\n{{}}",
        f"HTTP/1.1 200 OK\r\nContent-Length: {SECRET}\r\n\r\n{{}}",
        f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{SECRET}\r\n",
        f"HTTP/1.1 302 OK\r\nLocation: {SECRET}://x\r\nContent-Length: 0\r\n\r\n",
        f"HTTP/1.1 302 OK\r\nLocation: http://{SECRET}/\r\nContent-Length: 0\r\n\r\n",
        f"HTTP/1.1 403 {SECRET}\r\nX-Error-Code: {SECRET}\r\nRetry-After: {SECRET}\r\nContent-Length: 0\r\n\r\n",
        f"HTTP/1.1 400 x\r\nContent-Length: 40\r\n\r\n<Code>{SECRET.replace('-', '_')}</Code>" + " " * 9,
        f"HTTP/1.1 206 x\r\nContent-Range: {SECRET}\r\nContent-Length: 0\r\n\r\n",
    ],
)  # fmt: skip
async def test_no_error_quotes_a_response(response):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response.encode())
        writer.close()

    server = await asyncio.start_server(answer, OWN, 0)
    port = server.sockets[0].getsockname()[1]
    for source in (http(f"http://{OWN}:{port}/m"), Source(s3=S3Source("s3://b/m", endpoint=f"http://{OWN}:{port}"))):
        with pytest.raises(Unavailable) as error:
            await read(source)
        assert "secret" not in str(error.value).lower().replace("source's secret", ""), str(error.value)
    server.close()
