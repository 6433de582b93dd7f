# SPDX-License-Identifier: Apache-2.0
"""The HTTP reader and client, below the adapter fetcher and a real HTTP server."""

import asyncio
import hashlib
import json
import os
import random
import time
from datetime import UTC, datetime

import pytest
from aiohttp import web as aio
from aiohttp.test_utils import TestServer
from support.fetching import ADAPTER_FILES, WEIGHTS, fetch, folder_content, make_fetcher

from quire_sources.http.errors import parse_retry_after
from quire_spec.documents.adapter_digest import CHAT_TEMPLATE_FILE, CONFIG_FILE, OPTIONAL_FILES, WEIGHTS_FILE
from quire_spec.documents.sources import HttpSource, HuggingFaceSource, S3Source, SecretRef, Source
from quire_spec.errors import AccessDenied, InvalidArgument, NotFound, Unavailable


async def test_http(tmp_path, web):
    async with make_fetcher(tmp_path) as f:
        fetched = await f.fetch(Source(http=HttpSource(web.url + "/", hashlib.sha256(WEIGHTS).hexdigest())))
        assert folder_content(fetched) == ADAPTER_FILES
        assert web.paths() == [f"/loras/sql/{name}" for name in (*ADAPTER_FILES, *OPTIONAL_FILES)]
        assert await f.fetch(Source(http=HttpSource(web.url))) == fetched
        assert len(web.paths()) == 14, "another description of the source"
        assert await f.fetch(Source(http=HttpSource(web.url))) == fetched
        assert len(web.paths()) == 14, "unchanged: HEAD only"
        web.files["/loras/sql/" + CONFIG_FILE] = b'{"r": 16}'
        assert (await f.fetch(Source(http=HttpSource(web.url)))).digest != fetched.digest


@pytest.mark.parametrize("name", OPTIONAL_FILES)
@pytest.mark.parametrize("missing_status", [404, 403])
async def test_an_optional_file_is_read_if_it_exists(tmp_path, web, serve, missing_status, name):
    """Without the right to list files, S3 answers 403 for a file that does not exist."""
    path = f"/loras/sql/{name}"

    async def handle(request):
        is_missing = request.path not in web.files
        return aio.Response(status=missing_status) if is_missing else await web.handle(request)

    source, digests = Source(http=HttpSource(f"{await serve(handle)}/loras/sql")), []
    async with make_fetcher(tmp_path) as f:
        for template in (None, b"{{ messages }}", b"{{ other }}", None):
            web.files.pop(path, None)
            web.files |= {} if template is None else {path: template}
            for _ in range(2):  # downloaded, then unchanged
                fetched = await f.fetch(source)
                expected = ADAPTER_FILES | ({} if template is None else {name: template})
                assert folder_content(fetched) == expected
                assert (fetched.chat_template is None) == (template is None or name != CHAT_TEMPLATE_FILE)
            digests.append(fetched.digest)
    assert len(set(digests)) == 3 and digests[0] == digests[3]


async def test_http_resumes_after_cut_connections(tmp_path, web):
    web.cut_after_bytes = [10**9, 2**20, 5, 2**20]
    assert await fetch(tmp_path, Source(http=HttpSource(web.url))) == ADAPTER_FILES
    starts = [int(r.removeprefix("bytes=").removesuffix("-")) for r in web.ranges()[2:-5]]
    assert len(starts) == 3
    assert 0 < starts[0] <= 2**20 and starts == sorted(starts)


@pytest.mark.parametrize("conditions", [True, False], ids=["If-Range", "Range alone"])
async def test_versions_are_never_mixed(tmp_path, web, conditions):
    """A server without If-Range sends the rest of the new file, which must not be appended to the old one."""
    changed = random.Random(2).randbytes(len(WEIGHTS))
    web.honor_conditions, web.cut_after_bytes, web.files_after_cuts = (
        conditions,
        [10**9, 2**20],
        {"/loras/sql/" + WEIGHTS_FILE: changed},
    )
    assert (await fetch(tmp_path, Source(http=HttpSource(web.url))))[WEIGHTS_FILE] == changed
    assert any(web.ranges()[2:]), "the download tried to resume"


