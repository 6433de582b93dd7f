# SPDX-License-Identifier: Apache-2.0
"""The fetcher from folders and claims: what is copied, what is refused, what a file system that hangs costs."""

import asyncio
import os
import threading

import pytest
from support.fetching import ADAPTER_FILES, CONFIG, WEIGHTS, folder_content, make_fetcher, write_adapter_folder

from quire_server.downloads.resumable_download import ResumableDownload
from quire_spec.documents.adapter_catalog import PvcSource, Source
from quire_spec.documents.adapter_digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from quire_spec.errors import InvalidArgument, NotFound, Unavailable


async def test_what_is_being_hashed_is_not_written_to_by_the_next_fetch(tmp_path, monkeypatch):
    """A fetch that nobody wants any more is cancelled; the thread that makes an adapter of its files is not."""
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


async def test_a_folder_is_copied_so_that_later_changes_cannot_reach_what_was_hashed(tmp_path):
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


async def test_equal_content_from_two_places_is_one_adapter(tmp_path):
    one, two = write_adapter_folder(tmp_path / "a"), write_adapter_folder(tmp_path / "b")
    async with make_fetcher(tmp_path, allow_paths=True) as f:
        fetched = await asyncio.gather(*(f.fetch(Source(path=str(p))) for p in (one, two, one, two)))
    assert len({x.digest for x in fetched}) == 1
    assert os.listdir(tmp_path / "cache/adapters") == [fetched[0].digest]
    assert [p.name for p in (tmp_path / "cache/partial").iterdir() if p.suffix != ".lock"] == []


async def test_path_sources_must_be_allowed(tmp_path):
    folder = write_adapter_folder(tmp_path / "a")
    async with make_fetcher(tmp_path) as f:
        with pytest.raises(InvalidArgument, match="quire serve"):
            await f.fetch(Source(path=str(folder)))


async def test_a_file_system_that_hangs_holds_up_nobody_else(tmp_path, monkeypatch):
    """Neither its links nor its files are looked at in the event loop, which answers probes."""
    found, look = [], os.path.realpath

    def looked(path, **options):
        found.append(threading.current_thread())
        return look(path, **options)

    write_adapter_folder(tmp_path / "claim/a")
    async with make_fetcher(tmp_path, pvcs={"loras": tmp_path / "claim"}) as f:
        monkeypatch.setattr("os.path.realpath", looked)
        await f.fetch(Source(pvc=PvcSource("loras", "a")))
    assert found and threading.main_thread() not in found


async def test_a_file_system_that_hangs_for_long_has_so_many_threads_and_no_more(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("path", ["/a\0b", "/\ud800"])
async def test_what_is_no_path_is_said(tmp_path, path):
    async with make_fetcher(tmp_path, allow_paths=True) as f:
        with pytest.raises(InvalidArgument, match="is not a path"):
            await f.fetch(Source(path=path))


@pytest.mark.parametrize("path", ["relative/a", "/tmp/../etc"])
async def test_path_sources_are_absolute_without_dots(tmp_path, path):
    async with make_fetcher(tmp_path, allow_paths=True) as f:
        with pytest.raises(InvalidArgument, match="absolute"):
            await f.fetch(Source(path=path))


async def test_a_claim_is_read_below_its_folder_only(tmp_path):
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


async def test_a_file_that_links_out_of_its_folder_is_refused(tmp_path):
    folder = write_adapter_folder(tmp_path / "a")
    (folder / WEIGHTS_FILE).unlink()
    (folder / WEIGHTS_FILE).symlink_to("/etc/hostname")
    async with make_fetcher(tmp_path, allow_paths=True) as f:
        with pytest.raises(InvalidArgument, match="leads out of"):
            await f.fetch(Source(path=str(folder)))


@pytest.mark.parametrize("in_place", [True, False], ids=["written over", "renamed"])
async def test_a_folder_that_changes_while_it_is_read_is_read_again(tmp_path, monkeypatch, in_place):
    """The config of one adapter and the weights of another may fit by form, and be an adapter that nobody made."""
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
    async with make_fetcher(tmp_path, allow_paths=True) as f:
        assert folder_content(await f.fetch(Source(path=str(folder)))) == new


async def test_a_folder_that_never_rests_is_refused_with_what_to_do(tmp_path, monkeypatch):
    folder, bring = write_adapter_folder(tmp_path / "a"), ResumableDownload.download

    async def changed_after(self, place, partial, name):
        await bring(self, place, partial, name)
        (folder / name).write_bytes((folder / name).read_bytes() + b" ")

    monkeypatch.setattr(ResumableDownload, "download", changed_after)
    async with make_fetcher(tmp_path, allow_paths=True) as f:
        with pytest.raises(Unavailable, match="changed 3 times during the download; write a new adapter beside"):
            await f.fetch(Source(path=str(folder)))
    assert not list((tmp_path / "cache/adapters").iterdir())


async def test_a_fifo_is_refused_and_hangs_nobody(tmp_path):
    folder = write_adapter_folder(tmp_path / "a")
    (folder / WEIGHTS_FILE).unlink()
    os.mkfifo(folder / WEIGHTS_FILE)
    async with make_fetcher(tmp_path, allow_paths=True) as f, asyncio.timeout(5):
        with pytest.raises(InvalidArgument, match="not a regular file"):
            await f.fetch(Source(path=str(folder)))


async def test_missing_files_and_folders_are_named(tmp_path):
    folder = write_adapter_folder(tmp_path / "a")
    (folder / WEIGHTS_FILE).unlink()
    async with make_fetcher(tmp_path, allow_paths=True) as f:
        with pytest.raises(NotFound, match=rf"a/{WEIGHTS_FILE}.*does not exist"):
            await f.fetch(Source(path=str(folder)))
        with pytest.raises(NotFound, match="absent"):
            await f.fetch(Source(path=str(tmp_path / "absent")))


async def test_sizes_are_capped(tmp_path, monkeypatch):
    folder = write_adapter_folder(tmp_path / "a")
    async with make_fetcher(tmp_path, allow_paths=True, max_weights_bytes=len(WEIGHTS) - 1) as f:
        with pytest.raises(InvalidArgument, match="--max-adapter-bytes"):
            await f.fetch(Source(path=str(folder)))
    monkeypatch.setattr("quire_server.adapters.fetcher._MAX_CONFIG_BYTES", 4)
    async with make_fetcher(tmp_path, allow_paths=True) as f:
        with pytest.raises(InvalidArgument, match=rf"{CONFIG_FILE}.*the limit is 4"):
            await f.fetch(Source(path=str(folder)))
