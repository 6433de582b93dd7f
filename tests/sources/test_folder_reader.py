# SPDX-License-Identifier: Apache-2.0
"""The folder reader, below the adapter fetcher: links, invalid paths, changes during a read, hung file systems."""

import asyncio
import os
import shutil
import threading
from pathlib import Path

import pytest
from support.fetching import ADAPTER_FILES, CONFIG, WEIGHTS, fetch, folder_content, make_fetcher, write_adapter_folder

from quire_server.downloads.resumable_download import ResumableDownload
from quire_spec.documents.adapter_digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from quire_spec.documents.sources import PvcSource, Source
from quire_spec.errors import InvalidArgument, NotFound, Unavailable


async def test_next_fetch_does_not_write_to_files_being_hashed(tmp_path, monkeypatch):
    """Cancelling a fetch does not stop the thread that hashes its files."""
    begun, go_on = threading.Event(), threading.Event()

    def slowly(folder):
        digest = adapter_digest(folder)
        if not begun.is_set():
            begun.set()
            go_on.wait(10)
        return digest

    monkeypatch.setattr("quire_server.downloads.adapter_cache.adapter_digest", slowly)
    folder = write_adapter_folder(tmp_path / "a")
    async with make_fetcher(tmp_path, allow_paths=True) as f:
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
        assert folder_content(await second)[CONFIG_FILE] == b'{"r": 16}'
    for made in (tmp_path / "cache/adapters").iterdir():
        assert adapter_digest(made) == made.name


async def test_folder_is_copied_before_it_is_hashed(tmp_path):
    folder = write_adapter_folder(tmp_path / "a")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    async with make_fetcher(tmp_path, allow_paths=True) as f:
        first = await f.fetch(Source(path=str(folder)))
        assert folder_content(first) == ADAPTER_FILES
        assert first.digest == adapter_digest(folder)
        (folder / CONFIG_FILE).write_bytes(b'{"r": 16}')
        second = await f.fetch(Source(path=str(folder)))
    assert second.digest != first.digest
    assert folder_content(first) == ADAPTER_FILES
    assert folder_content(second)[CONFIG_FILE] == b'{"r": 16}'


async def test_equal_content_of_two_sources_is_one_adapter(tmp_path):
    one, two = write_adapter_folder(tmp_path / "a"), write_adapter_folder(tmp_path / "b")
    async with make_fetcher(tmp_path, allow_paths=True) as f:
        fetched = await asyncio.gather(*(f.fetch(Source(path=str(p))) for p in (one, two, one, two)))
    assert len({x.digest for x in fetched}) == 1
    assert os.listdir(tmp_path / "cache/adapters") == [fetched[0].digest]
    assert [p.name for p in (tmp_path / "cache/partial").iterdir() if p.suffix != ".lock"] == []


async def test_file_system_calls_run_outside_the_event_loop(tmp_path, monkeypatch):
    """The event loop serves probes and must not resolve links or read files."""
    found, look = [], os.path.realpath

    def looked(path, **options):
        found.append(threading.current_thread())
        return look(path, **options)

    write_adapter_folder(tmp_path / "claim/a")
    async with make_fetcher(tmp_path, pvcs={"loras": tmp_path / "claim"}) as f:
        monkeypatch.setattr("os.path.realpath", looked)
        await f.fetch(Source(pvc=PvcSource("loras", "a")))
    assert found and threading.main_thread() not in found


async def test_hung_file_system_uses_a_bounded_number_of_threads(tmp_path, monkeypatch):
    monkeypatch.setattr("quire_server.downloads.resumable_download.NO_ANSWER_TIMEOUT_S", 0.01)
    write_adapter_folder(tmp_path / "claim/a")
    begun, back, open_file = [], threading.Event(), os.open

    def hangs(path, *args, **options):
        if str(path).startswith(str(tmp_path / "claim")):
            begun.append(path)
            back.wait(20)
        return open_file(path, *args, **options)

    source = Source(pvc=PvcSource("loras", "a"))
    async with make_fetcher(tmp_path, pvcs={"loras": tmp_path / "claim"}) as f:
        with monkeypatch.context() as patch:
            patch.setattr("os.open", hangs)
            for _ in range(5):
                with pytest.raises(Unavailable, match="no response for"):
                    await f.fetch(source)
            with pytest.raises(Unavailable, match=r"pvc 'loras': '.*claim' does not respond; check its volume"):
                await f.fetch(source)
            assert len(begun) == 16
            back.set()
        monkeypatch.setattr("quire_server.downloads.resumable_download.NO_ANSWER_TIMEOUT_S", 60)
        while not await came_back(f, source):
            await asyncio.sleep(0.01)


async def came_back(f, source):
    try:
        return folder_content(await f.fetch(source)) == ADAPTER_FILES
    except Unavailable:
        return False


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/a\0b", "is not a path"),
        ("/\ud800", "is not a path"),
        ("relative/a", "absolute"),
        ("/tmp/../etc", "absolute"),
    ],
)
async def test_rejects_invalid_paths(tmp_path, path, words):
    with pytest.raises(InvalidArgument, match=words):
        await fetch(tmp_path, Source(path=path), allow_paths=True)


def _link(file):
    file.unlink()
    file.symlink_to("/etc/hostname")


def _fifo(file):
    file.unlink()
    os.mkfifo(file)


def _remove_folder(file):
    shutil.rmtree(file.parent)


