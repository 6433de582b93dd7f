# SPDX-License-Identifier: Apache-2.0
"""Adapters that are found by name in adapter sources: folders, web servers and buckets, with in-memory processes."""

import asyncio
import json
import os
from dataclasses import replace

import pytest
from support.fake_sources import FakeHttpServer, FakeHub, FakeS3
from support.fetching import files_under
from support.source_fixtures import isolated_sources  # noqa: F401
from support.supervisor_harness import adapter_folder, catalog

from quire_server.adapters import on_demand
from quire_server.adapters.fetcher import AdapterFetcher
from quire_server.adapters.on_demand import OnDemandAdapters
from quire_sources.factory import SourceOptions
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.errors import InvalidArgument, NotFound, Unavailable


@pytest.fixture
def prefix(tmp_path):
    folder = tmp_path / "prefix"
    for name in ("a", "b", "c", "d"):
        adapter_folder(folder / name, weights=name.encode() * 1000)
    return folder


class Finder:
    """The on-demand adapters of a pod, and what they leave on the disk."""

    def __init__(self, pod, adapters, folder):
        self.pod, self.adapters, self.folder = pod, adapters, folder
        self.find = adapters.find_adapter
        self.generation = 0

    def set_sources(self, *sources, **folders):
        self.generation += 1
        document = catalog(self.generation, **folders) | {"sources": [*sources]}
        self.pod.manager.set_catalog(AdapterCatalog.from_json(document))

    @property
    def names(self):
        """The names that the text process knows."""
        return sorted(self.pod.handles.text.digest_by_name)

    def cached(self):
        return sorted(path.name for path in self.folder.glob("*/adapters/*"))

    def files(self):
        return [path for path in self.folder.rglob("*") if path.is_file()]

    def idle(self, **seconds):
        self.pod.text.results["adapter_idle_times"] = seconds


@pytest.fixture
async def finder(pod, tmp_path, monkeypatch):
    monkeypatch.setattr(on_demand, "_RECLAIM_INTERVAL_S", 0.01)
    options = SourceOptions(pvcs={"claim": tmp_path}, allow_paths=True)
    async with OnDemandAdapters(pod.manager, pod.handles, tmp_path / "on-demand", options, 2**30) as adapters:
        task = asyncio.create_task(adapters.run())
        finder = Finder(pod, adapters, tmp_path / "on-demand")
        finder.idle()
        yield finder
        task.cancel()
        # Before the processes of `pod` end, because lookups wait for them.
        await pod.manager.close()


def path(folder, **fields):
    return {"path": str(folder), **fields}


async def test_an_adapter_is_found_once_and_served_by_name(finder, prefix):
    finder.set_sources(path(prefix))
    await asyncio.gather(*(finder.find("a", f"client-{i}") for i in range(20)))
    assert finder.names == ["a"] and finder.pod.states() == {}, "the status lists only the catalog"
    assert len(finder.pod.core.names("load_adapter")) == 1 and len(finder.cached()) == 1
    await finder.find("a", "")
    assert finder.adapters.status() == on_demand.OnDemandStatus(1, len(json.dumps({"r": 8})) + 1000)
    assert finder.pod.text.names("set_adapters")[-1]["findable_names"] == ("*",)


@pytest.mark.parametrize("name", ["absent", "..", "a/../b", ".hidden", "", "x" * 64, "a\0", "a%2e%2e"])
async def test_a_name_that_no_source_has_leaves_nothing(finder, prefix, name):
    finder.set_sources(path(prefix))
    with pytest.raises((NotFound, InvalidArgument), match=r"no adapter source has|is not a model name"):
        await finder.find(name, "")
    assert finder.files() == [] and finder.names == []


async def test_names_are_found_only_where_the_pattern_allows_it(finder, prefix, tmp_path):
    adapter_folder(tmp_path / "second" / "a", weights=b"second")
    finder.set_sources(path(prefix, allow="[bc]"), path(tmp_path / "second", allow="a*"))
    await finder.find("a", "")
    assert (tmp_path / "second" / "a" / "adapter_model.safetensors").read_bytes() in {
        p.read_bytes() for p in finder.files()
    }
    with pytest.raises(NotFound):
        await finder.find("d", "")


async def test_links_lead_only_within_the_prefix(finder, prefix, tmp_path):
    adapter_folder(tmp_path / "private")
    (prefix / "outside").symlink_to(tmp_path / "private")
    (prefix / "inside").symlink_to(prefix / "a")
    for source in (path(prefix), {"pvc": {"claimName": "claim", "path": "prefix"}}):
        finder.set_sources(source)
        with pytest.raises(InvalidArgument, match=r"is a link that leads out of .*prefix'; replace it with a copy"):
            await finder.find("outside", "")
        await finder.find("inside", "")


