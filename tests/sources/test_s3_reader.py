# SPDX-License-Identifier: Apache-2.0
"""The S3 reader, below the adapter fetcher and a fake S3 server; obstore is real."""

import random
from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import web as aio
from support.fake_sources import FakeHttpServer, FakeS3
from support.fetching import ADAPTER_FILES, WEIGHTS, fetch, files_under, folder_content, make_fetcher

from quire_spec.documents.adapter_digest import CONFIG_FILE, WEIGHTS_FILE
from quire_spec.documents.sources import S3Source, SecretRef, Source
from quire_spec.errors import AccessDenied, ConfigError, InvalidArgument, NotFound, Unavailable


@pytest.fixture
async def bucket(tmp_path, serve):
    bucket = FakeS3(FakeHttpServer(files_under("/models/loras/sql")), "AKIA1", "s3cr3t")
    secret = tmp_path / "secrets/s3"
    secret.mkdir(parents=True)
    (secret / "AWS_ACCESS_KEY_ID").write_text("AKIA1")
    (secret / "AWS_SECRET_ACCESS_KEY").write_text("s3cr3t\n")
    bucket.endpoint = await serve(bucket.handle)
    bucket.options = {"secrets_dir": tmp_path / "secrets"}
    return bucket


def s3(bucket, uri="s3://models/loras/sql", secret="s3"):
    return Source(s3=S3Source(uri, bucket.endpoint, "eu-central-1", SecretRef(secret) if secret else None))


async def test_s3(tmp_path, bucket):
    async with make_fetcher(tmp_path, **bucket.options) as f:
        fetched = await f.fetch(s3(bucket))
        assert folder_content(fetched) == ADAPTER_FILES
        assert await f.fetch(s3(bucket)) == fetched
        assert len(bucket.http_server.paths()) == 7, "unchanged: HEAD only"


async def test_s3_resumes_at_the_end_of_a_complete_file(tmp_path, bucket, monkeypatch):
    """A range cannot begin at a file's end: config.json was complete when an earlier process ended."""
    monkeypatch.setattr("quire_server.downloads.resumable_download._MAX_ATTEMPTS", 0)
    bucket.http_server.cut_after_bytes = [10**9, 2**20]
    with pytest.raises(Unavailable):
        await fetch(tmp_path, s3(bucket), **bucket.options)
    monkeypatch.setattr("quire_server.downloads.resumable_download._MAX_ATTEMPTS", 1)
    assert await fetch(tmp_path, s3(bucket), **bucket.options) == ADAPTER_FILES


async def test_s3_never_mixes_two_versions(tmp_path, bucket):
    changed = random.Random(2).randbytes(len(WEIGHTS))
    bucket.http_server.honor_conditions, bucket.http_server.cut_after_bytes = False, [10**9, 2**20]
    bucket.http_server.files_after_cuts = {f"/models/loras/sql/{WEIGHTS_FILE}": changed}
    assert (await fetch(tmp_path, s3(bucket), **bucket.options))[WEIGHTS_FILE] == changed
    assert any(bucket.http_server.ranges()[2:]), "the download tried to resume"


async def test_public_bucket_needs_no_secret(tmp_path, bucket):
    bucket.key_id = None
    assert await fetch(tmp_path, s3(bucket, secret=None)) == ADAPTER_FILES
    assert all("Authorization" not in r.headers and not r.query for r in bucket.http_server.requests)


async def test_platform_identity_is_requested_once(tmp_path, bucket, monkeypatch, serve):
    asked = []

    async def identity(request):
        asked.append(request.headers["Authorization"])
        until = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
        keys = {"AccessKeyId": "AKIA1", "SecretAccessKey": "s3cr3t", "Token": "t0ken", "Expiration": until}
        return aio.json_response(keys)

    platform_url = await serve(identity)
    (tmp_path / "pod").write_text("me")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{platform_url}/")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "pod"))
    assert await fetch(tmp_path, s3(bucket, secret=None)) == ADAPTER_FILES
    assert {r.query["X-Amz-Security-Token"] for r in bucket.http_server.requests} == {"t0ken"}
    assert asked == ["me"]