@pytest.mark.parametrize(
    ("change", "options", "kind", "words"),
    [
        (_link, {}, InvalidArgument, "leads out of"),
        (_fifo, {}, InvalidArgument, "not a regular file"),
        (Path.unlink, {}, NotFound, rf"a/{WEIGHTS_FILE}.*does not exist"),
        (_remove_folder, {}, NotFound, "a.* does not exist"),
        (Path.touch, {"max_weights_bytes": len(WEIGHTS) - 1}, InvalidArgument, "maxAdapterBytes"),
        (Path.touch, {"allow_paths": False}, InvalidArgument, "quire serve"),
    ],
    ids=["link", "fifo", "missing-file", "missing-folder", "too-large", "not-allowed"],
)
async def test_rejects_invalid_folders(tmp_path, change, options, kind, words):
    """Also without blocking: opening a FIFO waits for its writer."""
    folder = write_adapter_folder(tmp_path / "a")
    change(folder / WEIGHTS_FILE)
    async with asyncio.timeout(5):
        with pytest.raises(kind, match=words):
            await fetch(tmp_path, Source(path=str(folder)), **{"allow_paths": True} | options)


async def test_config_size_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr("quire_server.adapters.fetcher._MAX_CONFIG_BYTES", 4)
    with pytest.raises(InvalidArgument, match=rf"{CONFIG_FILE}.*the limit is 4"):
        await fetch(tmp_path, Source(path=str(write_adapter_folder(tmp_path / "a"))), allow_paths=True)


async def test_claim_is_read_only_below_its_folder(tmp_path):
    write_adapter_folder(tmp_path / "claim/loras/a")
    outside = write_adapter_folder(tmp_path / "outside")
    (tmp_path / "claim/link").symlink_to(outside)
    (tmp_path / "claim/inner").symlink_to("loras/a")
    async with make_fetcher(tmp_path, pvcs={"loras": tmp_path / "claim"}) as f:
        assert folder_content(await f.fetch(Source(pvc=PvcSource("loras", "loras/a")))) == ADAPTER_FILES
        assert folder_content(await f.fetch(Source(pvc=PvcSource("loras", "inner")))) == ADAPTER_FILES
        with pytest.raises(InvalidArgument, match="leads out of"):
            await f.fetch(Source(pvc=PvcSource("loras", "link")))
        for path in ("../outside", "/etc", "loras/../../outside"):
            with pytest.raises(InvalidArgument, match=r"must not contain '\.\.'"):
                await f.fetch(Source(pvc=PvcSource("loras", path)))
        with pytest.raises(InvalidArgument, match="mounted: loras"):
            await f.fetch(Source(pvc=PvcSource("other")))


@pytest.mark.parametrize("in_place", [True, False], ids=["written over", "renamed"])
async def test_folder_that_changes_during_the_read_is_read_again(tmp_path, monkeypatch, in_place):
    """The config of one version may match the shapes of another version's weights, so that a mixture would load."""
    folder = write_adapter_folder(tmp_path / "a")
    new = {CONFIG_FILE: b'{"r": 8, "lora_alpha": 1}', WEIGHTS_FILE: WEIGHTS[::-1]}
    bring, num_changes = ResumableDownload.download, iter([1] if in_place else [1, 1])

    async def changed_between(self, place, partial, name):
        await bring(self, place, partial, name)
        if name == CONFIG_FILE and next(num_changes, None):
            for file, data in new.items():
                target = folder / file if in_place else folder / "new"
                target.write_bytes(data)
                target.rename(folder / file)

    monkeypatch.setattr(ResumableDownload, "download", changed_between)
    assert await fetch(tmp_path, Source(path=str(folder)), allow_paths=True) == new


async def test_folder_that_keeps_changing_is_rejected(tmp_path, monkeypatch):
    folder, bring = write_adapter_folder(tmp_path / "a"), ResumableDownload.download

    async def changed_after(self, place, partial, name):
        await bring(self, place, partial, name)
        (folder / name).write_bytes((folder / name).read_bytes() + b" ")

    monkeypatch.setattr(ResumableDownload, "download", changed_after)
    with pytest.raises(Unavailable, match="changed 3 times during the download; write the new adapter to"):
        await fetch(tmp_path, Source(path=str(folder)), allow_paths=True)
    assert not list((tmp_path / "cache/adapters").iterdir())


@pytest.mark.parametrize("subfolder", ["", "sql/"])
async def test_snapshot_of_the_hub_cache_is_read(subfolder, tmp_path):
    """Its files are links to the blobs of the same repository. Links to other repositories are refused."""
    repository, other = tmp_path / "hub/models--org--sql", tmp_path / "hub/models--org--other"
    blobs = write_adapter_folder(repository / "blobs")
    snapshot = repository / "snapshots" / "0123abcd"
    folder = snapshot / subfolder
    folder.mkdir(parents=True)
    for name in ADAPTER_FILES:
        (folder / name).symlink_to(os.path.relpath(blobs / name, folder))
    source = Source(path=f"{snapshot}/{subfolder}")
    assert await fetch(tmp_path, source, allow_paths=True) == ADAPTER_FILES
    shutil.move(write_adapter_folder(other / "blobs"), other / "blobs2")
    (folder / CONFIG_FILE).unlink()
    (folder / CONFIG_FILE).symlink_to(other / "blobs2" / CONFIG_FILE)
    with pytest.raises(InvalidArgument, match=r"is a link that leads out of '.*models--org--sql'; replace it"):
        await fetch(tmp_path / "second", source, allow_paths=True)
