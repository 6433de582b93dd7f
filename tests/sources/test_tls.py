# SPDX-License-Identifier: Apache-2.0
"""Sources behind certificates of a private authority, and what can be wrong with them, for everything that reads."""

import asyncio
import contextlib
import datetime
import json
import os
import socket
import ssl
import sys
import threading
import warnings
from pathlib import Path

import pytest
from aiohttp import web
from nodocker_cluster.pki import CertificateAuthority
from support import reader_process
from support.fake_sources import FakeHttpServer, FakeProxy, RawServer, start_server
from support.reader_process import READERS

from quire_spec.documents.adapter_digest import CONFIG_FILE, WEIGHTS_FILE

HOST = "127.0.0.1"
FILES = {
    f"{folder}/{name}": data
    for folder in ("/m", "/bucket/m", "/org/m/resolve/main")
    for name, data in {CONFIG_FILE: b'{"r": 8}', WEIGHTS_FILE: b"\0" * 1000}.items()
}
FOREIGN = ("SSL_CERT_FILE", "SSL_CERT_DIR", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "HF_TOKEN")
MINUTE = datetime.timedelta(minutes=1)


@pytest.fixture(scope="module")
def pki(tmp_path_factory) -> Path:
    """Certificates of servers, by an authority whose own is ca.crt, and by another one."""
    folder = tmp_path_factory.mktemp("pki")
    authority = CertificateAuthority(folder)
    authority.issue("good", "files", hosts=[HOST])
    authority.issue("elsewhere", "files", hosts=["files.example"])
    authority.issue("expired", "files", hosts=[HOST], lifetime=-MINUTE)
    CertificateAuthority(folder / "other").issue("unknown", "files", hosts=[HOST])
    (folder / "no.crt").write_text("no certificate\n")
    return folder


def context(pki: Path, name: str) -> ssl.SSLContext:
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    made.load_cert_chain(pki / f"{name}.crt", pki / f"{name}.key")
    return made


def of_clients_too(pki: Path) -> ssl.SSLContext:
    """Wants certificates of clients. By TLS 1.2: of 1.3 the end of the connection may overtake the refusal."""
    made = context(pki, "good")
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(pki / "ca.crt")
    made.maximum_version = ssl.TLSVersion.TLSv1_2
    return made


def outdated(pki: Path) -> ssl.SSLContext:
    made = context(pki, "good")
    made.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        made.minimum_version = made.maximum_version = ssl.TLSVersion.TLSv1
    return made


async def ask(asked: list[tuple[str, str]], **environment: str) -> list[str]:
    """What readers say of URLs: what they read, or after a colon what was wrong."""
    kept = {name: value for name, value in os.environ.items() if name.upper() not in FOREIGN and name[:4] != "AWS_"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        reader_process.__file__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**kept, "HF_HUB_DISABLE_TELEMETRY": "1", **environment},
    )
    out, err = await process.communicate(json.dumps(asked).encode())
    assert process.returncode == 0, err.decode()
    return json.loads(out)


@pytest.fixture
async def tls(pki):
    """Starts servers of the same files."""
    servers = []

    async def start(made: ssl.SSLContext | None) -> str:
        servers.append(await start_server(FakeHttpServer(FILES).handle, made))
        return str(servers[-1].make_url("/")).rstrip("/")

    yield start
    for server in servers:
        await server.close()


@pytest.fixture
def refusing():
    """Starts servers that agree on TLS with nobody, and say why: asyncio's end a connection without a word."""
    with contextlib.ExitStack() as stack:

        def start(made: ssl.SSLContext) -> str:
            listening = stack.enter_context(socket.create_server((HOST, 0)))
            thread = threading.Thread(target=refuse, args=(listening, made))
            thread.start()
            # In this order: whoever waits in accept() is woken by the first.
            stack.callback(thread.join)
            stack.callback(listening.shutdown, socket.SHUT_RDWR)
            return f"https://{HOST}:{listening.getsockname()[1]}"

        yield start


def refuse(listening: socket.socket, made: ssl.SSLContext) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):
            made.wrap_socket(connection, server_side=True).close()


