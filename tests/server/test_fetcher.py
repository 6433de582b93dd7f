# SPDX-License-Identifier: Apache-2.0
"""The fetcher against real servers of each protocol: what arrives, what is refused, what a cut connection costs."""

import asyncio
import hashlib
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from support.sources import Bucket, Files, Hub, serve

from quire_server.cache import Cache
from quire_server.fetcher import Fetcher
from quire_server.sources import SourceOptions
from quire_server.transfer import Transfer
from quire_spec.catalogue import HttpSource, HuggingFaceSource, PvcSource, S3Source, SecretRef, Source
from quire_spec.digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from quire_spec.errors import InvalidArgument, NotFound, Unavailable

CONFIG = b'{"r": 8}'
WEIGHTS = os.urandom(3 * 2**20)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _no_ambient_identity(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "HF_TOKEN", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch):
    monkeypatch.setattr("quire_server.transfer._PAUSE_S", 0.01)


def folder_with(folder: Path, config: bytes = CONFIG, weights: bytes = WEIGHTS) -> Path:
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_bytes(config)
    (folder / WEIGHTS_FILE).write_bytes(weights)
    return folder


def fetcher(tmp_path: Path, **options) -> Fetcher:
    return Fetcher(Cache(tmp_path / "cache"), SourceOptions(**options))


def content(fetched):
    return {p.name: p.read_bytes() for p in fetched.folder.iterdir()}


BOTH = {CONFIG_FILE: CONFIG, WEIGHTS_FILE: WEIGHTS}


def at(prefix: str = "") -> dict[str, bytes]:
    return {f"{prefix}/{name}": data for name, data in BOTH.items()}


# Folders


async def test_what_is_being_hashed_is_not_written_to_by_the_next_fetch(tmp_path, monkeypatch):
    """A fetch that nobody wants any more is cancelled; the thread that makes an adapter of its files is not."""
    begun, go_on = threading.Event(), threading.Event()

    def slowly(folder):
        digest = adapter_digest(folder)
        if not begun.is_set():
            begun.set()
            go_on.wait(10)
        return digest

    monkeypatch.setattr("quire_server.cache.adapter_digest", slowly)
    folder = folder_with(tmp_path / "a")
    async with fetcher(tmp_path, allow_paths=True) as f:
        first = asyncio.create_task(f.fetch(Source(path=str(folder))))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first])
        (folder / CONFIG_FILE).write_bytes(b'{"r": 16}')
        second = asyncio.create_task(f.fetch(Source(path=str(folder))))
        partial = next((tmp_path / "cache/partial").glob("*/"))
        await asyncio.sleep(0.3)
        assert (partial / CONFIG_FILE).read_bytes() == CONFIG
        go_on.set()
        assert content(await second)[CONFIG_FILE] == b'{"r": 16}'
    for made in (tmp_path / "cache/adapters").iterdir():
        assert adapter_digest(made) == made.name


async def test_a_folder_is_copied_so_that_later_changes_cannot_reach_what_was_hashed(tmp_path):
    folder = folder_with(tmp_path / "a")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    async with fetcher(tmp_path, allow_paths=True) as f:
        first = await f.fetch(Source(path=str(folder)))
        assert content(first) == BOTH
        assert first.digest == adapter_digest(folder)
        (folder / CONFIG_FILE).write_bytes(b'{"r": 16}')
        second = await f.fetch(Source(path=str(folder)))
    assert second.digest != first.digest
    assert content(first) == BOTH
    assert content(second)[CONFIG_FILE] == b'{"r": 16}'


async def test_equal_content_from_two_places_is_one_adapter(tmp_path):
    one, two = folder_with(tmp_path / "a"), folder_with(tmp_path / "b")
    async with fetcher(tmp_path, allow_paths=True) as f:
        fetched = await asyncio.gather(*(f.fetch(Source(path=str(p))) for p in (one, two, one, two)))
    assert len({x.digest for x in fetched}) == 1
    assert os.listdir(tmp_path / "cache/adapters") == [fetched[0].digest]
    assert [p.name for p in (tmp_path / "cache/partial").iterdir() if p.suffix != ".lock"] == []


