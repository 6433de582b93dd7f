# SPDX-License-Identifier: Apache-2.0
"""The adapter cache, while other owners share and prune it."""

import asyncio
import os
import shutil
import time
from pathlib import Path

import pytest
from support.fake_sources import start_server
from support.fetching import ADAPTER_FILES, CONFIG, folder_content, make_fetcher, write_adapter_folder

from quire_server.adapters.fetcher import AdapterFetcher
from quire_server.downloads.adapter_cache import AdapterCache
from quire_sources.factory import SourceOptions
from quire_spec.documents.adapter_digest import CONFIG_FILE
from quire_spec.documents.sources import HttpSource, Source
from quire_spec.errors import Unavailable


async def test_killed_prune_leaves_no_half_adapter(tmp_path, monkeypatch):
    source = Source(path=str(write_adapter_folder(tmp_path / "a")))
    async with make_fetcher(tmp_path, allow_paths=True) as f:
        fetched = await f.fetch(source)
        os.utime(fetched.folder, (1, 1))

        def killed(path):
            (Path(path) / CONFIG_FILE).unlink()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("shutil.rmtree", killed)
            f.prune_cache(set())
    async with make_fetcher(tmp_path, allow_paths=True) as f:
        assert folder_content(await f.fetch(source)) == ADAPTER_FILES
        for path in (tmp_path / "cache/partial").iterdir():
            os.utime(path, (1, 1))
        f.prune_cache({fetched.digest})
    assert list((tmp_path / "cache/partial").iterdir()) == []


async def test_adapter_pruned_by_another_owner_is_fetched_again(tmp_path, web, monkeypatch):
    source, sweeping = Source(http=HttpSource(web.url)), []
    async with make_fetcher(tmp_path) as f:
        fetched = await f.fetch(source)
        handle = web.handle

        async def swept(request):
            if request.method == "HEAD" and not sweeping:
                os.utime(fetched.folder, (1, 1))
                sweeping.extend(AdapterCache(tmp_path / "cache").prune(set()))
            return await handle(request)

        server = await start_server(swept)
        monkeypatch.setattr("quire_server.adapters.fetcher.source_key", lambda source: "one")
        await f.fetch(source)
        assert (
            folder_content(await f.fetch(Source(http=HttpSource(str(server.make_url("/loras/sql")))))) == ADAPTER_FILES
        )
        assert sweeping == [fetched.digest]
        await server.close()


def test_adapter_touched_during_prune_stays(tmp_path, monkeypatch):
    cache = AdapterCache(tmp_path / "cache")
    write_adapter_folder(cache.folder("sha256:0"))
    os.utime(cache.folder("sha256:0"), (1, 1))
    rename = Path.rename

    def used_first(path, target):
        if path == cache.folder("sha256:0"):
            assert AdapterCache(tmp_path / "cache").touch("sha256:0")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", used_first)
    assert cache.prune(set()) == []
    assert os.listdir(cache.folder("sha256:0"))
    assert not cache.touch("sha256:1")


async def test_prune_removes_abandoned_partials_but_not_running_ones(tmp_path):
    cache, folder = AdapterCache(tmp_path / "cache"), write_adapter_folder(tmp_path / "a")
    async with AdapterFetcher(cache, SourceOptions(allow_paths=True)) as f:
        fetched = await f.fetch(Source(path=str(folder)))
    shutil.rmtree(fetched.folder)
    with cache.partial("now") as now, cache.partial("then") as then:
        for partial in (now, then):
            partial.record_version(CONFIG_FILE, "1")
            (partial.folder / CONFIG_FILE).write_bytes(CONFIG)
    everything = [*(tmp_path / "cache/partial").iterdir(), *(tmp_path / "cache/sources").iterdir()]
    with cache.partial("now"):
        for path in everything:
            os.utime(path, (1, 1))
        cache.prune(set())
        assert {path.name for path in (tmp_path / "cache/partial").iterdir()} == {"now", "now.json", "now.lock"}
        assert list((tmp_path / "cache/sources").iterdir()) == []


async def test_full_disk_error_names_the_fix(tmp_path, monkeypatch):
    folder = write_adapter_folder(tmp_path / "a")

    def full(*_):
        raise OSError(28, "No space left on device")

    async with make_fetcher(tmp_path, allow_paths=True) as f:
        monkeypatch.setattr("quire_server.downloads.adapter_cache.PartialDownload.record_version", full)
        with pytest.raises(Unavailable, match=r"No space left.*--cache-dir"):
            await f.fetch(Source(path=str(folder)))


async def test_read_only_cache_is_usable(tmp_path, monkeypatch):
    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    source = Source(path=str(write_adapter_folder(tmp_path / "a")))
    async with make_fetcher(tmp_path, allow_paths=True) as f:
        fetched = await f.fetch(source)
        monkeypatch.setattr("os.utime", read_only)
        monkeypatch.setattr("quire_server.downloads.adapter_cache.AdapterCache.partial", read_only)
        assert await f.fetch(source) == fetched
        with pytest.raises(
            Unavailable, match=r"cache: .*Read-only file system; free some space, or use another --cache"
        ):
            await f.fetch(Source(path=str(write_adapter_folder(tmp_path / "b"))))


async def test_two_supervisors_share_a_cache(tmp_path):
    folder = write_adapter_folder(tmp_path / "a")
    async with make_fetcher(tmp_path, allow_paths=True) as one, make_fetcher(tmp_path, allow_paths=True) as two:
        fetched = await asyncio.gather(*(f.fetch(Source(path=str(folder))) for f in (one, two)))
    assert fetched[0] == fetched[1]
    assert folder_content(fetched[0]) == ADAPTER_FILES


async def test_prune_removes_only_old_unused_adapters(tmp_path):
    cache = AdapterCache(tmp_path / "cache")
    async with AdapterFetcher(cache, SourceOptions(allow_paths=True)) as f:
        fetched = [
            await f.fetch(Source(path=str(write_adapter_folder(tmp_path / str(i), config=b"%d" % i)))) for i in range(3)
        ]
    used, old, young = (x.digest for x in fetched)
    for digest in (used, old):
        os.utime(cache.folder(digest), (1, 1))
    assert cache.prune({used}) == [old]
    assert {used, young} == set(os.listdir(tmp_path / "cache/adapters"))
    assert cache.folder(used).stat().st_mtime > time.time() - 60
    shutil.rmtree(cache.folder(young))