async def test_the_effect_is_probed_only_if_an_adapter_could_be_refused(finder, prefix):
    finder.set_sources(path(prefix))
    await finder.find("a", "")
    assert finder.pod.core.names("verify_adapter") == []
    document = catalog(9) | {"sources": [path(prefix)], "onNoEffect": "Refuse"}
    finder.pod.manager.set_catalog(AdapterCatalog.from_json(document))
    await finder.find("b", "")
    assert len(finder.pod.core.names("verify_adapter")) == 1


async def test_an_invalid_adapter_is_refused_and_may_be_corrected(finder, prefix):
    finder.set_sources(path(prefix))
    finder.pod.core.errors["load_adapter"] = InvalidArgument("rank must be positive, got 0")
    with pytest.raises(InvalidArgument, match="rank must be positive"):
        await finder.find("a", "")
    del finder.pod.core.errors["load_adapter"]
    await finder.find("a", "")
    assert finder.names == ["a"]


async def test_an_adapter_that_is_too_large_is_refused(finder, prefix):
    finder.set_sources(path(prefix, maxBytes=500))
    with pytest.raises(InvalidArgument, match="the limit is 500"):
        await finder.find("a", "")
    finder.set_sources(path(prefix, maxBytes=1005))
    with pytest.raises(InvalidArgument, match="has 1008 bytes, but its adapter source may have 1005 in total"):
        await finder.find("a", "")
    await finder.pod.until(lambda: finder.cached() == [])


async def test_the_least_recently_used_adapter_leaves_with_its_files(finder, prefix):
    finder.set_sources(path(prefix, maxAdapters=2, maxBytes=2100))
    for name in ("a", "b"):
        await finder.find(name, "")
    finder.idle(a=0.0001)
    await finder.find("c", "")
    await finder.pod.until(lambda: finder.names == ["a", "c"])
    await finder.pod.until(lambda: len(finder.cached()) == 2)
    assert len(finder.pod.core.names("unload_adapter")) == 1
    finder.idle(a=0.0, c=0.0)
    with pytest.raises(Unavailable, match="no room, because the other adapters of its source have open requests"):
        await finder.find("d", "")
    assert finder.names == ["a", "c"]


async def test_a_client_with_many_names_keeps_the_adapters_of_others(finder, prefix):
    finder.set_sources(path(prefix, maxAdapters=2))
    await finder.find("a", "calm")
    for name in ("b", "c", "d", "b", "c"):
        await finder.find(name, "flood")
        assert "a" in finder.names
    with pytest.raises(NotFound):
        await finder.find("absent", "flood")
    assert "a" in finder.names


async def test_a_restarted_process_gets_the_adapters_back(finder, prefix):
    finder.set_sources(path(prefix))
    await finder.find("a", "")
    for process in ("core", "text"):
        finder.pod.down(process)
        finder.pod.up(process)
        finder.idle()
        await asyncio.wait_for(finder.find("a", ""), 5)
        assert finder.names == ["a"]
    assert len(finder.pod.core.names("load_adapter")) == 1


async def test_adapters_leave_with_their_source(finder, prefix, tmp_path, one):
    finder.set_sources(path(prefix))
    await finder.find("a", "")
    await finder.find("b", "")
    finder.set_sources(path(prefix, allow="a"))
    await finder.pod.until(lambda: finder.names == ["a"])
    finder.set_sources(a=one)
    await finder.pod.until_states(a="Ready")
    assert finder.adapters.status() == on_demand.OnDemandStatus(0, 0), "the catalog has the name now"
    with pytest.raises(NotFound):
        await finder.find("b", "")


async def test_the_catalog_decides_about_its_names(finder, prefix, tmp_path):
    finder.set_sources(path(prefix), a=tmp_path / "absent")
    await finder.pod.until_states(a="Failed")
    with pytest.raises(NotFound, match="the adapter of the catalog is not served"):
        await finder.find("a", "")
    adapter_folder(prefix / "tales")
    with pytest.raises(InvalidArgument, match="is the base model's name"):
        await finder.find("tales", "")


async def test_ready_does_not_count_adapters_on_demand(finder, prefix):
    finder.set_sources(path(prefix))
    finder.pod.core.gate.clear()
    lookup = asyncio.create_task(finder.find("a", ""))
    await finder.pod.until(lambda: finder.pod.core.names("load_adapter"))
    finder.pod.manager.gate_readiness()
    assert finder.pod.manager.gating() == [] and finder.pod.manager.unsettled() == []
    finder.pod.core.gate.set()
    await lookup