async def test_path_sources_must_be_allowed(tmp_path):
    folder = folder_with(tmp_path / "a")
    async with fetcher(tmp_path) as f:
        with pytest.raises(InvalidArgument, match="quire serve"):
            await f.fetch(Source(path=str(folder)))


@pytest.mark.parametrize("path", ["relative/a", "/tmp/../etc"])
async def test_path_sources_are_absolute_without_dots(tmp_path, path):
    async with fetcher(tmp_path, allow_paths=True) as f:
        with pytest.raises(InvalidArgument, match="absolute"):
            await f.fetch(Source(path=path))


async def test_a_claim_is_read_below_its_folder_only(tmp_path):
    folder_with(tmp_path / "claim/loras/a")
    outside = folder_with(tmp_path / "outside")
    (tmp_path / "claim/link").symlink_to(outside)
    (tmp_path / "claim/inner").symlink_to("loras/a")
    async with fetcher(tmp_path, pvcs={"loras": tmp_path / "claim"}) as f:
        assert content(await f.fetch(Source(pvc=PvcSource("loras", "loras/a")))) == BOTH
        assert content(await f.fetch(Source(pvc=PvcSource("loras", "inner")))) == BOTH
        with pytest.raises(InvalidArgument, match="leads out of"):
            await f.fetch(Source(pvc=PvcSource("loras", "link")))
        for path in ("../outside", "/etc", "loras/../../outside"):
            with pytest.raises(InvalidArgument, match=r"no '\.\.'"):
                await f.fetch(Source(pvc=PvcSource("loras", path)))
        with pytest.raises(InvalidArgument, match="mounted: loras"):
            await f.fetch(Source(pvc=PvcSource("other")))


async def test_a_file_that_links_out_of_its_folder_is_refused(tmp_path):
    folder = folder_with(tmp_path / "a")
    (folder / WEIGHTS_FILE).unlink()
    (folder / WEIGHTS_FILE).symlink_to("/etc/hostname")
    async with fetcher(tmp_path, allow_paths=True) as f:
        with pytest.raises(InvalidArgument, match="leads out of"):
            await f.fetch(Source(path=str(folder)))


@pytest.mark.parametrize("in_place", [True, False], ids=["written over", "renamed"])
async def test_a_folder_that_changes_while_it_is_read_is_read_again(tmp_path, monkeypatch, in_place):
    """The config of one adapter and the weights of another may fit by form, and be an adapter that nobody made."""
    folder = folder_with(tmp_path / "a")
    new = {CONFIG_FILE: b'{"r": 8, "lora_alpha": 1}', WEIGHTS_FILE: WEIGHTS[::-1]}
    bring, num_changes = Transfer.bring, iter([1] if in_place else [1, 1])

    async def changed_between(self, place, partial, name):
        await bring(self, place, partial, name)
        if name == CONFIG_FILE and next(num_changes, None):
            for file, data in new.items():
                target = folder / file if in_place else folder / "new"
                target.write_bytes(data)
                target.rename(folder / file)

    monkeypatch.setattr(Transfer, "bring", changed_between)
    async with fetcher(tmp_path, allow_paths=True) as f:
        assert content(await f.fetch(Source(path=str(folder)))) == new


async def test_a_folder_that_never_rests_is_refused_with_what_to_do(tmp_path, monkeypatch):
    folder, bring = folder_with(tmp_path / "a"), Transfer.bring

    async def changed_after(self, place, partial, name):
        await bring(self, place, partial, name)
        (folder / name).write_bytes((folder / name).read_bytes() + b" ")

    monkeypatch.setattr(Transfer, "bring", changed_after)
    async with fetcher(tmp_path, allow_paths=True) as f:
        with pytest.raises(Unavailable, match="it changed while it was read, 3 times; write a new adapter beside"):
            await f.fetch(Source(path=str(folder)))
    assert not list((tmp_path / "cache/adapters").iterdir())


