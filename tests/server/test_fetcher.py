# SPDX-License-Identifier: Apache-2.0
"""The fetcher against real servers of each protocol: what arrives, what is refused, what a cut connection costs."""

import asyncio
import hashlib
import json
import os
import shutil
import threading
import time
from pathlib import Path

import huggingface_hub
import pytest
from aiohttp import web as aio
from aiohttp.test_utils import TestServer
from support.sources import Bucket, Files, Hub, Raw, serve

from quire_server.cache import Cache
from quire_server.fetcher import Fetcher
from quire_server.sources import SourceOptions
from quire_server.transfer import Transfer
from quire_spec.catalogue import HttpSource, HuggingFaceSource, PvcSource, S3Source, SecretRef, Source
from quire_spec.digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from quire_spec.errors import AccessDenied, ConfigError, InvalidArgument, NotFound, Unavailable

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


async def test_a_file_system_that_hangs_holds_up_nobody_else(tmp_path, monkeypatch):
    """Neither its links nor its files are looked at in the event loop, which answers probes."""
    found, look = [], os.path.realpath

    def looked(path, **options):
        found.append(threading.current_thread())
        return look(path, **options)

    folder_with(tmp_path / "claim/a")
    async with fetcher(tmp_path, pvcs={"loras": tmp_path / "claim"}) as f:
        monkeypatch.setattr("os.path.realpath", looked)
        await f.fetch(Source(pvc=PvcSource("loras", "a")))
    assert found and threading.main_thread() not in found


async def test_a_file_system_that_hangs_for_long_has_so_many_threads_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr("quire_server.transfer.SILENCE_S", 0.01)
    folder_with(tmp_path / "claim/a")
    begun, back, open_file = [], threading.Event(), os.open

    def hangs(path, *args, **options):
        if str(path).startswith(str(tmp_path / "claim")):
            begun.append(path)
            back.wait(20)
        return open_file(path, *args, **options)

    source = Source(pvc=PvcSource("loras", "a"))
    async with fetcher(tmp_path, pvcs={"loras": tmp_path / "claim"}) as f:
        with monkeypatch.context() as patch:
            patch.setattr("os.open", hangs)
            for _ in range(5):
                with pytest.raises(Unavailable, match="no answer for"):
                    await f.fetch(source)
            with pytest.raises(Unavailable, match=r"pvc 'loras': '.*claim' does not answer; see to its volume"):
                await f.fetch(source)
            assert len(begun) == 16
            back.set()
        monkeypatch.setattr("quire_server.transfer.SILENCE_S", 60)
        while not await came_back(f, source):
            await asyncio.sleep(0.01)


async def came_back(f, source):
    try:
        return content(await f.fetch(source)) == BOTH
    except Unavailable:
        return False


@pytest.mark.parametrize("path", ["/a\0b", "/\ud800"])
async def test_what_is_no_path_is_said(tmp_path, path):
    async with fetcher(tmp_path, allow_paths=True) as f:
        with pytest.raises(InvalidArgument, match="is no path"):
            await f.fetch(Source(path=path))


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


async def test_a_part_of_another_version_is_not_taken_though_the_server_gives_it(tmp_path, web):
    """Servers that know Range and not If-Range: the rest of a new file does not go on where the old one was cut."""
    changed = os.urandom(len(WEIGHTS))
    web.conditions = False
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


async def test_a_server_that_gives_next_to_nothing_is_given_up(tmp_path, web):
    web.cuts = [10**9, *[1] * 100]
    async with fetcher(tmp_path) as f:
        with pytest.raises(Unavailable, match="was cut"):
            await f.fetch(Source(http=HttpSource(web.url)))
    assert len(web.paths()) == 4


@pytest.fixture
async def raw():
    servers = []

    async def start(answer, pause_s=0.0):
        servers.append(Raw(answer, pause_s))
        return servers[-1], await servers[-1].start()

    yield start
    for server in servers:
        await server.close()


async def refused(tmp_path, url, kind=Unavailable):
    """The error of a fetch from `url`, which has a signature in its query."""
    async with fetcher(tmp_path) as f, asyncio.timeout(20):
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
async def test_no_answer_has_the_signature_of_a_url_told(tmp_path, raw, caplog, answer):
    caplog.set_level("INFO")
    _, url = await raw(answer)
    said = await refused(tmp_path, url)
    assert said.startswith(f"{url}/a/{CONFIG_FILE}: ")
    assert "goes on after an error" in caplog.text
    assert "s3cr3t" not in said + caplog.text


