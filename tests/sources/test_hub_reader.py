# SPDX-License-Identifier: Apache-2.0
"""The hub reader, below the adapter fetcher and a fake hub."""

import random

import pytest
from support.fake_sources import FakeHttpServer, FakeHub
from support.fetching import ADAPTER_FILES, WEIGHTS, fetch, files_under, folder_content, make_fetcher

from quire_spec.documents.adapter_digest import WEIGHTS_FILE
from quire_spec.documents.sources import HuggingFaceSource, SecretRef, Source
from quire_spec.errors import InvalidArgument, NotFound, Unavailable

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
async def hub(tmp_path, serve):
    files = FakeHttpServer(files_under())
    # Another host name than the hub's: tokens must not go there.
    cdn = (await serve(files.handle)).replace("127.0.0.1", "localhost")
    hub = FakeHub(files, "org/sql-lora", COMMIT, "hf_s3cr3t", cdn)
    secret = tmp_path / "secrets/hf"
    secret.mkdir(parents=True)
    (secret / "token").write_text("hf_s3cr3t\n")
    hub.options = {"hub_endpoint": await serve(hub.handle), "secrets_dir": tmp_path / "secrets"}
    return hub


async def test_hub(tmp_path, hub):
    by_branch = Source(huggingFace=HuggingFaceSource("org/sql-lora", tokenSecretRef=SecretRef("hf")))
    by_commit = Source(huggingFace=HuggingFaceSource("org/sql-lora", COMMIT, SecretRef("hf", "token")))
    async with make_fetcher(tmp_path, **hub.options) as f:
        fetched = await f.fetch(by_branch)
        assert folder_content(fetched) == ADAPTER_FILES
        assert await f.fetch(by_commit) == fetched
        asked = len(hub.requests)
        assert await f.fetch(by_commit) == fetched
        assert len(hub.requests) == asked, "a commit never changes"
        assert await f.fetch(by_branch) == fetched
        assert {r.method for r in hub.requests[asked:]} == {"HEAD"}
    assert all("Authorization" not in r.headers for r in hub.http_server.requests), "the token left the hub"


async def test_hub_resumes_and_checks_the_hubs_sha256(tmp_path, hub, serve):
    hub.http_server.cut_after_bytes = [2**20]
    source = Source(huggingFace=HuggingFaceSource("org/sql-lora", tokenSecretRef=SecretRef("hf")))
    assert await fetch(tmp_path, source, **hub.options) == ADAPTER_FILES
    assert hub.http_server.ranges()[1].startswith("bytes=")
    hub.commit = "f" * 40
    lied = FakeHttpServer({f"/{WEIGHTS_FILE}": random.Random(2).randbytes(len(WEIGHTS))})
    hub.cdn = (await serve(lied.handle)).replace("127.0.0.1", "localhost")
    with pytest.raises(InvalidArgument, match="sha256 is"):
        await fetch(tmp_path, source, **hub.options)


async def test_hub_errors(tmp_path, hub):
    def source(repo="org/sql-lora", revision=None, secret=None):
        return Source(huggingFace=HuggingFaceSource(repo, revision, secret))

    mine = SecretRef("hf")
    async with make_fetcher(tmp_path, **hub.options) as f:
        with pytest.raises(Unavailable, match="private and the source's token"):
            await f.fetch(source())
        with pytest.raises(Unavailable, match="no such repository"):
            await f.fetch(source("org/other", None, mine))
        with pytest.raises(Unavailable, match="has no key 'other'"):
            await f.fetch(source(secret=SecretRef("hf", "other")))
        with pytest.raises(NotFound, match="revision"):
            await f.fetch(source("org/sql-lora", "v9", mine))
        with pytest.raises(InvalidArgument, match="a b"):
            await f.fetch(source("a b", None, mine))
        del hub.http_server.files[f"/{WEIGHTS_FILE}"]
        with pytest.raises(NotFound, match=f"{WEIGHTS_FILE}.*safetensors"):
            await f.fetch(source("org/sql-lora", None, mine))


async def test_an_unusable_proxy_is_reported_without_its_password(tmp_path, hub, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "socks5://user:passw0rd@127.0.0.1:9")
    source = Source(huggingFace=HuggingFaceSource("org/sql-lora", tokenSecretRef=SecretRef("hf")))
    with pytest.raises(Unavailable, match="hub repository 'org/sql-lora'") as caught:
        await fetch(tmp_path, source, **hub.options)
    assert "passw0rd" not in str(caught.value)
