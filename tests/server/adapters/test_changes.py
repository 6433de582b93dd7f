# SPDX-License-Identifier: Apache-2.0
"""Adapters that are replaced, taken away and brought back, with processes that refuse or die meanwhile."""

import asyncio
import json

from support.fake_sources import FakeHttpServer, start_server
from support.supervisor_harness import adapter_folder

from quire_server.adapters import manager
from quire_server.clients.handles import CoreHandle
from quire_spec.errors import Internal, InvalidArgument, Unavailable


async def test_replacement_switches_the_name_only_when_the_new_content_is_loaded(world, one, two):
    world.want(1, a=one)
    await world.until_states(a="Ready")
    old = world.one("a").digest
    world.core.gate.clear()
    world.want(2, a=two)
    await world.until(lambda: len(world.core.calls) == 2)
    await asyncio.sleep(0.05)
    assert (world.one("a").state, world.one("a").digest, world.links.text.aliases) == ("Loading", old, {"a": old})
    world.core.gate.set()
    await world.until_states(a="Ready")
    new = world.one("a").digest
    await world.until(lambda: world.links.core.adapters == {new: False})
    assert [m for m, _ in world.core.calls] == ["load_adapter", "load_adapter", "unload_adapter"]
    assert world.links.text.aliases == {"a": new}
    assert world.server.names("load_model") == ["a"], "the server's model stays"


async def test_a_replaced_adapter_is_never_called_ready_with_the_content_before(world, one, two):
    world.want(1, a=one)
    await world.until_states(a="Ready")
    world.want(2, a=two)
    # Before any task has run: the operator may ask right after it has told.
    assert world.states() == {"a": "Fetching"}
    assert world.board.served_names() == {"a"}, "the one before still answers"
    world.want(3, a=one)
    assert world.states() == {"a": "Fetching"}
    await world.until_states(a="Ready")
    world.want(4)
    assert world.board.served_names() == set()
    world.want(5, a=one)
    assert world.states() == {"a": "Fetching"}, "it may be half gone"
    await world.until_states(a="Ready")


async def test_a_failed_adapter_with_another_source_is_not_called_failed_any_more(world, tmp_path, one):
    world.want(1, a=tmp_path / "nothing")
    await world.until_states(a="Failed")
    world.want(2, a=one)
    assert (world.one("a").state, world.one("a").error) == ("Fetching", "")
    await world.until_states(a="Ready")


async def test_new_content_at_the_same_place_is_taken_with_the_next_generation(world, one):
    world.want(1, a=one)
    await world.until_states(a="Ready")
    old = world.one("a").digest
    adapter_folder(one, weights=b"changed")
    world.want(1, a=one)
    await asyncio.sleep(0.05)
    assert world.one("a").digest == old, "the same catalogue again"
    world.want(2, a=one)
    await world.until(lambda: world.one("a").digest != old)
    await world.until_states(a="Ready")


async def test_removal_takes_the_model_then_the_name_then_the_content(world, one, two):
    world.want(1, a=one, b=two)
    await world.until_states(a="Ready", b="Ready")
    kept = world.one("b").digest
    world.want(2, b=two)
    assert world.states() == {"b": "Ready"}
    await world.until(lambda: world.links.core.adapters == {kept: False})
    assert world.server.calls[-1] == ("unload_model", "a")
    assert world.text.calls[-1] == ("set_adapters", {"adapters": {"b": kept}, "limits": {}})
    assert world.core.calls[-1][0] == "unload_adapter"


async def test_an_adapter_that_comes_back_while_it_is_being_removed(world, one):
    world.want(1, a=one)
    await world.until_states(a="Ready")
    world.server.gate.clear()
    world.want(2)
    await world.until(lambda: world.server.names("unload_model"))
    world.want(3, a=one)
    world.server.gate.set()
    await world.until(lambda: world.links.server.models == {"a"} and world.states() == {"a": "Ready"})
    await asyncio.sleep(0.1)
    assert list(world.links.core.adapters) == [world.one("a").digest]


async def test_a_removal_that_fails_is_tried_again(world, one, monkeypatch):
    monkeypatch.setattr(manager, "_CONNECTION_RETRY_S", 0.02)
    world.want(1, a=one)
    await world.until_states(a="Ready")
    world.server.refuse["unload_model"] = Internal("busy")
    world.want(2)
    await world.until(lambda: len(world.server.names("unload_model")) >= 2)
    world.server.refuse.clear()
    await world.until(lambda: not world.links.server.models and not world.links.core.adapters)


async def test_unloading_that_fails_is_not_forgotten(world, one, two):
    world.want(1, a=one)
    await world.until_states(a="Ready")
    world.core.refuse["unload_adapter"] = Unavailable("no answer")
    world.want(2, a=two)
    await world.until(lambda: world.core.names("unload_adapter"))
    assert len(world.links.core.adapters) == 2
    world.core.refuse.clear()
    world.want(3)
    await world.until(lambda: not world.links.core.adapters)


async def test_a_change_that_is_taken_back_at_once_is_no_end_of_the_adapter(world, one):
    files = FakeHttpServer({"/a/adapter_config.json": b'{"r": 8}', "/a/adapter_model.safetensors": b"w"})
    asked, hung = asyncio.Event(), asyncio.Event()

    async def slow(request):
        asked.set()
        await hung.wait()
        return await files.handle(request)

    server = await start_server(slow)
    there = {"source": {"http": {"url": str(server.make_url("/a"))}}}
    world.want(1, a=there)
    await asked.wait()
    world.want(2, a=one)
    world.want(3, a=there)
    hung.set()
    await world.until_states(a="Ready")
    await server.close()


