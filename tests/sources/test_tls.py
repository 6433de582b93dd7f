# SPDX-License-Identifier: Apache-2.0
"""TLS and proxies, for every remote reader: a private authority, failed handshakes, proxies that reject."""

import asyncio
import datetime
import json
import os
import ssl
import sys
from pathlib import Path

import pytest
from aiohttp import web
from nodocker_cluster.pki import CertificateAuthority
from support import reader_process
from support.fake_sources import FakeHttpServer, FakeProxy
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
    """Server certificates of the authority ca.crt, and of another authority."""
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


async def ask(asked: list[tuple[str, str]], **environment: str) -> list[str]:
    """Return the file content for each [reader, URL] pair, or a colon and the error message."""
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
def tls(serve):
    """Starts servers with the same files."""
    return lambda made: serve(FakeHttpServer(FILES).handle, made)


async def test_ssl_cert_file_applies_to_every_reader(pki, tls):
    url = await tls(context(pki, "good"))
    assert await ask([(reader, url) for reader in READERS], SSL_CERT_FILE=str(pki / "ca.crt")) == ['{"r": 8}'] * len(
        READERS
    )


async def test_failed_handshake_is_one_line_that_names_the_source(pki, tls):
    urls = [
        await tls(context(pki / "other", "unknown")),
        await tls(context(pki, "elsewhere")),
        await tls(context(pki, "expired")),
        (await tls(None)).replace("http:", "https:"),
    ]
    asked = [(reader, url) for url in urls for reader in READERS]
    for (reader, url), found in zip(asked, await ask(asked, SSL_CERT_FILE=str(pki / "ca.crt")), strict=True):
        assert found.startswith(":") and "\n" not in found, (reader, found)
        assert ("org/m" if "hub" in reader else url) in found, (reader, found)


async def test_certificate_error_after_a_redirect_names_that_host(pki, tls, serve):
    """A hub redirects large files: the message must name the host whose certificate is wrong."""
    url = await tls(context(pki / "other", "unknown"))

    async def moved(request):
        return web.Response(status=302, headers={"Location": f"{url}/secret?signature=s3cr3t", "ETag": '"a"'})

    origin = await serve(moved, context(pki, "good"))
    for message in await ask([(reader, origin) for reader in ("http", "hub")], SSL_CERT_FILE=str(pki / "ca.crt")):
        assert f"no response after a redirect to {url}" in message and "CERTIFICATE_VERIFY_FAILED" in message
        assert "s3cr3t" not in message


@pytest.mark.parametrize("form", ["http://%s@%s", "https://%s@%s", "%s@%s"], ids=["plain", "TLS", "no scheme"])
async def test_every_reader_uses_the_proxy_and_no_proxy(pki, tls, form):
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


@pytest.mark.parametrize("refuses", [True, False, None], ids=["403", "407", "unreachable"])
async def test_proxy_error_contains_no_password(refuses):
    proxy = FakeProxy("user:other", bool(refuses))
    port = await proxy.start()
    if refuses is None:
        await proxy.close()
    environment = {"HTTPS_PROXY": f"http://user:passw0rd@{HOST}:{port}"}
    for message in await ask([(reader, "https://files.example") for reader in READERS], **environment):
        assert message.startswith(":") and "passw0rd" not in message
        if refuses is not None:
            assert "the proxy" in message
            assert "s3://" in message or ("403" if refuses else "407") in message
    if refuses is not None:
        await proxy.close()
