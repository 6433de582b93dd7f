# SPDX-License-Identifier: Apache-2.0
"""The way of an adapter from catalogue to serving, with processes that refuse, die and come back at chosen moments."""

import asyncio
import json

import pytest
from support.supervisor_harness import adapter_folder, catalog

from quire_server.adapters import manager
from quire_server.adapters.manager import StaleCatalog
from quire_server.clients.handles import CoreHandle
from quire_spec.documents.adapter_catalog import AdapterCatalog, CatalogVersion
from quire_spec.errors import ConfigError, InvalidArgument


async def test_the_order_of_a_way(world, one):
    world.want(1, a=one)
    await world.until_states(a="Ready")
    digest = world.one("a").digest
    (load,) = world.core.names("load_adapter")
    assert load == {"digest": digest, "path": str(world.folder / "cache/adapters" / digest), "pinned": False}
    assert world.text.names("set_adapters") == [{"adapters": {"a": digest}, "limits": {}}]
    assert world.server.names("load_model") == ["a"]


async def test_limits_reach_text_and_change_without_a_load(world, one):
    for generation, limits in enumerate([{"maxConcurrentRequests": 4}, {"maxTokensPerSecond": 9}, None], 1):
        world.want(generation, a={"source": {"path": str(one)}, "limits": limits})
        await world.until_states(a="Ready")
        sent = {} if limits is None else {"a": {"maxConcurrentRequests": None, "maxTokensPerSecond": None} | limits}
        await world.until(lambda sent=sent: world.text.names("set_adapters")[-1]["limits"] == sent)
    assert len(world.core.names("load_adapter")) == 1
    assert len(world.text.names("set_adapters")) == 3


async def test_two_names_of_one_content_are_loaded_once_and_pinned_by_either(world, one):
    pinned = {"source": {"path": str(one)}, "pinned": True}
    world.want(1, a=one, b=pinned)
    await world.until_states(a="Ready", b="Ready")
    assert world.links.core.adapters == {world.one("a").digest: True}
    world.want(2, a=one)
    await world.until(lambda: world.links.core.adapters == {world.one("a").digest: False})
    assert "unload_adapter" not in [m for m, _ in world.core.calls]


@pytest.mark.parametrize("name", ["core", "text", "server"])
async def test_a_process_that_comes_back_gets_what_it_held(world, one, two, name):
    world.want(1, a=one, b=two)
    await world.until_states(a="Ready", b="Ready")
    since = world.one("a").since
    world.down(name)
    await world.until_states(a="Loading", b="Loading")
    world.up(name)
    await world.until_states(a="Ready", b="Ready")
    assert world.one("a").since >= since
    assert len(world.links.core.adapters) == len(world.links.text.aliases) == len(world.links.server.models) == 2


async def test_a_process_that_dies_during_a_call_is_no_failure_of_the_adapter(world, one):
    world.core.gate.clear()
    world.want(1, a=one)
    await world.until(lambda: world.core.calls)
    core = world.core
    world.down("core")
    core.gate.set()
    await world.until_states(a="Loading")
    world.up("core")
    await world.until_states(a="Ready")
    assert world.one("a").error == ""


async def test_an_adapter_that_the_core_refuses_is_not_tried_again_until_the_catalogue_changes(world, one, two):
    world.core.refuse["load_adapter"] = InvalidArgument(f"adapter '{world.folder}': rank 64 exceeds 16")
    world.want(1, a=one)
    await world.until_states(a="Failed")
    assert "rank 64" in world.one("a").error
    for _ in range(3):
        world.board.resync()
        await asyncio.sleep(0.02)
    world.want(1, a=one)
    await asyncio.sleep(0.05)
    assert len(world.core.names("load_adapter")) == 1
    world.want(2, a=two)
    await world.until(lambda: len(world.core.names("load_adapter")) == 2)
    world.core.refuse.clear()
    world.want(3, a=one)
    await world.until_states(a="Ready")