async def test_does_not_resume_without_versions(tmp_path, web):
    web.send_etags = False
    web.cut_after_bytes = [10**9, 2**20]
    assert await fetch(tmp_path, Source(http=HttpSource(web.url))) == ADAPTER_FILES
    assert web.ranges() == [""] * 8


async def test_rejects_and_discards_a_wrong_sha256(tmp_path, web):
    wrong = "sha256:" + "0" * 64
    async with make_fetcher(tmp_path) as f:
        with pytest.raises(InvalidArgument, match=hashlib.sha256(WEIGHTS).hexdigest()):
            await f.fetch(Source(http=HttpSource(web.url, wrong)))
        with pytest.raises(InvalidArgument, match="64 hexadecimal"):
            await f.fetch(Source(http=HttpSource(web.url, "abc")))
    assert os.listdir(tmp_path / "cache/adapters") == []


async def test_http_sizes_are_limited_before_and_during_reading(tmp_path, web):
    async with make_fetcher(tmp_path, max_weights_bytes=2**20) as f:
        with pytest.raises(InvalidArgument, match=str(len(WEIGHTS))):
            await f.fetch(Source(http=HttpSource(web.url)))
        web.chunked = True
        with pytest.raises(InvalidArgument, match="bytes, but the limit is 1048576"):
            await f.fetch(Source(http=HttpSource(web.url)))
    kept = [p for p in (tmp_path / "cache/partial").rglob("*") if p.name == WEIGHTS_FILE]
    assert [p.stat().st_size for p in kept] == []


async def test_http_404_names_the_url_and_no_secret(tmp_path, web):
    url = web.url.replace("http://", "http://user:passw0rd@") + "/absent?signature=s3cr3t"
    with pytest.raises(NotFound) as caught:
        await fetch(tmp_path, Source(http=HttpSource(url)))
    assert f"/loras/sql/absent/{CONFIG_FILE}: HTTP 404" in str(caught.value)
    assert "s3cr3t" not in str(caught.value) and "passw0rd" not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://a/b", "file:///etc/passwd", "no url", "http://"])
async def test_rejects_invalid_urls(tmp_path, url):
    with pytest.raises(InvalidArgument, match=r"http\(s\)://host/folder"):
        await fetch(tmp_path, Source(http=HttpSource(url)))


async def test_cache_is_used_while_the_source_is_down(tmp_path, web, caplog):
    source = Source(http=HttpSource(web.url))
    async with make_fetcher(tmp_path) as f:
        fetched = await f.fetch(source)
        web.is_down = True
        assert await f.fetch(source) == fetched
        assert "cannot be reached" in caplog.text
        with pytest.raises(Unavailable, match="503"):
            await f.fetch(Source(http=HttpSource(web.url + "/other")))


async def test_server_without_progress_fails_after_three_attempts(tmp_path, web):
    web.cut_after_bytes = [10**9, *[1] * 100]
    with pytest.raises(Unavailable, match="was cut"):
        await fetch(tmp_path, Source(http=HttpSource(web.url)))
    assert len(web.paths()) == 4


async def fetch_error(tmp_path, url, kind=Unavailable):
    """Return the error of a fetch from `url` with a signature in its query."""
    async with make_fetcher(tmp_path) as f, asyncio.timeout(20):
        with pytest.raises(kind) as caught:
            await f.fetch(Source(http=HttpSource(f"{url}/a?signature=s3cr3t")))
    return str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http:///x?signature=s3cr3t\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://a..b/x?signature=s3cr3t\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://1.2.3/x?signature=s3cr3t\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/x?signature=s3cr3t\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_errors_and_logs_contain_no_url_signature(tmp_path, raw, caplog, answer):
    caplog.set_level("INFO")
    _, url = await raw(answer)
    message = await fetch_error(tmp_path, url)
    assert message.startswith(f"{url}/a/{CONFIG_FILE}: ")
    assert "resumes after an error" in caplog.text
    assert "s3cr3t" not in message + caplog.text