async def test_a_fifo_is_refused_and_hangs_nobody(tmp_path):
    folder = folder_with(tmp_path / "a")
    (folder / WEIGHTS_FILE).unlink()
    os.mkfifo(folder / WEIGHTS_FILE)
    async with fetcher(tmp_path, allow_paths=True) as f, asyncio.timeout(5):
        with pytest.raises(InvalidArgument, match="not a regular file"):
            await f.fetch(Source(path=str(folder)))


async def test_missing_files_and_folders_are_named(tmp_path):
    folder = folder_with(tmp_path / "a")
    (folder / WEIGHTS_FILE).unlink()
    async with fetcher(tmp_path, allow_paths=True) as f:
        with pytest.raises(NotFound, match=rf"a/{WEIGHTS_FILE}.*does not exist"):
            await f.fetch(Source(path=str(folder)))
        with pytest.raises(NotFound, match="absent"):
            await f.fetch(Source(path=str(tmp_path / "absent")))


async def test_sizes_are_capped(tmp_path):
    folder = folder_with(tmp_path / "a")
    async with fetcher(tmp_path, allow_paths=True, max_weights_bytes=len(WEIGHTS) - 1) as f:
        with pytest.raises(InvalidArgument, match="--max-adapter-bytes"):
            await f.fetch(Source(path=str(folder)))
    async with fetcher(tmp_path, allow_paths=True, max_config_bytes=4) as f:
        with pytest.raises(InvalidArgument, match=rf"{CONFIG_FILE}.*the limit is 4"):
            await f.fetch(Source(path=str(folder)))


# HTTP


@pytest.fixture
async def web():
    files = Files(at("/loras/sql"))
    server = await serve(files.handle)
    files.url = str(server.make_url("/loras/sql"))
    yield files
    await server.close()


async def test_http(tmp_path, web):
    async with fetcher(tmp_path) as f:
        fetched = await f.fetch(Source(http=HttpSource(web.url + "/", hashlib.sha256(WEIGHTS).hexdigest())))
        assert content(fetched) == BOTH
        assert web.paths() == [f"/loras/sql/{name}" for name in BOTH]
        assert await f.fetch(Source(http=HttpSource(web.url))) == fetched
        assert len(web.paths()) == 4, "another description of the source"
        assert await f.fetch(Source(http=HttpSource(web.url))) == fetched
        assert len(web.paths()) == 4, "unchanged: asked by HEAD, not read again"
        web.content["/loras/sql/" + CONFIG_FILE] = b'{"r": 16}'
        assert (await f.fetch(Source(http=HttpSource(web.url)))).digest != fetched.digest


async def test_http_resumes_after_cut_connections(tmp_path, web):
    web.cuts = [10**9, 2**20, 5, 2**20]
    async with fetcher(tmp_path) as f:
        assert content(await f.fetch(Source(http=HttpSource(web.url)))) == BOTH
    starts = [int(r.removeprefix("bytes=").removesuffix("-")) for r in web.ranges()[2:]]
    assert len(starts) == 3
    assert 0 < starts[0] <= 2**20 and starts == sorted(starts)


async def test_a_fetch_resumes_what_an_earlier_process_left(tmp_path, web, monkeypatch):
    monkeypatch.setattr("quire_server.transfer._ATTEMPTS", 0)
    web.cuts = [10**9, 2**20]
    async with fetcher(tmp_path) as f:
        with pytest.raises(Unavailable, match="was cut"):
            await f.fetch(Source(http=HttpSource(web.url)))
    async with fetcher(tmp_path) as f:
        assert content(await f.fetch(Source(http=HttpSource(web.url)))) == BOTH
    assert web.ranges()[-1].startswith("bytes=") and web.ranges()[-1] != "bytes=0-"


async def test_bytes_of_two_versions_are_never_mixed(tmp_path, web):
    changed = os.urandom(len(WEIGHTS))
    web.cuts = [10**9, 2**20]
    put = web._send

    async def change_after_the_cut(request, response, data):
        cut = len(web.cuts) == 1
        await put(request, response, data)
        if cut:
            web.content["/loras/sql/" + WEIGHTS_FILE] = changed

    web._send = change_after_the_cut
    async with fetcher(tmp_path) as f:
        assert content(await f.fetch(Source(http=HttpSource(web.url))))[WEIGHTS_FILE] == changed
    assert web.ranges()[-1] != "", "it did ask for the rest"