async def test_a_proxys_password_is_not_told(tmp_path, raw, monkeypatch):
    _, url = await raw(b"HTTP/1.1 407 Who\r\nContent-Length: 0\r\n\r\n")
    monkeypatch.setenv("HTTPS_PROXY", url.replace("//", "//user:passw0rd@"))
    said = await refused(tmp_path, "https://nowhere.invalid")
    assert "407" in said and "passw0rd" not in said
    monkeypatch.setenv("HTTPS_PROXY", "user:passw0rd@x y")
    assert "passw0rd" not in await refused(tmp_path, "https://nowhere.invalid")


async def test_what_may_have_been_cut_is_not_taken(tmp_path, raw):
    """Without length or chunks the end of a connection is the end of the file, also where it was cut."""
    _, url = await raw(b"HTTP/1.1 200 OK\r\n\r\n{}")
    assert "have it send Content-Length" in await refused(tmp_path, url)


async def test_a_server_that_never_has_a_right_range_is_asked_no_further(tmp_path, raw):
    server, url = await raw(b"HTTP/1.1 416 No\r\nContent-Length: 0\r\n\r\n")
    assert "HTTP 416" in await refused(tmp_path, url)
    assert len(server.requests) == 3


async def test_bytes_that_trickle_are_no_answer(tmp_path, raw, monkeypatch):
    monkeypatch.setattr("quire_server.transfer.SILENCE_S", 0.3)
    _, url = await raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + b" " * 10_000, pause_s=0.01)
    assert "bytes came in 0.3 s" in await refused(tmp_path, url)


async def test_a_question_that_is_not_answered_once_does_not_cost_what_was_read(tmp_path, web):
    handle, failed = web.handle, []

    async def once_down(request):
        if request.method == "HEAD" and not failed:
            failed.append(request.path)
            return aio.Response(status=503)
        return await handle(request)

    server = await serve(once_down)
    async with fetcher(tmp_path) as f:
        assert content(await f.fetch(Source(http=HttpSource(str(server.make_url("/loras/sql")))))) == BOTH
    assert len(web.paths()) == 2 and failed
    await server.close()


async def test_cookies_are_nobodys(tmp_path, web):
    """What a place gives to one source with a secret would let in another one of the same host that has none."""

    async def prepared(request, response):
        response.headers["Set-Cookie"] = "session=s3cr3t; Path=/"

    app = aio.Application()
    app.router.add_route("*", "/{path:.*}", web.handle)
    app.on_response_prepare.append(prepared)
    server = TestServer(app)
    await server.start_server()
    # By name: nobody keeps cookies of an address.
    url = f"http://localhost:{server.port}/loras/sql"
    async with fetcher(tmp_path) as f:
        assert content(await f.fetch(Source(http=HttpSource(url)))) == BOTH
    assert [r for r in web.requests if "Cookie" in r.headers] == []
    await server.close()


@pytest.mark.parametrize("value", ["s3cr3t\ns3cr3t", "s3cr3t\x00", "s3cr3t\u20ac"])
@pytest.mark.parametrize("bundled", [True, False])
async def test_a_secret_that_cannot_be_sent_is_named_and_not_quoted(tmp_path, web, value, bundled):
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
    async with fetcher(tmp_path, secrets_dir=tmp_path / "secrets", hub_endpoint=web.url) as f:
        for source in (
            Source(http=HttpSource(web.url, headersSecretRef=mine)),
            Source(huggingFace=HuggingFaceSource("org/sql-lora", None, mine)),
            Source(s3=S3Source("s3://models/a", web.url, None, mine)),
        ):
            with pytest.raises(AccessDenied, match=r"secret 'mine': key '\w+(-\w+)?' holds a line break") as caught:
                await f.fetch(source)
            assert "s3cr3t" not in str(caught.value)
    assert web.requests == []


async def test_a_user_in_the_url_beside_a_secret_header_is_said(tmp_path, web):
    (tmp_path / "secrets/mine").mkdir(parents=True)
    (tmp_path / "secrets/mine/Authorization").write_text("Bearer s3cr3t")
    source = HttpSource(web.url.replace("//", "//user:passw0rd@"), headersSecretRef=SecretRef("mine"))
    async with fetcher(tmp_path, secrets_dir=tmp_path / "secrets") as f:
        with pytest.raises(Unavailable, match="AUTHORIZATION") as caught:
            await f.fetch(Source(http=source))
    assert "s3cr3t" not in str(caught.value) and "passw0rd" not in str(caught.value)