async def test_errors_contain_no_proxy_password(tmp_path, raw, monkeypatch):
    _, url = await raw(b"HTTP/1.1 407 Who\r\nContent-Length: 0\r\n\r\n")
    monkeypatch.setenv("HTTPS_PROXY", url.replace("//", "//user:passw0rd@"))
    message = await fetch_error(tmp_path, "https://nowhere.invalid")
    assert "407" in message and "passw0rd" not in message
    monkeypatch.setenv("HTTPS_PROXY", "user:passw0rd@x y")
    assert "passw0rd" not in await fetch_error(tmp_path, "https://nowhere.invalid")


async def test_rejects_a_body_that_may_have_been_cut(tmp_path, raw):
    """Without a length or chunks, a cut cannot be distinguished from the end of the file."""
    _, url = await raw(b"HTTP/1.1 200 OK\r\n\r\n{}")
    assert "no Content-Length and is not chunked" in await fetch_error(tmp_path, url)


async def test_server_with_416_for_every_request_fails(tmp_path, raw):
    server, url = await raw(b"HTTP/1.1 416 No\r\nContent-Length: 0\r\n\r\n")
    assert "HTTP 416" in await fetch_error(tmp_path, url)
    assert len(server.requests) == 3


async def test_trickling_bytes_time_out(tmp_path, raw, monkeypatch):
    monkeypatch.setattr("quire_server.downloads.resumable_download.NO_ANSWER_TIMEOUT_S", 0.3)
    _, url = await raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + b" " * 10_000, pause_s=0.01)
    assert "bytes arrived in 0.3 s" in await fetch_error(tmp_path, url)


async def test_failed_version_query_keeps_the_downloaded_bytes(tmp_path, web, serve):
    handle, failed = web.handle, []

    async def once_down(request):
        if request.method == "HEAD" and not failed:
            failed.append(request.path)
            return aio.Response(status=503)
        return await handle(request)

    url = await serve(once_down)
    assert await fetch(tmp_path, Source(http=HttpSource(f"{url}/loras/sql"))) == ADAPTER_FILES
    assert len(web.paths()) == 7 and failed


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120),
        ("9" * 5000, 86400),
        ("Thu, 01 Jan 2026 00:02:00 GMT", 120),
        ("Thu, 01 Jan 2026 00:02:00 -0000", 120),
        ("Thu, 01 Jan 2015 00:00:00 GMT", 0),
        ("Fri, 31 Dec 9999 23:59:59 -2359", 86400),
        *[(value, None) for value in (None, "", "-1", "1.5", "\u00b2", "soon")],
    ],
)
def test_parse_retry_after(value, seconds):
    assert parse_retry_after(value, datetime(2026, 1, 1, tzinfo=UTC)) == seconds


async def test_honors_a_short_retry_after(tmp_path, web, serve):
    asked = []

    async def busy(request):
        asked.append(time.monotonic())
        if len(asked) == 1:
            return aio.Response(status=429, headers={"Retry-After": "1"})
        return await web.handle(request)

    url = await serve(busy)
    assert await fetch(tmp_path, Source(http=HttpSource(f"{url}/loras/sql"))) == ADAPTER_FILES
    assert asked[1] - asked[0] >= 1


async def test_long_retry_after_is_left_to_the_caller(tmp_path, serve):
    """The adapter manager retries later; other adapters are queued behind this download."""

    async def busy(request):
        refused.append(request)
        return aio.Response(status=503, headers={"Retry-After": "100"})

    refused = []
    url = await serve(busy)
    async with make_fetcher(tmp_path, hub_endpoint=url) as f:
        of_s3, of_hub = S3Source("s3://models/a", url), HuggingFaceSource("org/sql-lora")
        for source in (Source(http=HttpSource(url)), Source(huggingFace=of_hub), Source(s3=of_s3)):
            refused.clear()
            with pytest.raises(Unavailable, match="HTTP 503; the server requests a delay of 100 s") as caught:
                await f.fetch(source)
            assert caught.value.retry_after_s == 100
            assert len([request for request in refused if "/api/" not in request.path]) == 1