async def test_without_versions_nothing_is_resumed(tmp_path, web):
    web.etags = False
    web.cuts = [10**9, 2**20]
    async with fetcher(tmp_path) as f:
        assert content(await f.fetch(Source(http=HttpSource(web.url)))) == BOTH
    assert web.ranges() == ["", "", ""]


async def test_a_wrong_sha256_is_refused_and_not_kept(tmp_path, web):
    wrong = "sha256:" + "0" * 64
    async with fetcher(tmp_path) as f:
        with pytest.raises(InvalidArgument, match=hashlib.sha256(WEIGHTS).hexdigest()):
            await f.fetch(Source(http=HttpSource(web.url, wrong)))
        with pytest.raises(InvalidArgument, match="64 hexadecimal"):
            await f.fetch(Source(http=HttpSource(web.url, "abc")))
    assert os.listdir(tmp_path / "cache/adapters") == []


async def test_http_sizes_are_capped_before_and_during_reading(tmp_path, web):
    async with fetcher(tmp_path, max_weights_bytes=2**20) as f:
        with pytest.raises(InvalidArgument, match=str(len(WEIGHTS))):
            await f.fetch(Source(http=HttpSource(web.url)))
        web.chunked = True
        with pytest.raises(InvalidArgument, match="or more, the limit is 1048576"):
            await f.fetch(Source(http=HttpSource(web.url)))
    kept = [p for p in (tmp_path / "cache/partial").rglob("*") if p.name == WEIGHTS_FILE]
    assert [p.stat().st_size for p in kept] == []


async def test_http_404_names_the_url_and_no_secret(tmp_path, web):
    url = web.url.replace("http://", "http://user:passw0rd@") + "/absent?signature=s3cr3t"
    async with fetcher(tmp_path) as f:
        with pytest.raises(NotFound) as caught:
            await f.fetch(Source(http=HttpSource(url)))
    assert f"/loras/sql/absent/{CONFIG_FILE}: HTTP 404" in str(caught.value)
    assert "s3cr3t" not in str(caught.value) and "passw0rd" not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://a/b", "file:///etc/passwd", "no url", "http://"])
async def test_only_http_urls(tmp_path, url):
    async with fetcher(tmp_path) as f:
        with pytest.raises(InvalidArgument, match=r"http\(s\)://host/folder"):
            await f.fetch(Source(http=HttpSource(url)))


async def test_a_source_that_is_down_is_answered_from_the_cache(tmp_path, web, caplog):
    source = Source(http=HttpSource(web.url))
    async with fetcher(tmp_path) as f:
        fetched = await f.fetch(source)
        web.down = True
        assert await f.fetch(source) == fetched
        assert "cannot be reached" in caplog.text
        with pytest.raises(Unavailable, match="503"):
            await f.fetch(Source(http=HttpSource(web.url + "/other")))


async def test_nobody_there(tmp_path):
    async with fetcher(tmp_path) as f:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9/a"):
            await f.fetch(Source(http=HttpSource("http://127.0.0.1:9/a")))


async def test_secret_headers_go_to_the_first_origin_only(tmp_path, web):
    seen = []

    async def redirect(request):
        from aiohttp import web as aio

        seen.append(request.headers.get("X-Key"))
        return aio.Response(status=302, headers={"Location": f"{web.url}/{request.path.rsplit('/', 1)[1]}"})

    front = await serve(redirect)
    secret = tmp_path / "secrets/mine"
    secret.mkdir(parents=True)
    (secret / "X-Key").write_text("s3cr3t\n")
    source = HttpSource(str(front.make_url("/a")), headersSecretRef=SecretRef("mine"))
    async with fetcher(tmp_path, secrets_dir=tmp_path / "secrets") as f:
        assert content(await f.fetch(Source(http=source))) == BOTH
        with pytest.raises(InvalidArgument, match="not a name of a Secret"):
            await f.fetch(Source(http=HttpSource(web.url, headersSecretRef=SecretRef("../mine"))))
        with pytest.raises(Unavailable, match="mount the Secret"):
            await f.fetch(Source(http=HttpSource(web.url, headersSecretRef=SecretRef("other"))))
    # Each file once to be read, and once to see that it is still the same.
    assert seen == ["s3cr3t"] * 4
    assert all("X-Key" not in r.headers for r in web.requests)
    await front.close()