async def test_what_fails_when_it_is_not_wanted_any_more_does_not_block_what_is(world, one, two, monkeypatch):
    load = CoreHandle.load_adapter

    async def picky(self, digest, folder, pinned):
        await load(self, digest, folder, pinned)
        if json.loads((folder / "adapter_config.json").read_text())["r"] == 3:
            raise InvalidArgument("rank 3 is no power of two")

    monkeypatch.setattr(CoreHandle, "load_adapter", picky)
    world.core.gate.clear()
    world.want(1, a=adapter_folder(two, rank=3))
    await world.until(lambda: world.core.calls)
    world.want(2, a=one)
    world.core.gate.set()
    await world.until_states(a="Ready")


async def test_a_catalogue_that_comes_while_the_one_before_is_put_back_is_worked_on(world, one, two, tmp_path):
    world.want(1, a=one)
    await world.until_states(a="Ready")
    world.core.refuse["load_adapter"] = InvalidArgument("rank 64 exceeds 16")
    world.server.gate.clear()
    world.want(2, a={"source": {"path": str(two)}, "expose": "Parameter"})
    await world.until(lambda: world.server.names("unload_model"))
    world.core.refuse.clear()
    world.want(3, a=adapter_folder(tmp_path / "three", weights=b"3"))
    world.server.gate.set()
    await world.until_states(a="Ready")


async def test_a_content_stays_loaded_until_text_has_been_told_of_the_next(world, one, two, monkeypatch):
    monkeypatch.setattr(manager, "UNLOAD_DELAY_S", 0.3)
    world.want(1, a=one, b=two)
    await world.until_states(a="Ready", b="Ready")
    old = world.one("a").digest
    world.want(2, a=one)
    await world.until(lambda: len(world.text.calls) > 2 or world.links.text.aliases == {"a": old})
    world.text.gate.clear()
    world.want(3, a=two)
    await world.until(lambda: world.one("a").digest != old)
    await asyncio.sleep(0.6)
    assert old in world.links.core.adapters, "text still sends requests for it"
    world.text.gate.set()
    await world.until(lambda: list(world.links.core.adapters) == [world.one("a").digest])


async def test_a_content_is_not_pinned_for_a_name_that_has_left_it(world, one, two):
    pinned = {"pinned": True}
    world.want(1, a={"source": {"path": str(one)}} | pinned, b=one)
    await world.until_states(a="Ready", b="Ready")
    shared = world.one("b").digest
    assert world.links.core.adapters == {shared: True}
    world.want(2, a={"source": {"path": str(two)}} | pinned, b=one)
    await world.until_states(a="Ready", b="Ready")
    await world.until(lambda: world.links.core.adapters == {shared: False, world.one("a").digest: True})


async def test_what_cannot_be_put_back_at_once_is_put_back_later(world, one, two, monkeypatch):
    monkeypatch.setattr(manager, "_CONNECTION_RETRY_S", 0.02)
    world.want(1, a=one)
    await world.until_states(a="Ready")
    world.core.refuse["load_adapter"] = InvalidArgument("rank 64 exceeds 16")
    world.want(2, a=two)
    await world.until_states(a="Failed")
    world.down("core")
    world.up("core")
    world.core.refuse["load_adapter"] = Unavailable("no memory")
    await world.until(lambda: world.core.calls)
    assert world.board.served_names() == set()
    world.core.refuse.clear()
    await world.until(lambda: world.board.served_names() == {"a"})


async def test_a_name_that_returns_to_what_text_still_has_is_not_moved_by_the_next_call(world, one, two, monkeypatch):
    monkeypatch.setattr(manager, "UNLOAD_DELAY_S", 9.0)
    three = adapter_folder(world.folder / "three", weights=b"3")
    world.want(1, a=one, b=two)
    await world.until_states(a="Ready", b="Ready")
    first = world.one("a").digest
    world.core.gate.clear()
    world.want(2, a=three, b=two)
    await world.until(lambda: len(world.core.calls) == 3)
    world.down("text")
    world.up("text")
    await world.until(lambda: len(world.links.text.aliases) == 2)
    # Loaded, and told to the text process of before; then it is not wanted any more.
    world.core.gate.set()
    world.want(3, a=one, b=two)
    await world.until_states(a="Ready", b="Ready")
    assert world.one("a").digest == first
    world.want(4, a=one, b=three)
    await world.until_states(a="Ready", b="Ready")
    assert world.links.text.aliases["a"] == first


async def test_text_is_told_that_there_is_no_name(world, two):
    """Else it would call every name one that is not announced yet, for ever."""
    told = [{"adapters": {}, "limits": {}}]
    world.want(1)
    await world.until(lambda: world.text.names("set_adapters") == told)
    world.down("text")
    world.up("text")
    await world.until(lambda: world.text.names("set_adapters") == told)
    world.want(2, a=two / "nowhere")
    world.down("text")
    world.up("text")
    await world.until_states(a="Failed")
    await world.until(lambda: world.text.names("set_adapters") == told)
    # One that is not tried again, as it is wrong in itself.
    world.down("text")
    world.up("text")
    await world.until(lambda: world.text.names("set_adapters") == told)


async def test_a_load_that_took_too_long_for_us_is_unloaded_when_nobody_wants_it(world, two):
    """The core may have finished it all the same, and a pinned one would keep its slot for ever."""
    world.core.refuse["load_adapter"] = Unavailable("core: no answer to 'load_adapter' within 300 s")
    world.want(1, a=two)
    await world.until_states(a="Failed")
    [digest] = [args["digest"] for args in world.core.names("load_adapter")][:1]
    world.want(2)
    await world.until(lambda: world.core.names("unload_adapter") == [{"digest": digest}])