async def test_secret_headers_go_to_the_first_origin_only(tmp_path, web):
    seen = []

    async def redirect(request):
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


@pytest.mark.parametrize(
    ("name", "value"),
    [("NO_PROXY", "[::1],fd00::/8"), ("HTTPS_PROXY", "socks5://user:passw0rd@127.0.0.1:9")],
)
async def test_a_proxy_that_the_hubs_library_cannot_use_is_said(tmp_path, hub, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    huggingface_hub.close_session()
    source = Source(huggingFace=HuggingFaceSource("org/sql-lora", tokenSecretRef=SecretRef("hf")))
    try:
        async with fetcher(tmp_path, **hub.options) as f:
            with pytest.raises(Unavailable, match="hub repository 'org/sql-lora'") as caught:
                await f.fetch(source)
    finally:
        huggingface_hub.close_session()
    assert "passw0rd" not in str(caught.value)


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


async def test_s3_goes_on_where_a_file_was_whole(tmp_path, bucket, monkeypatch):
    """No range begins at a file's end: config.json was whole when an earlier process was ended."""
    monkeypatch.setattr("quire_server.transfer._ATTEMPTS", 0)
    bucket.files.cuts = [10**9, 2**20]
    async with fetcher(tmp_path, **bucket.options) as f:
        with pytest.raises(Unavailable):
            await f.fetch(s3(bucket))
    monkeypatch.setattr("quire_server.transfer._ATTEMPTS", 1)
    async with fetcher(tmp_path, **bucket.options) as f:
        assert content(await f.fetch(s3(bucket))) == BOTH


async def test_s3_never_mixes_two_versions(tmp_path, bucket):
    changed = os.urandom(len(WEIGHTS))
    bucket.files.conditions = False
    bucket.files.cuts = [10**9, 2**20]
    put = bucket.files._send

    async def change_after_the_cut(request, response, data):
        cut = len(bucket.files.cuts) == 1
        await put(request, response, data)
        if cut:
            bucket.files.content[f"/models/loras/sql/{WEIGHTS_FILE}"] = changed

    bucket.files._send = change_after_the_cut
    async with fetcher(tmp_path, **bucket.options) as f:
        assert content(await f.fetch(s3(bucket)))[WEIGHTS_FILE] == changed


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


async def test_s3_tells_what_a_bucket_says_and_not_what_it_quotes(tmp_path, bucket, raw):
    body = b"<Error><Code>ExpiredToken</Code><Token-0>s3cr3t</Token-0></Error>"
    _, url = await raw(b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    async with fetcher(tmp_path, **bucket.options) as f:
        with pytest.raises(AccessDenied, match="HTTP 400 ExpiredToken; the source's secret is wrong or no") as caught:
            await f.fetch(Source(s3=S3Source("s3://models/loras/sql", url, None, SecretRef("s3"))))
        assert "s3cr3t" not in str(caught.value)
        with pytest.raises(Unavailable, match=r"at http://127\.0\.0\.1:9: HTTP error: error sending request$"):
            await f.fetch(Source(s3=S3Source("s3://models/loras/sql", "http://127.0.0.1:9")))


async def test_s3_files_that_are_stored_compressed_are_refused(tmp_path, raw):
    _, url = await raw(b"HTTP/1.1 200 OK\r\nETag: x\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}")
    async with fetcher(tmp_path) as f:
        with pytest.raises(Unavailable, match="is stored as gzip; store the files as they are"):
            await f.fetch(Source(s3=S3Source("s3://models/loras/sql", url)))


@pytest.mark.parametrize(
    "endpoint",
    ["http://user:s3cr3t@h", "http://h?s3cr3t", "http://[::", "http://h:99999", 'http://a"b', "http://h:9)", "ftp://h"],
)
async def test_an_endpoint_is_a_url_without_secrets(tmp_path, endpoint):
    """obstore panics on some of these, and so does whoever waits for it."""
    async with fetcher(tmp_path) as f:
        with pytest.raises(ConfigError, match=r"s3 source: the endpoint is not http\(s\)://host") as caught:
            await f.fetch(Source(s3=S3Source("s3://models/a", endpoint)))
        assert "s3cr3t" not in str(caught.value)
        with pytest.raises(InvalidArgument, match="s3://bucket/prefix") as caught:
            await f.fetch(Source(s3=S3Source("s3://AKIA1:s3cr3t@models/a")))
        assert "s3cr3t" not in str(caught.value)


# The cache


async def test_a_sweep_that_is_killed_leaves_no_half_adapter_under_its_name(tmp_path, monkeypatch):
    source = Source(path=str(folder_with(tmp_path / "a")))
    async with fetcher(tmp_path, allow_paths=True) as f:
        fetched = await f.fetch(source)
        os.utime(fetched.folder, (1, 1))

        def killed(path):
            (Path(path) / CONFIG_FILE).unlink()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("shutil.rmtree", killed)
            f.sweep(set())
    async with fetcher(tmp_path, allow_paths=True) as f:
        assert content(await f.fetch(source)) == BOTH
        for path in (tmp_path / "cache/partial").iterdir():
            os.utime(path, (1, 1))
        f.sweep({fetched.digest})
    assert list((tmp_path / "cache/partial").iterdir()) == []


async def test_an_adapter_that_another_owner_sweeps_meanwhile_is_fetched_again(tmp_path, web, monkeypatch):
    source, sweeping = Source(http=HttpSource(web.url)), []
    async with fetcher(tmp_path) as f:
        fetched = await f.fetch(source)
        handle = web.handle

        async def swept(request):
            if request.method == "HEAD" and not sweeping:
                os.utime(fetched.folder, (1, 1))
                sweeping.extend(Cache(tmp_path / "cache").sweep(set()))
            return await handle(request)

        server = await serve(swept)
        monkeypatch.setattr("quire_server.fetcher.key_of", lambda source: "one")
        await f.fetch(source)
        assert content(await f.fetch(Source(http=HttpSource(str(server.make_url("/loras/sql")))))) == BOTH
        assert sweeping == [fetched.digest]
        await server.close()


def test_an_adapter_that_is_taken_in_use_while_it_is_swept_stays(tmp_path, monkeypatch):
    cache = Cache(tmp_path / "cache")
    folder_with(cache.folder("sha256:0"))
    os.utime(cache.folder("sha256:0"), (1, 1))
    rename = Path.rename

    def used_first(path, target):
        if path == cache.folder("sha256:0"):
            assert Cache(tmp_path / "cache").touch("sha256:0")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", used_first)
    assert cache.sweep(set()) == []
    assert os.listdir(cache.folder("sha256:0"))
    assert not cache.touch("sha256:1")


async def test_a_sweep_removes_what_fetches_have_left_and_nothing_that_is_fetched_now(tmp_path):
    cache, folder = Cache(tmp_path / "cache"), folder_with(tmp_path / "a")
    async with Fetcher(cache, SourceOptions(allow_paths=True)) as f:
        fetched = await f.fetch(Source(path=str(folder)))
    shutil.rmtree(fetched.folder)
    with cache.partial("now") as now, cache.partial("then") as then:
        for partial in (now, then):
            partial.note(CONFIG_FILE, "1")
            (partial.folder / CONFIG_FILE).write_bytes(CONFIG)
    everything = [*(tmp_path / "cache/partial").iterdir(), *(tmp_path / "cache/sources").iterdir()]
    with cache.partial("now"):
        for path in everything:
            os.utime(path, (1, 1))
        cache.sweep(set())
        assert {path.name for path in (tmp_path / "cache/partial").iterdir()} == {"now", "now.json", "now.lock"}
        assert list((tmp_path / "cache/sources").iterdir()) == []


async def test_a_full_disk_says_what_to_do(tmp_path, monkeypatch):
    folder = folder_with(tmp_path / "a")

    def full(*_):
        raise OSError(28, "No space left on device")

    async with fetcher(tmp_path, allow_paths=True) as f:
        monkeypatch.setattr("quire_server.cache.Partial.note", full)
        with pytest.raises(Unavailable, match=r"No space left.*--cache-dir"):
            await f.fetch(Source(path=str(folder)))


async def test_what_is_in_a_cache_that_became_read_only_is_used(tmp_path, monkeypatch):
    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    source = Source(path=str(folder_with(tmp_path / "a")))
    async with fetcher(tmp_path, allow_paths=True) as f:
        fetched = await f.fetch(source)
        monkeypatch.setattr("os.utime", read_only)
        monkeypatch.setattr("quire_server.cache.Cache.partial", read_only)
        assert await f.fetch(source) == fetched
        with pytest.raises(Unavailable, match=r"cache: .*Read-only file system; make room, or give another --cache"):
            await f.fetch(Source(path=str(folder_with(tmp_path / "b"))))


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