# Hub


@pytest.fixture
async def hub(tmp_path):
    files = Files(at())
    cdn = await serve(files.handle)
    hub = Hub(files, "org/sql-lora", COMMIT, "hf_s3cr3t", f"http://localhost:{cdn.port}")
    server = await serve(hub.handle)
    hub.url = str(server.make_url("/")).rstrip("/")
    secret = tmp_path / "secrets/hf"
    secret.mkdir(parents=True)
    (secret / "token").write_text("hf_s3cr3t\n")
    hub.options = {"hub_endpoint": hub.url, "secrets_dir": tmp_path / "secrets"}
    yield hub
    await server.close()
    await cdn.close()


async def test_hub(tmp_path, hub):
    by_branch = Source(huggingFace=HuggingFaceSource("org/sql-lora", tokenSecretRef=SecretRef("hf")))
    by_commit = Source(huggingFace=HuggingFaceSource("org/sql-lora", COMMIT, SecretRef("hf", "token")))
    async with fetcher(tmp_path, **hub.options) as f:
        fetched = await f.fetch(by_branch)
        assert content(fetched) == BOTH
        assert await f.fetch(by_commit) == fetched
        asked = len(hub.requests)
        assert await f.fetch(by_commit) == fetched
        assert len(hub.requests) == asked, "a commit never changes"
        assert await f.fetch(by_branch) == fetched
        assert {r.method for r in hub.requests[asked:]} == {"HEAD"}
    assert all("Authorization" not in r.headers for r in hub.files.requests), "the token left the hub"


async def test_hub_resumes_and_checks_the_hubs_sha256(tmp_path, hub):
    hub.files.cuts = [2**20]
    source = Source(huggingFace=HuggingFaceSource("org/sql-lora", tokenSecretRef=SecretRef("hf")))
    async with fetcher(tmp_path, **hub.options) as f:
        assert content(await f.fetch(source)) == BOTH
    assert hub.files.ranges()[1].startswith("bytes=")
    hub.commit = "f" * 40
    lied = Files({f"/{WEIGHTS_FILE}": os.urandom(len(WEIGHTS))})
    cdn = await serve(lied.handle)
    hub.cdn = f"http://localhost:{cdn.port}"
    async with fetcher(tmp_path, **hub.options) as f:
        with pytest.raises(InvalidArgument, match="its sha256 is"):
            await f.fetch(source)
    await cdn.close()


async def test_hub_errors(tmp_path, hub):
    def source(repo="org/sql-lora", revision=None, secret=None):
        return Source(huggingFace=HuggingFaceSource(repo, revision, secret))

    mine = SecretRef("hf")
    async with fetcher(tmp_path, **hub.options) as f:
        with pytest.raises(Unavailable, match="private and the source's token"):
            await f.fetch(source())
        with pytest.raises(Unavailable, match="no such repository"):
            await f.fetch(source("org/other", None, mine))
        with pytest.raises(NotFound, match="revision"):
            await f.fetch(source("org/sql-lora", "v9", mine))
        with pytest.raises(InvalidArgument, match="a b"):
            await f.fetch(source("a b", None, mine))
        del hub.files.content[f"/{WEIGHTS_FILE}"]
        with pytest.raises(NotFound, match=f"{WEIGHTS_FILE}.*safetensors"):
            await f.fetch(source("org/sql-lora", None, mine))


# S3


