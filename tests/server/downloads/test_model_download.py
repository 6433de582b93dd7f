# SPDX-License-Identifier: Apache-2.0
"""Model downloads over every protocol: atomic, resumed, verified, and limited to the model's files."""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import re
import socket
import sys

import aiohttp
import pytest
from aiohttp import web as web_answers
from nodocker_cluster.ports import free_ports
from support.fake_sources import FakeHttpServer, FakeHub

from quire_server.downloads import model_download as program
from quire_server.downloads.model_download import NoSpace, download
from quire_sources.factory import SourceOptions
from quire_spec.documents import checkpoint_digest
from quire_spec.documents.checkpoint_digest import DIGEST_FILE
from quire_spec.documents.download_progress import DownloadProgress
from quire_spec.documents.download_result import DownloadReason, DownloadResult
from quire_spec.documents.sources import HttpSource, HuggingFaceSource, Source
from quire_spec.errors import ConfigError, InvalidArgument, NotFound, Unavailable

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARDS = {f"model-0000{i}-of-00003.safetensors": bytes([i]) * 3_000_000 for i in (1, 2, 3)}
INDEX = {"metadata": {"total_size": 9_000_000}, "weight_map": {f"w{i}": name for i, name in enumerate(SHARDS)}}
SMALL = {"config.json": b"{}", "tokenizer.json": b"[]", "generation_config.json": b"{ }"}
SHARDED = {**SMALL, "model.safetensors.index.json": json.dumps(INDEX).encode(), **SHARDS}
SINGLE = {**SMALL, "model.safetensors": b"w" * 2_000_000}
CODE = {"modeling_llama.py": b"import os", "pytorch_model.bin": b"pickle"}


def at(prefix, content):
    return {f"{prefix}/{name}": data for name, data in content.items()}