async def test_a_source_that_does_not_answer_is_not_a_missing_name(finder, prefix, serve, monkeypatch):
    monkeypatch.setattr("quire_server.downloads.resumable_download._MAX_ATTEMPTS", 1)
    web = FakeHttpServer(files_under("/loras/web"))
    url = await serve(web.handle)
    finder.set_sources({"http": {"url": f"{url}/loras"}}, path(prefix))
    web.is_down = True
    await finder.find("a", "")  # the second source has it
    with pytest.raises(Unavailable, match="503"):
        await finder.find("web", "")
    web.is_down = False
    await finder.find("web", "")
    web.requests.clear()
    with pytest.raises(NotFound):
        await finder.find("absent", "")
    assert [(r.method, r.path) for r in web.requests] == [("HEAD", "/loras/absent/adapter_config.json")]


async def test_a_bucket_and_a_signed_url(finder, tmp_path, serve):
    bucket = FakeS3(FakeHttpServer(files_under("/models/loras/sql")), None, "")
    endpoint = await serve(bucket.handle)
    web = FakeHttpServer(files_under("/loras/web"))
    url = await serve(web.handle)
    s3 = {"uri": "s3://models/loras/", "endpoint": endpoint, "region": "eu-central-1"}
    finder.set_sources({"s3": s3}, {"http": {"url": f"{url}/loras/?token=x"}})
    await finder.find("sql", "")
    await finder.find("web", "")
    assert finder.names == ["sql", "web"]
    assert {r.query_string for r in web.requests} == {"token=x"}
    with pytest.raises(NotFound):
        await finder.find("absent", "")


async def test_another_supervisor_has_another_cache(tmp_path):
    folders = {on_demand.private_folder(tmp_path, tmp_path / run) for run in ("x", "y")}
    assert len(folders) == 2


async def test_a_source_that_changes_while_it_is_read(finder, prefix, monkeypatch):
    """Both files are of the same version."""
    config, weights = prefix / "a" / "adapter_config.json", prefix / "a" / "adapter_model.safetensors"
    download = AdapterFetcher._download

    async def download_and_change(self, reader, partial, name):
        await download(self, reader, partial, name)
        if json.loads(config.read_text())["r"] == 8:
            weights.write_bytes(b"new" * 300)
            config.write_text(json.dumps({"r": 16}))

    monkeypatch.setattr(AdapterFetcher, "_download", download_and_change)
    finder.set_sources(path(prefix))
    await finder.find("a", "")
    contents = {p.name: p.read_bytes() for p in finder.files() if p.parent.parent.name == "adapters"}
    assert json.loads(contents["adapter_config.json"]) == {"r": 16}
    assert contents["adapter_model.safetensors"] == b"new" * 300


async def test_files_of_an_earlier_process_count(finder, prefix, pod):
    finder.set_sources(path(prefix, maxBytes=2100))
    for name in ("a", "b"):
        await finder.find(name, "")
    finder.set_sources()
    await finder.pod.until(lambda: finder.names == [])
    assert len(finder.cached()) == 2, "kept for the next request"
    finder.set_sources(path(prefix, maxBytes=1100))
    await finder.find("c", "")
    await finder.pod.until(lambda: len(finder.cached()) == 1)


async def test_an_organization_of_the_hub(finder, tmp_path, serve):
    files = FakeHttpServer(files_under())
    cdn = (await serve(files.handle)).replace("127.0.0.1", "localhost")
    hub = FakeHub(files, "org/sql-lora", "0" * 40, "hf_s3cr3t", cdn)
    (tmp_path / "secrets/hf").mkdir(parents=True)
    (tmp_path / "secrets/hf/token").write_text("hf_s3cr3t")
    options = {"hub_endpoint": await serve(hub.handle), "secrets_dir": tmp_path / "secrets"}
    finder.adapters._options = replace(finder.adapters._options, **options)
    finder.set_sources({"huggingFace": {"organization": "org", "tokenSecretRef": {"name": "hf"}}})
    await finder.find("sql-lora", "")
    assert finder.names == ["sql-lora"]
    for name in ("absent", "a..b", "a--b"):
        with pytest.raises((NotFound, InvalidArgument)):
            await finder.find(name, "")


async def test_interrupted_downloads_do_not_stay_forever(finder, prefix, monkeypatch):
    monkeypatch.setattr(on_demand, "_PRUNE_INTERVAL_S", 0.05)
    finder.set_sources(path(prefix))
    await finder.find("a", "")
    [cache] = finder.folder.iterdir()
    partial = cache / "partial" / "interrupted"
    partial.mkdir()
    (partial / "adapter_model.safetensors").write_bytes(b"x" * 100)
    partial.with_suffix(".lock").touch()
    os.utime(partial.with_suffix(".lock"), (0, 0))
    await finder.find("b", "")
    await finder.pod.until(lambda: not partial.exists())
    assert finder.names == ["a", "b"] and len(finder.cached()) == 2