@pytest.fixture
async def bucket(tmp_path):
    bucket = Bucket(Files(at("/models/loras/sql")), "AKIA1", "s3cr3t")
    server = await serve(bucket.handle)
    secret = tmp_path / "secrets/s3"
    secret.mkdir(parents=True)
    (secret / "AWS_ACCESS_KEY_ID").write_text("AKIA1")
    (secret / "AWS_SECRET_ACCESS_KEY").write_text("s3cr3t\n")
    bucket.endpoint = str(server.make_url("/")).rstrip("/")
    bucket.options = {"secrets_dir": tmp_path / "secrets"}
    yield bucket
    await server.close()


def s3(bucket, uri="s3://models/loras/sql", secret="s3"):
    return Source(s3=S3Source(uri, bucket.endpoint, "eu-central-1", SecretRef(secret) if secret else None))


async def test_s3(tmp_path, bucket):
    async with fetcher(tmp_path, **bucket.options) as f:
        fetched = await f.fetch(s3(bucket))
        assert content(fetched) == BOTH
        assert await f.fetch(s3(bucket)) == fetched
        assert len(bucket.files.paths()) == 2, "unchanged: asked by HEAD"


async def test_s3_resumes(tmp_path, bucket):
    bucket.files.cuts = [10**9, 2**20]
    async with fetcher(tmp_path, **bucket.options) as f:
        assert content(await f.fetch(s3(bucket))) == BOTH
    assert any(r.startswith("bytes=") and r != "bytes=0-" for r in bucket.files.ranges())


async def test_a_public_bucket_needs_no_secret(tmp_path, bucket):
    bucket.key_id = None
    async with fetcher(tmp_path) as f:
        assert content(await f.fetch(s3(bucket, secret=None))) == BOTH
    assert all("Authorization" not in r.headers for r in bucket.files.requests)


async def test_s3_errors(tmp_path, bucket):
    async with fetcher(tmp_path, **bucket.options) as f:
        with pytest.raises(NotFound, match=rf"s3://models/absent/{CONFIG_FILE}"):
            await f.fetch(s3(bucket, "s3://models/absent"))
        with pytest.raises(Unavailable, match="access denied"):
            await f.fetch(s3(bucket, secret=None))
        with pytest.raises(InvalidArgument, match="s3://bucket/prefix"):
            await f.fetch(s3(bucket, "https://models/loras"))
    async with fetcher(tmp_path, **bucket.options, max_weights_bytes=2**20) as f:
        with pytest.raises(InvalidArgument, match="--max-adapter-bytes"):
            await f.fetch(s3(bucket))


# The cache


async def test_a_full_disk_says_what_to_do(tmp_path, monkeypatch):
    folder = folder_with(tmp_path / "a")

    def full(*_):
        raise OSError(28, "No space left on device")

    async with fetcher(tmp_path, allow_paths=True) as f:
        monkeypatch.setattr("quire_server.cache.Partial.note", full)
        with pytest.raises(Unavailable, match=r"No space left.*--cache-dir"):
            await f.fetch(Source(path=str(folder)))


async def test_two_supervisors_share_a_cache(tmp_path):
    folder = folder_with(tmp_path / "a")
    async with fetcher(tmp_path, allow_paths=True) as one, fetcher(tmp_path, allow_paths=True) as two:
        fetched = await asyncio.gather(*(f.fetch(Source(path=str(folder))) for f in (one, two)))
    assert fetched[0] == fetched[1]
    assert content(fetched[0]) == BOTH


async def test_the_sweep_removes_only_what_is_old_and_unused(tmp_path):
    cache = Cache(tmp_path / "cache")
    async with Fetcher(cache, SourceOptions(allow_paths=True)) as f:
        fetched = [await f.fetch(Source(path=str(folder_with(tmp_path / str(i), config=b"%d" % i)))) for i in range(3)]
    used, old, young = (x.digest for x in fetched)
    for digest in (used, old):
        os.utime(cache.folder(digest), (1, 1))
    assert cache.sweep({used}) == [old]
    assert {used, young} == set(os.listdir(tmp_path / "cache/adapters"))
    assert cache.folder(used).stat().st_mtime > time.time() - 60
    shutil.rmtree(cache.folder(young))