def found(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
async def web(serve):
    files = FakeHttpServer(at("/sharded", SHARDED | CODE) | at("/single", SINGLE))
    files.url = await serve(files.handle)
    return files


def http(web, folder="sharded", sha256=None):
    return Source(http=HttpSource(f"{web.url}/{folder}", sha256))


async def test_http(tmp_path, web):
    await download(http(web), tmp_path / "m", SourceOptions())
    assert found(tmp_path / "m") == SHARDED
    assert [path.name for path in tmp_path.iterdir()] == ["m"], "there are no leftovers"
    asked = len(web.requests)
    await download(http(web), tmp_path / "m", SourceOptions())
    assert len(web.requests) == asked, "an existing model is not downloaded again"
    assert not [path for path in web.paths() if path.endswith((".py", ".bin"))]


async def test_modules_of_an_embedding_model(tmp_path, web):
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
    nested = {"1_Pooling/config.json": b"{}"}
    web.files |= at("/embedding", SINGLE | nested | {"modules.json": json.dumps(modules).encode()})
    await download(http(web, "embedding"), tmp_path / "m", SourceOptions())
    assert (tmp_path / "m/1_Pooling/config.json").read_bytes() == b"{}"
    modules[1]["path"] = "../other"
    web.files |= at("/embedding", {"modules.json": json.dumps(modules).encode()})
    with pytest.raises(InvalidArgument, match="path: must be a folder in the checkpoint"):
        await download(http(web, "embedding"), tmp_path / "n", SourceOptions())


async def test_cut_downloads_resume(tmp_path, web):
    # Four small files are complete.
    web.cut_after_bytes = [*[10_000_000] * 4, 1_000_000, 500_000, 2_000_000]
    await download(http(web), tmp_path / "m", SourceOptions())
    assert found(tmp_path / "m") == SHARDED
    assert [r for r in web.ranges() if r and r != "bytes=0-"], "only the missing bytes were requested"


async def test_later_run_resumes_a_killed_one(tmp_path, web, monkeypatch):
    monkeypatch.setattr("quire_server.downloads.resumable_download._MAX_ATTEMPTS", 0)
    monkeypatch.setattr(program, "_MAX_CONCURRENT_FILES", 1)
    # config.json, two optional files and the index are complete; the first weights file is cut.
    sizes = [len(SMALL[name]) for name in ("config.json", "generation_config.json", "tokenizer.json")]
    web.cut_after_bytes = [*sizes, 10_000_000, 1_234_567]
    with pytest.raises(Unavailable):
        await download(http(web), tmp_path / "m", SourceOptions())
    assert not (tmp_path / "m").exists(), "an incomplete model has no name"
    monkeypatch.setattr("quire_server.downloads.resumable_download._MAX_ATTEMPTS", 3)
    before = len(web.requests)
    await download(http(web), tmp_path / "m", SourceOptions())
    assert found(tmp_path / "m") == SHARDED
    again = [(r.path, r.headers.get("Range")) for r in web.requests[before:] if r.method == "GET"]
    ranges = [wanted for path, wanted in again if path.endswith("/model-00001-of-00003.safetensors")]
    assert re.fullmatch(r"bytes=[1-9]\d+-", ranges[0]), "resumes at the cut"
    assert not [path for path, _ in again if path.endswith("/config.json")], "complete files are not downloaded again"


async def test_checks_digests(tmp_path, web):
    right = hashlib.sha256(SINGLE["model.safetensors"]).hexdigest()
    await download(http(web, "single", right), tmp_path / "m", SourceOptions())
    assert found(tmp_path / "m") == SINGLE
    with pytest.raises(InvalidArgument, match="sha256 is"):
        await download(http(web, "single", "0" * 64), tmp_path / "n", SourceOptions())
    with pytest.raises(InvalidArgument, match="has one sha256, but the weights have several files"):
        await download(http(web, "sharded", right), tmp_path / "o", SourceOptions())
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["m"]


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"w": "../../etc/passwd.safetensors"}, "'../../etc/passwd.safetensors' is not a weights file in the same"),
        ({"w": "setup.py"}, "'setup.py' is not a weights file"),
        ("[" * 100_000, "has no weight_map"),
        ({}, "its weight_map lists no files"),
        (["x"], "has no weight_map"),
        ({"w": "a\0b.safetensors"}, "is not a weights file"),
        ({"w": "\ud800.safetensors"}, "is not a weights file"),
        ({"w": "w" * 250 + ".safetensors"}, "is not a weights file"),
    ],
)
async def test_rejects_an_index_that_names_other_files(tmp_path, web, weight_map, words):
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    web.files["/sharded/model.safetensors.index.json"] = text.encode()
    with pytest.raises(InvalidArgument, match=words):
        await download(http(web), tmp_path / "m", SourceOptions())


async def test_rejects_a_source_without_a_model(tmp_path, web):
    with pytest.raises(NotFound, match=r"/nowhere/config.json: HTTP 404"):
        await download(http(web, "nowhere"), tmp_path / "m", SourceOptions())
    del web.files["/single/model.safetensors"]
    with pytest.raises(NotFound, match=r"/single/model.safetensors: HTTP 404"):
        await download(http(web, "single"), tmp_path / "m", SourceOptions())


async def test_complete_file_is_checked_against_the_current_version(tmp_path, web, monkeypatch):
    """A model is replaced and restored, and its download is killed after each step."""
    monkeypatch.setattr(program, "_MAX_CONCURRENT_FILES", 1)
    monkeypatch.setattr("quire_server.downloads.resumable_download._MAX_ATTEMPTS", 0)
    old, new = dict(web.files), {"/single/model.safetensors": b"v" * 2_000_000}
    # All files are complete, but the download is killed before the commit.
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="scripted"):
        patch.setattr(program, "_commit", interrupted)
        await download(http(web, "single"), tmp_path / "m", SourceOptions())
    web.files |= new
    web.cut_after_bytes = [1_000_000]
    with pytest.raises(Unavailable):
        await download(http(web, "single"), tmp_path / "m", SourceOptions())
    web.files |= old
    await download(http(web, "single"), tmp_path / "m", SourceOptions())
    assert found(tmp_path / "m") == SINGLE
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def interrupted(*_):
    raise RuntimeError("scripted")