async def test_no_secret_follows_a_redirect_to_another_host(tmp_path, bucket, web, serve):
    """Signature and session token are sent only to the bucket's own host."""
    (tmp_path / "secrets/s3/AWS_SESSION_TOKEN").write_text("t0ken")
    asked = []

    async def elsewhere(request):
        asked.append(request.query.get("X-Amz-Security-Token"))
        raise aio.HTTPTemporaryRedirect(f"{web.url}/{request.path.rsplit('/', 1)[1]}")

    endpoint = (await serve(elsewhere)).replace("127.0.0.1", "localhost")
    source = S3Source("s3://models/loras/sql", endpoint, None, SecretRef("s3"))
    assert await fetch(tmp_path, Source(s3=source), **bucket.options) == ADAPTER_FILES
    assert set(asked) == {"t0ken"}
    assert len(web.requests) == 9
    for request in web.requests:
        assert not request.query and "t0ken" not in str(request.headers) and "AKIA1" not in str(request.headers)


async def test_error_for_a_bucket_in_another_region(tmp_path, raw):
    body = b"<Error><Code>PermanentRedirect</Code></Error>"
    _, url = await raw(b"HTTP/1.1 301 Moved\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    with pytest.raises(Unavailable, match="HTTP 301 PermanentRedirect; the bucket is in another region; correct"):
        await fetch(tmp_path, Source(s3=S3Source("s3://models/loras/sql", url)))


async def test_s3_errors(tmp_path, bucket):
    async with make_fetcher(tmp_path, **bucket.options) as f:
        with pytest.raises(NotFound, match=rf"s3://models/absent/{CONFIG_FILE}"):
            await f.fetch(s3(bucket, "s3://models/absent"))
        with pytest.raises(Unavailable, match="HTTP 403 AccessDenied; the source's secret is missing"):
            await f.fetch(s3(bucket, secret=None))
        with pytest.raises(InvalidArgument, match="s3://bucket/prefix"):
            await f.fetch(s3(bucket, "https://models/loras"))
        with pytest.raises(InvalidArgument, match="s3://bucket/prefix") as caught:
            await f.fetch(s3(bucket, "s3://AKIA1:s3cr3t@models/a"))
        assert "s3cr3t" not in str(caught.value)
        with pytest.raises(ConfigError, match="the endpoint must be http"):
            await f.fetch(Source(s3=S3Source("s3://models/a", "http://[::")))
    with pytest.raises(InvalidArgument, match="maxAdapterBytes"):
        await fetch(tmp_path, s3(bucket), **bucket.options, max_weights_bytes=2**20)


async def test_s3_error_contains_the_code_but_not_the_body(tmp_path, bucket, raw):
    body = b"<Error><Code>ExpiredToken</Code><Token-0>s3cr3t</Token-0></Error>"
    _, url = await raw(b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    async with make_fetcher(tmp_path, **bucket.options) as f:
        with pytest.raises(
            AccessDenied, match="HTTP 400 ExpiredToken; the source's secret is wrong or expired"
        ) as caught:
            await f.fetch(Source(s3=S3Source("s3://models/loras/sql", url, None, SecretRef("s3"))))
        assert "s3cr3t" not in str(caught.value)
        with pytest.raises(Unavailable, match=r"at http://127\.0\.0\.1:9: .*Connect call failed"):
            await f.fetch(Source(s3=S3Source("s3://models/loras/sql", "http://127.0.0.1:9")))


async def test_rejects_compressed_objects(tmp_path, raw):
    _, url = await raw(b"HTTP/1.1 200 OK\r\nETag: x\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}")
    with pytest.raises(Unavailable, match="has a Content-Encoding; store and serve the files"):
        await fetch(tmp_path, Source(s3=S3Source("s3://models/loras/sql", url)))


async def test_obstore_panic_is_an_error_of_one_source(tmp_path, bucket, monkeypatch):
    class Panic(BaseException):
        """Like pyo3's PanicException, which is not an Exception."""

    def panic(*_):
        raise Panic("called unwrap on an Err value")

    monkeypatch.setattr("obstore.sign", panic)
    with pytest.raises(ConfigError, match="obstore failed: called unwrap on an Err value; correct the source"):
        await fetch(tmp_path, s3(bucket), **bucket.options)