async def test_one_variable_has_every_reader_trust_a_private_authority(pki, tls):
    url = await tls(context(pki, "good"))
    assert await ask([(reader, url) for reader in READERS], SSL_CERT_FILE=str(pki / "ca.crt")) == ['{"r": 8}'] * len(
        READERS
    )


async def test_a_failed_handshake_is_one_line_that_names_the_source(pki, tls, refusing):
    urls = [
        await tls(context(pki / "other", "unknown")),
        await tls(context(pki, "elsewhere")),
        await tls(context(pki, "expired")),
        (await tls(None)).replace("http:", "https:"),
        refusing(of_clients_too(pki)),
        refusing(outdated(pki)),
    ]
    asked = [(reader, url) for url in urls for reader in READERS]
    for (reader, url), found in zip(asked, await ask(asked, SSL_CERT_FILE=str(pki / "ca.crt")), strict=True):
        assert found.startswith(":") and "\n" not in found, (reader, found)
        assert ("org/m" if "hub" in reader else url) in found, (reader, found)


async def test_a_certificate_behind_a_redirect_names_the_host_behind_it(pki, tls):
    """A hub redirects large files: the message must name the host whose certificate is wrong."""
    url = await tls(context(pki / "other", "unknown"))

    async def moved(request):
        return web.Response(status=302, headers={"Location": f"{url}/secret?signature=s3cr3t", "ETag": '"a"'})

    server = await start_server(moved, context(pki, "good"))
    asked = [(reader, str(server.make_url("/"))) for reader in ("http", "hub")]
    for said in await ask(asked, SSL_CERT_FILE=str(pki / "ca.crt")):
        assert f"no response after a redirect to {url}" in said and "CERTIFICATE_VERIFY_FAILED" in said
        assert "s3cr3t" not in said
    await server.close()


async def test_nobody_there_is_said_by_every_reader():
    """obstore's own words are the same for all that keeps it from an answer."""
    raw = RawServer(b"")
    url = await raw.start()
    await raw.close()
    for said in await ask([(reader, url) for reader in READERS]):
        assert "refused" in said or "Connect call failed" in said


@pytest.mark.parametrize("form", ["http://%s@%s", "https://%s@%s", "%s@%s"], ids=["plain", "TLS", "no scheme"])
async def test_every_reader_goes_by_the_proxy_and_past_it_where_it_is_told_to(pki, tls, form):
    made = context(pki, "good")
    asked = [(reader, await tls(made)) for reader in READERS]
    proxy = FakeProxy("user:passw0rd")
    port = await proxy.start(made if form.startswith("https:") else None)
    environment = {"SSL_CERT_FILE": str(pki / "ca.crt"), "HTTPS_PROXY": form % (proxy.credentials, f"{HOST}:{port}")}
    assert await ask(asked, **environment) == ['{"r": 8}'] * len(READERS)
    assert set(proxy.targets) == {url.removeprefix("https://") for _, url in asked}
    proxy.targets.clear()
    assert await ask(asked, **environment, NO_PROXY=HOST) == ['{"r": 8}'] * len(READERS)
    assert proxy.targets == []
    await proxy.close()


@pytest.mark.parametrize("refuses", [True, False])
async def test_a_proxy_that_refuses_is_not_taken_for_the_place_and_its_password_is_not_told(refuses):
    proxy = FakeProxy("user:other", refuses)
    environment = {"HTTPS_PROXY": f"http://user:passw0rd@{HOST}:{await proxy.start()}"}
    for said in await ask([(reader, "https://files.example") for reader in READERS], **environment):
        assert "the proxy" in said and "passw0rd" not in said
        assert "s3://" in said or ("403" if refuses else "407") in said
    await proxy.close()


async def test_a_proxy_that_does_not_answer_is_an_error_without_its_password():
    raw = RawServer(b"")
    gone = (await raw.start()).removeprefix("http://")
    await raw.close()
    environment = {"HTTPS_PROXY": f"http://user:passw0rd@{gone}"}
    for said in await ask([(reader, "https://files.example") for reader in READERS], **environment):
        assert said.startswith(":") and "passw0rd" not in said, said