async def test_model_that_changes_during_the_download_is_read_again(tmp_path, web, serve):
    new = {"config.json": b'{"new": 1}', "model.safetensors": b"v" * 2_000_000}
    handle = web.handle

    async def changing(request):
        answer = await handle(request)
        if request.path == "/single/config.json" and request.method == "GET":
            web.files |= at("/single", new)
        return answer

    url = await serve(changing)
    source = Source(http=HttpSource(f"{url}/single"))
    await download(source, tmp_path / "m", SourceOptions())
    assert found(tmp_path / "m") == SINGLE | new


async def test_model_that_keeps_changing_is_rejected(tmp_path, web, serve):
    handle, versions = web.handle, iter(range(100))

    async def changing(request):
        web.files["/single/config.json"] = b"%d" % next(versions)
        return await handle(request)

    url = await serve(changing)
    source = Source(http=HttpSource(f"{url}/single"))
    with pytest.raises(Unavailable, match="changed 3 times during the download; write a new model to"):
        await download(source, tmp_path / "m", SourceOptions())


async def test_folders_with_dots_in_their_names_share_no_files(tmp_path, web, monkeypatch):
    monkeypatch.setattr("quire_server.downloads.resumable_download._MAX_ATTEMPTS", 0)
    # Everything except the weights is complete.
    web.cut_after_bytes = [*[10_000_000] * 3, 1_000_000]
    with pytest.raises(Unavailable):
        await download(http(web, "single"), tmp_path / "llama-3.1", SourceOptions())
    await download(http(web, "sharded"), tmp_path / "llama-3.2", SourceOptions())
    await download(http(web, "single"), tmp_path / "llama-3.1", SourceOptions())
    assert found(tmp_path / "llama-3.1") == SINGLE
    assert found(tmp_path / "llama-3.2") == SHARDED


async def test_rejects_an_existing_folder_without_a_model(tmp_path, web):
    (tmp_path / "m").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("m", "link"):
        with pytest.raises(ConfigError, match="already exists and contains no model"):
            await download(http(web), tmp_path / name, SourceOptions())
    assert web.requests == []