async def test_a_broken_adapter_holds_up_nobody(world, one):
    world.want(1, broken="/nowhere", a=one)
    await world.until_states(a="Ready", broken="Failed")


@pytest.mark.parametrize("name", ["core", "text"])
async def test_names_answer_only_while_their_processes_hold_them(world, one, name):
    world.want(1, a={"source": {"path": str(one)}, "pinned": True})
    await world.until_states(a="Ready")
    world.down(name)
    assert world.board.served_names() == set()
    world.up(name)
    assert world.board.served_names() == set()
    await world.until(lambda: world.board.served_names() == {"a"})


async def test_the_digest_tells_catalogues_apart_and_generations_not(world, one, two):
    assert world.board.catalog_version == CatalogVersion(0, "")
    world.want(1, a=one)
    first = world.board.catalog_version.digest
    world.want(2, a=one)
    assert world.board.catalog_version.digest == first == AdapterCatalog.from_json(catalog(9, a=one)).version.digest
    world.want(3, a=two)
    assert world.board.catalog_version.digest != first


async def test_a_model_is_loaded_again_for_its_stub_that_died_and_not_for_one_that_it_had_before(world, one):
    """Of a model that was removed and has come back, the server may be slow to reap the stub that it has ended."""
    world.want(1, a=one)
    await world.until_states(a="Ready")
    server = world.links.server
    for replaced, loads in ((True, ["a"]), (False, ["a", "a"])):
        await server.reload_model("a", lambda replaced=replaced: replaced)
        assert world.server.names("load_model") == loads


async def test_the_hold_ends_with_the_last_adapter_or_with_time(world, one, two, monkeypatch):
    world.core.gate.clear()
    world.want(1, a=one, b=two)
    world.board.gate_readiness()
    assert world.board.gating() == ["a", "b"]
    world.want(2, a=one, b=two, later=one)
    assert world.board.gating() == ["a", "b"], "what comes later holds up nothing"
    monkeypatch.setattr(manager, "READINESS_GATE_S", -1.0)
    world.board.gate_readiness()
    assert world.board.gating() == []
    monkeypatch.setattr(manager, "READINESS_GATE_S", 100.0)
    world.board.gate_readiness()
    world.core.gate.set()
    await world.until(lambda: not world.board.gating())
    await world.until_states(a="Ready", b="Ready", later="Ready")


async def test_catalogues_that_are_refused_change_nothing(world, one):
    world.want(5, a=one)
    with pytest.raises(StaleCatalog, match="4 is older than 5"):
        world.want(4)
    with pytest.raises(ConfigError, match="base model's name"):
        world.want(6, tales=one)
    await world.until_states(a="Ready")
    assert world.board.catalog_version.generation == 5


async def test_an_older_catalogue_is_taken_in_the_place_of_the_one_that_it_names(world, one):
    world.want(5, a=one)
    mark = world.board.catalog_version.digest
    for replaces in ("sha256:0", ""):
        with pytest.raises(StaleCatalog, match="2 is older than 5"):
            world.board.set_catalog(AdapterCatalog(2), replaces)
    world.board.set_catalog(AdapterCatalog(2), mark)
    assert world.board.catalog_version.generation == 2 and world.board.statuses() == []
    with pytest.raises(StaleCatalog, match="1 is older than 2"):
        world.board.set_catalog(AdapterCatalog(1), mark)


async def test_a_defect_fails_one_adapter_and_is_logged(world, one, two, monkeypatch, caplog):
    load = CoreHandle.load_adapter

    async def broken(self, digest, folder, pinned):
        if json.loads((folder / "adapter_config.json").read_text())["r"] == 3:
            raise KeyError("oops")
        await load(self, digest, folder, pinned)

    monkeypatch.setattr(CoreHandle, "load_adapter", broken)
    adapter_folder(two, rank=3)
    world.want(1, a=one, b=two)
    await world.until_states(a="Ready", b="Failed")
    assert world.one("b").error == "KeyError: 'oops'"
    assert "oops" in caplog.text