async def test_cookies_are_not_stored(tmp_path, web):
    """A cookie of a source with a secret would grant access to another source of the same host."""

    async def prepared(request, response):
        response.headers["Set-Cookie"] = "session=s3cr3t; Path=/"

    app = aio.Application()
    app.router.add_route("*", "/{path:.*}", web.handle)
    app.on_response_prepare.append(prepared)
    server = TestServer(app)
    await server.start_server()
    # By name: cookie jars ignore the cookies of IP addresses.
    url = f"http://localhost:{server.port}/loras/sql"
    assert await fetch(tmp_path, Source(http=HttpSource(url))) == ADAPTER_FILES
    assert [r for r in web.requests if "Cookie" in r.headers] == []
    await server.close()


@pytest.mark.parametrize("value", ["s3cr3t\ns3cr3t", "s3cr3t\x00", "s3cr3t\u20ac"])
@pytest.mark.parametrize("bundled", [True, False])
async def test_invalid_secret_is_named_and_not_quoted(tmp_path, web, value, bundled):
    keys = {"token": value, "AWS_ACCESS_KEY_ID": value, "AWS_SECRET_ACCESS_KEY": value}
    secret = tmp_path / "secrets/mine"
    secret.parent.mkdir()
    if bundled:
        secret.write_text(json.dumps(keys))
    else:
        secret.mkdir()
        for key, text in keys.items():
            (secret / key).write_text(text)
    mine = SecretRef("mine")
    async with make_fetcher(tmp_path, secrets_dir=tmp_path / "secrets", hub_endpoint=web.url) as f:
        for source in (
            Source(http=HttpSource(web.url, headersSecretRef=mine)),
            Source(huggingFace=HuggingFaceSource("org/sql-lora", None, mine)),
            Source(s3=S3Source("s3://models/a", web.url, None, mine)),
        ):
            with pytest.raises(
                AccessDenied, match=r"secret 'mine': the value of key '\w+(-\w+)?' contains a line break"
            ) as caught:
                await f.fetch(source)
            assert "s3cr3t" not in str(caught.value)
    assert web.requests == []


async def test_rejects_a_user_in_the_url_beside_a_secret_header(tmp_path, web):
    (tmp_path / "secrets/mine").mkdir(parents=True)
    (tmp_path / "secrets/mine/Authorization").write_text("Bearer s3cr3t")
    source = HttpSource(web.url.replace("//", "//user:passw0rd@"), headersSecretRef=SecretRef("mine"))
    with pytest.raises(Unavailable, match="AUTHORIZATION") as caught:
        await fetch(tmp_path, Source(http=source), secrets_dir=tmp_path / "secrets")
    assert "s3cr3t" not in str(caught.value) and "passw0rd" not in str(caught.value)


async def test_secret_headers_go_to_the_first_origin_only(tmp_path, web, serve):
    seen = []

    async def redirect(request):
        seen.append(request.headers.get("X-Key"))
        return aio.Response(status=302, headers={"Location": f"{web.url}/{request.path.rsplit('/', 1)[1]}"})

    front_url = await serve(redirect)
    secret = tmp_path / "secrets/mine"
    secret.mkdir(parents=True)
    (secret / "X-Key").write_text("s3cr3t\n")
    source = HttpSource(f"{front_url}/a", headersSecretRef=SecretRef("mine"))
    async with make_fetcher(tmp_path, secrets_dir=tmp_path / "secrets") as f:
        assert folder_content(await f.fetch(Source(http=source))) == ADAPTER_FILES
        with pytest.raises(InvalidArgument, match="not a name of a Secret"):
            await f.fetch(Source(http=HttpSource(web.url, headersSecretRef=SecretRef("../mine"))))
        with pytest.raises(Unavailable, match="create the Secret"):
            await f.fetch(Source(http=HttpSource(web.url, headersSecretRef=SecretRef("other"))))
    # Each file is read once, and checked for a change once; the five optional files do not exist.
    assert seen == ["s3cr3t"] * 9
    assert all("X-Key" not in r.headers for r in web.requests)


async def test_credentials_of_netrc_are_not_sent(tmp_path, web, monkeypatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password passw0rd\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert await fetch(tmp_path, Source(http=HttpSource(web.url))) == ADAPTER_FILES
    assert all("Authorization" not in request.headers for request in web.requests)