async def test_download_that_waited_for_another_uses_its_model(tmp_path, web, monkeypatch):
    alone = program._lock_partial

    @contextlib.contextmanager
    def late(into):
        into.mkdir()
        (into / "config.json").write_bytes(b"{}")
        with alone(into) as partial:
            yield partial

    monkeypatch.setattr(program, "_lock_partial", late)
    await download(http(web), tmp_path / "m", SourceOptions())
    assert web.requests == [] and [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("cut", [0, 7, 50, 999])
async def test_rejects_truncated_weights(tmp_path, web, cut):
    """A file that is served while it is being written has a valid Content-Length and is incomplete."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [900], "data_offsets": [0, 900]}}).ljust(92).encode()
    whole = len(header).to_bytes(8, "little") + header + b"w" * 900
    web.files["/single/model.safetensors"] = whole[:cut]
    with pytest.raises(InvalidArgument, match=f"has {cut} bytes, but its header requires"):
        await download(http(web, "single"), tmp_path / "m", SourceOptions())
    web.files["/single/model.safetensors"] = whole
    await download(http(web, "single"), tmp_path / "m", SourceOptions())
    assert (tmp_path / "m/model.safetensors").read_bytes() == whole


async def asked(port):
    """The reported progress; None if the port is closed."""
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/progress") as answer,
        ):
            return DownloadProgress.parse(await answer.text())
    except aiohttp.ClientConnectorError:
        return None


async def test_progress_is_served_and_logged(tmp_path, web, monkeypatch, caplog):
    monkeypatch.setattr("quire_server.downloads.download_progress.SAMPLE_INTERVAL_S", 0.02)
    monkeypatch.setattr("quire_server.downloads.download_progress.LOG_INTERVAL_S", 0.05)
    caplog.set_level(logging.INFO)
    (port,) = free_ports(1)
    web.send_rest = asyncio.Event()
    under_way = asyncio.create_task(download(http(web), tmp_path / "m", SourceOptions(), port))
    total = sum(map(len, SHARDED.values()))
    async with asyncio.timeout(20):
        # Up to one file buffer of each weights file may not be on disk yet.
        while not (far := await asked(port)) or far.bytes < 5_625_000 - 3 * 8192:
            await asyncio.sleep(0.01)
        assert (far.total, far.percent) == (total, 62)
        while "percent=62" not in caplog.text:
            await asyncio.sleep(0.01)
        assert re.search(r"download progress done='5\.[34] MiB' total='8\.6 MiB' percent=62 rate='.+/s'", caplog.text)
        web.send_rest.set()
        await under_way
    assert await asked(port) is None
    assert found(tmp_path / "m") == SHARDED


async def test_download_continues_without_a_progress_port(tmp_path, web, monkeypatch, caplog):
    async def broken(_):
        raise RuntimeError("scripted")

    with socket.create_server(("0.0.0.0", 0)) as taken:
        await download(http(web), tmp_path / "m", SourceOptions(), taken.getsockname()[1])
    assert "progress port cannot be opened" in caplog.text
    monkeypatch.setattr("quire_server.downloads.download_progress.ProgressMeter.sample", broken)
    await download(http(web), tmp_path / "n", SourceOptions(), 10**6)
    assert found(tmp_path / "m") == found(tmp_path / "n") == SHARDED
    assert "progress reports stopped" in caplog.text


async def test_concurrent_downloads_exclude_each_other(tmp_path, web):
    both = await asyncio.gather(
        *(download(http(web), tmp_path / "m", SourceOptions()) for _ in range(2)), return_exceptions=True
    )
    assert sorted(str(result).partition(": ")[2] for result in both) == [
        "",
        "another download is running; wait until it has finished",
    ]
    assert found(tmp_path / "m") == SHARDED


async def test_file_missing_in_the_hubs_storage_is_an_error(tmp_path, serve):
    files = FakeHttpServer(at("", SINGLE))
    hub = FakeHub(files, "org/llama", COMMIT, None, "http://127.0.0.1:9")
    handle = hub.handle

    async def lost(request):
        answer = await handle(request)
        if request.method == "GET" and request.path.endswith("/tokenizer.json"):
            return web_answers.Response(status=404)
        return answer

    options = SourceOptions(hub_endpoint=await serve(lost))
    with pytest.raises(Unavailable, match=r"tokenizer\.json: HTTP 404"):
        await download(Source(huggingFace=HuggingFaceSource("org/llama")), tmp_path / "m", options)


@pytest.fixture
def run(monkeypatch):
    """Return a function that calls the command line, with the event loop of its own that it needs."""
    monkeypatch.setattr(program, "configure_logging", lambda: None)
    return lambda *arguments: asyncio.to_thread(program.main, [*map(str, arguments)])


@pytest.fixture
def run_and_report(run, tmp_path):
    """Return a function that calls the command line and returns the report."""

    async def call(*arguments):
        code = await run(*arguments, "--report", tmp_path / "report")
        outcome = DownloadResult.parse((tmp_path / "report").read_text())
        assert outcome is not None and (code == 0) == (outcome.result is DownloadReason.DOWNLOADED)
        return outcome

    return call


@pytest.mark.parametrize("folder", ["single", "sharded"])
async def test_digest_is_kept_so_that_no_pod_reads_the_weights_for_it(tmp_path, web, run, monkeypatch, folder):
    arguments = ("--source", json.dumps({"http": {"url": f"{web.url}/{folder}"}}), "--into", tmp_path / "m")
    assert await run(*arguments) == 0 and not (tmp_path / "m" / DIGEST_FILE).exists()
    # The model exists, and a later run adds the digest.
    assert await run(*arguments, "--digest") == 0
    kept = json.loads((tmp_path / "m" / DIGEST_FILE).read_text())
    assert {name: entry[3] for name, entry in kept.items()} == {
        name: hashlib.sha256(content).hexdigest()
        for name, content in {"single": SINGLE, "sharded": SHARDED}[folder].items()
        if name.endswith(".safetensors")
    }, "also of files that have just been written"
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_digest, "file_sha256", lambda _: pytest.fail("the weights are read again"))
        digest = checkpoint_digest.compute_digest(tmp_path / "m")
        assert await run(*arguments, "--digest") == 0
    (tmp_path / "m" / DIGEST_FILE).unlink()
    assert checkpoint_digest.compute_digest(tmp_path / "m") == digest


async def test_weights_that_cannot_be_hashed_are_left_to_the_pods(tmp_path, web, run, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint_digest, "file_sha256", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "I/O")))
    source = json.dumps({"http": {"url": f"{web.url}/single"}})
    assert await run("--source", source, "--into", tmp_path / "m", "--digest") == 0
    assert found(tmp_path / "m") == SINGLE and "model cannot be hashed" in caplog.text


async def test_report_contains_bytes_and_reason(tmp_path, web, run_and_report):
    def source(**fields):
        return "--source", json.dumps({"http": {"url": f"{web.url}/single"} | fields})

    right = hashlib.sha256(SINGLE["model.safetensors"]).hexdigest()
    size = sum(map(len, SINGLE.values()))
    into = "--into", tmp_path / "m"
    assert await run_and_report(*source(sha256=right), *into) == DownloadResult(DownloadReason.DOWNLOADED, size)
    assert await run_and_report(*source(sha256=right), *into) == DownloadResult(DownloadReason.DOWNLOADED, size), (
        "is there already"
    )
    into = "--into", tmp_path / "n"
    wrong = await run_and_report(*source(sha256="0" * 64), *into)
    assert (wrong.result, wrong.bytes) == (DownloadReason.DIGEST_MISMATCH, size - len(SINGLE["model.safetensors"]))
    assert "sha256 is" in wrong.message
    assert (await run_and_report(*source(url=f"{web.url}/nowhere"), *into)).result is DownloadReason.NOT_FOUND
    assert (await run_and_report(*source(url="ftp://x"), *into)).result is DownloadReason.SOURCE_INVALID
    web.is_down = True
    down = await run_and_report(*source(), *into)
    assert (down.result, "HTTP 503" in down.message) == (DownloadReason.UNREACHABLE, True)


async def test_report_distinguishes_denied_token_and_missing_secret(tmp_path, web, run_and_report, serve):
    hub = FakeHub(FakeHttpServer(at("", SINGLE)), "org/llama", COMMIT, "hf_s3cr3t", web.url + "/single")
    endpoint = "--hub-endpoint", await serve(hub.handle)
    source = "--source", json.dumps({"huggingFace": {"repo": "org/llama"}})
    refused = await run_and_report(*source, *endpoint, "--into", tmp_path / "m")
    assert refused.result is DownloadReason.AUTH_FAILED and "'org/llama'" in refused.message
    named = (
        "--source",
        json.dumps({"huggingFace": {"repo": "org/llama", "tokenSecretRef": {"name": "hf", "key": "token"}}}),
    )
    (tmp_path / "secrets").mkdir()
    secrets = "--secrets-dir", tmp_path / "secrets"
    missing = await run_and_report(*named, *endpoint, *secrets, "--into", tmp_path / "m")
    assert missing.result is DownloadReason.AUTH_FAILED and "create the Secret" in missing.message
    (tmp_path / "secrets/hf").write_text(json.dumps({"token": "hf_s3cr3t"}))
    good = await run_and_report(*named, *endpoint, *secrets, "--into", tmp_path / "m")
    assert (good.result, good.revision) == (DownloadReason.DOWNLOADED, COMMIT)


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, NoSpace), (errno.EDQUOT, NoSpace), (errno.EIO, Unavailable)]
)
async def test_full_volume_and_broken_volume_have_different_reasons(tmp_path, web, monkeypatch, number, kind):
    async def fail(*_):
        raise OSError(number, "no")

    # A full file system needs a mount, which tests cannot create.
    monkeypatch.setattr("quire_server.downloads.resumable_download.ResumableDownload._write", fail)
    with pytest.raises(Unavailable, match="make room") as caught:
        await download(http(web), tmp_path / "m", SourceOptions())
    assert type(caught.value) is kind


def test_report_fits_a_termination_message():
    long = DownloadResult(DownloadReason.NOT_FOUND, 1, "r" * 200, "ü" * 10_000)
    text = long.dump()
    assert len(text.encode()) <= 3072
    read = DownloadResult.parse(text)
    assert read.message.endswith("…") and read.revision == long.revision
    for other in ("", "{", "[]", '{"result": "Odd", "bytes": 1}', "Traceback"):
        assert DownloadResult.parse(other) is None


async def test_exit_codes(tmp_path, web, run, capsys):
    def source(folder):
        return json.dumps({"http": {"url": f"{web.url}/{folder}"}})

    for wrong in ("{", "{}", "[" * 100_000, '{"http": {"url": "ftp://x"}}', '{"path": "/etc"}', source("nowhere")):
        assert await run("--source", wrong, "--into", tmp_path / "n") == 2, wrong
        assert capsys.readouterr().err.startswith("quire: ")
    assert await run("--source", source("single"), "--into", "/", "--report", tmp_path / "report") == 2
    assert await run("--source", source("single"), "--into", tmp_path / ("n" * 300)) == 1
    web.is_down = True
    assert await run("--source", source("sharded"), "--into", tmp_path / "n") == 1
    assert "HTTP 503" in capsys.readouterr().err


async def test_program_of_rendered_jobs(tmp_path, web):
    source = json.dumps({"http": {"url": f"{web.url}/single"}})
    argv = [sys.executable, "-m", "quire_server.download", "--source", source, "--into", str(tmp_path / "m")]
    assert await (await asyncio.create_subprocess_exec(*argv)).wait() == 0
    assert found(tmp_path / "m") == SINGLE


OLD, USED, NEW, OTHER = "aaaaaaa", "bbbbbbb", "ccccccc", "ddddddd"


async def test_removes_revisions_that_no_pod_uses(run, web, tmp_path, monkeypatch):
    """The new revision finds the room of the old one; the used one and files of others stay."""
    for name in (OLD, USED, "models", "aaaaaaaa"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    for left in (f".partial-{OLD}", f".partial-{OTHER}", f".removed-{OTHER}"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "model.safetensors").write_bytes(b"w")
    for left in (f".partial-{OTHER}.lock", f".partial-{OTHER}.json", f".partial-{OTHER}-whole.json"):
        (tmp_path / left).touch()
    arguments = ("--source", json.dumps({"http": {"url": f"{web.url}/single"}}), "--into", tmp_path / NEW)
    monkeypatch.setenv("QUIRE_KEPT_FOLDERS", USED)
    assert await run(*arguments) == 0
    assert {path.name for path in tmp_path.iterdir()} == {USED, NEW, "models", "aaaaaaaa"}
    monkeypatch.setenv("QUIRE_KEPT_FOLDERS", "")
    assert await run(*arguments) == 0
    assert {path.name for path in tmp_path.iterdir()} == {NEW, "models", "aaaaaaaa"}
    assert found(tmp_path / NEW) == SINGLE


async def test_keeps_other_revisions_without_a_list_and_those_that_are_being_downloaded(run, web, tmp_path):
    (tmp_path / OLD).mkdir()
    arguments = ("--source", json.dumps({"http": {"url": f"{web.url}/single"}}), "--into", tmp_path / NEW)
    assert await run(*arguments) == 0
    assert (tmp_path / OLD).is_dir(), "a Job that a user wrote"
    (tmp_path / f".partial-{OTHER}").mkdir()
    with (tmp_path / f".partial-{OTHER}.lock").open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        assert await run(*arguments, "--kept-folders", "") == 0
    assert {path.name for path in tmp_path.iterdir()} == {NEW, f".partial-{OTHER}", f".partial-{OTHER}.lock"}


async def test_a_removal_that_was_interrupted_leaves_no_folder_that_looks_complete(run, web, tmp_path, monkeypatch):
    (tmp_path / OLD).mkdir()
    (tmp_path / OLD / "config.json").write_text("{}")
    monkeypatch.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    arguments = ("--source", json.dumps({"http": {"url": f"{web.url}/single"}}), "--into", tmp_path / NEW)
    assert await run(*arguments, "--kept-folders", "") == 0, "the download does not depend on the removal"
    assert {path.name for path in tmp_path.iterdir()} == {NEW, f".removed-{OLD}"}
