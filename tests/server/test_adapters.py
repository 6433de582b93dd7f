# SPDX-License-Identifier: Apache-2.0
"""The way of an adapter from catalogue to serving, with processes that refuse, die and come back at chosen moments.

The board, the links and the fetcher are real. The three processes are in memory, because a real one cannot be made to
die between two given calls; with real ones the same is in test_supervisor.py.
"""

import asyncio
import contextlib
import json
import time

import pytest
from aiohttp import web
from support.sources import Files, serve
from support.supervised import adapter_folder, catalogue

from quire_server import adapters
from quire_server.adapters import AdapterBoard, Stale
from quire_server.cache import Cache
from quire_server.control import LinkLost
from quire_server.fetcher import Fetcher, SourceOptions
from quire_server.links import CoreLink, Links, ServerLink, TextLink
from quire_server.sources import place_of
from quire_spec.catalogue import Catalogue, Mark, Source
from quire_spec.document import from_json
from quire_spec.errors import ConfigError, Internal, InvalidArgument, Unavailable


class Process:
    """What answers a Control's calls."""

    def __init__(self):
        self.calls = []
        self.gone = False
        self.refuse = {}
        """Method to the error that it is answered with."""
        self.gate = asyncio.Event()
        self.gate.set()

    async def call(self, method, args=None, *, timeout_s):
        self.calls.append((method, args))
        await self.gate.wait()
        if self.gone:
            raise LinkLost("gone")
        if method in self.refuse:
            raise self.refuse[method]
        return {}

    async def load_model(self, name, config, files):
        await self.call("load_model", name, timeout_s=1)

    async def unload_model(self, name):
        await self.call("unload_model", name, timeout_s=1)

    def names(self, method):
        return [args for m, args in self.calls if m == method]


class World:
    """A board with its three processes."""

    def __init__(self, folder, session_fetcher):
        self.folder = folder
        self.links = Links()
        self.board = AdapterBoard("tales", session_fetcher, self.links)
        self.up("core", "text", "server")

    def up(self, *names):
        """Start processes, anew if need be."""
        for name in names:
            process = Process()
            setattr(self, name, process)
            match name:
                case "core":
                    self.links.core = CoreLink(process, {})
                case "text":
                    self.links.text = TextLink(process)
                case "server":
                    self.links.server = ServerLink(process, "tales", self.folder / "text.sock", lambda: None, print)
        self.board.look()

    def down(self, name):
        getattr(self, name).gone = True
        setattr(self.links, name, None)
        self.board.look()

    def want(self, generation, **folders):
        self.board.apply(Catalogue.from_json(catalogue(generation, **folders)))

    def states(self):
        return {s.name: s.state.value for s in self.board.statuses()}

    def one(self, name):
        return next(s for s in self.board.statuses() if s.name == name)

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_states(self, **states):
        with contextlib.suppress(TimeoutError):
            await self.until(lambda: self.states() == states)
        assert self.states() == states, self.board.statuses()


@pytest.fixture
async def world(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "LINGER_S", 0.02)
    monkeypatch.setattr("quire_server.transfer._PAUSE_S", 0.001)
    async with Fetcher(Cache(tmp_path / "cache"), SourceOptions(allow_paths=True)) as fetcher:
        world = World(tmp_path, fetcher)
        yield world
        await world.board.close()


@pytest.fixture
def one(tmp_path):
    return adapter_folder(tmp_path / "one", weights=b"1")


@pytest.fixture
def two(tmp_path):
    return adapter_folder(tmp_path / "two", weights=b"2")


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
        world.board.look()
        await asyncio.sleep(0.02)
    world.want(1, a=one)
    await asyncio.sleep(0.05)
    assert len(world.core.names("load_adapter")) == 1
    world.want(2, a=two)
    await world.until(lambda: len(world.core.names("load_adapter")) == 2)
    world.core.refuse.clear()
    world.want(3, a=one)
    await world.until_states(a="Ready")


async def test_a_place_that_hangs_keeps_no_adapter_of_another_place_waiting(world, one):
    asked, over = [], asyncio.Event()

    async def hang(request):
        asked.append(request.path)
        await over.wait()
        return web.Response(status=503)

    server = await serve(hang)
    hung = {f"hung-{i}": {"source": {"http": {"url": str(server.make_url(f"/{i}"))}}} for i in range(20)}
    world.want(1, **hung, a=one)
    await world.until(lambda: world.one("a").state.value == "Ready" and len(asked) == adapters._MAX_FETCHES)
    await asyncio.sleep(0.05)
    assert len(asked) == adapters._MAX_FETCHES, "others of that place wait for their turn"
    over.set()
    world.want(2, a=one)
    await world.until_states(a="Ready")
    await server.close()


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ({"huggingFace": {"repo": "o/a", "revision": "v1"}}, "hub"),
        ({"s3": {"uri": "s3://b/a"}}, "s3"),
        ({"s3": {"uri": "s3://b/a", "endpoint": "http://minio:9000"}}, "http://minio:9000"),
        ({"http": {"url": "https://user:passw0rd@files:8443/a?signature=s3cr3t"}}, "files:8443"),
        ({"http": {"url": "http://[::"}}, "http://[::"),
        ({"pvc": {"claimName": "loras", "path": "a"}}, "loras"),
        ({"path": "/a"}, "path"),
    ],
)
def test_the_place_of_a_source(source, place):
    assert place_of(from_json(Source, source, "source")) == place


async def test_what_may_pass_is_tried_again_after_growing_pauses(world, one, monkeypatch):
    monkeypatch.setattr(adapters, "_FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(adapters, "_MAX_RETRY_S", 0.05)
    world.server.refuse["load_model"] = Internal("no shared memory")
    world.want(1, a=one)
    await world.until(lambda: len(world.server.names("load_model")) >= 3)
    assert world.one("a").state == "Failed"
    assert world.one("a").error == "no shared memory"
    world.server.refuse.clear()
    await world.until_states(a="Ready")


async def test_a_source_that_comes_back_is_fetched_then(world, monkeypatch):
    monkeypatch.setattr(adapters, "_FIRST_RETRY_S", 0.02)
    files = Files({"/a/adapter_config.json": b'{"r": 8}', "/a/adapter_model.safetensors": b"w"}, down=True)
    server = await serve(files.handle)
    world.want(1, a={"source": {"http": {"url": str(server.make_url("/a"))}}})
    await world.until_states(a="Failed")
    assert "503" in world.one("a").error
    files.down = False
    await world.until_states(a="Ready")
    await server.close()


@pytest.mark.parametrize("before", [None, "Bearer wrong"])
async def test_a_secret_that_is_made_or_mended_is_used_within_seconds(tmp_path, monkeypatch, before):
    """Whatever the pause after failures has grown to."""
    monkeypatch.setattr(adapters, "_SECRET_LOOK_S", 0.05)
    monkeypatch.setattr(adapters, "_FIRST_RETRY_S", 600.0)
    monkeypatch.setattr(adapters, "_MAX_RETRY_S", 600.0)
    asked = []

    async def guarded(request):
        asked.append(request.headers.get("Authorization"))
        if asked[-1] != "Bearer right":
            return web.Response(status=401)
        return web.Response(body=b'{"r": 8}' if request.path.endswith(".json") else b"w")

    server = await serve(guarded)
    secret = tmp_path / "secrets" / "keys"
    secret.parent.mkdir()
    if before:
        secret.write_text(json.dumps({"Authorization": before}))
    source = {"url": str(server.make_url("/a")), "headersSecretRef": {"name": "keys"}}
    async with Fetcher(Cache(tmp_path / "cache"), SourceOptions(secrets_dir=secret.parent)) as fetcher:
        world = World(tmp_path, fetcher)
        world.want(1, a={"source": {"http": source}})
        await world.until_states(a="Failed")
        tried = len(asked)
        assert {None: "make the Secret"}.get(before, "HTTP 401") in world.one("a").error
        await asyncio.sleep(0.2)
        assert len(asked) == tried
        secret.write_text(json.dumps({"Authorization": "Bearer right"}))
        await world.until_states(a="Ready")
        await world.board.close()
    await server.close()


async def test_a_source_is_left_alone_as_long_as_it_asks_for_within_bounds(world, monkeypatch):
    monkeypatch.setattr(adapters, "_FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(adapters, "_MAX_RETRY_S", 0.5)
    asked = []

    async def busy(request):
        asked.append(time.monotonic())
        return web.Response(status=503, headers={"Retry-After": "1000000"})

    server = await serve(busy)
    world.want(1, a={"source": {"http": {"url": str(server.make_url("/a"))}}})
    # Said between two tries: while one is made, the state is Fetching.
    await world.until(lambda: "it asks for 86400 s of patience" in world.one("a").error)
    await world.until(lambda: len(asked) >= 2)
    assert asked[1] - asked[0] >= 0.5
    await server.close()


async def test_a_broken_adapter_holds_up_nobody(world, one):
    world.want(1, broken="/nowhere", a=one)
    await world.until_states(a="Ready", broken="Failed")


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
    assert world.board.serving() == {"a"}, "the one before still answers"
    world.want(3, a=one)
    assert world.states() == {"a": "Fetching"}
    await world.until_states(a="Ready")
    world.want(4)
    assert world.board.serving() == set()
    world.want(5, a=one)
    assert world.states() == {"a": "Fetching"}, "it may be half gone"
    await world.until_states(a="Ready")


async def test_a_failed_adapter_with_another_source_is_not_called_failed_any_more(world, tmp_path, one):
    world.want(1, a=tmp_path / "nothing")
    await world.until_states(a="Failed")
    world.want(2, a=one)
    assert (world.one("a").state, world.one("a").error) == ("Fetching", "")
    await world.until_states(a="Ready")


@pytest.mark.parametrize("name", ["core", "text"])
async def test_names_answer_only_while_their_processes_hold_them(world, one, name):
    world.want(1, a={"source": {"path": str(one)}, "pinned": True})
    await world.until_states(a="Ready")
    world.down(name)
    assert world.board.serving() == set()
    world.up(name)
    assert world.board.serving() == set()
    await world.until(lambda: world.board.serving() == {"a"})


async def test_the_digest_tells_catalogues_apart_and_generations_not(world, one, two):
    assert world.board.mark == Mark(0, "")
    world.want(1, a=one)
    first = world.board.mark.digest
    world.want(2, a=one)
    assert world.board.mark.digest == first == Catalogue.from_json(catalogue(9, a=one)).mark.digest
    world.want(3, a=two)
    assert world.board.mark.digest != first


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


async def test_a_source_that_is_gone_leaves_what_was_fetched(world, one, caplog):
    world.want(1, a=one)
    await world.until_states(a="Ready")
    (one / "adapter_config.json").unlink()
    world.want(2, a=one)
    await world.until(lambda: "cannot be looked at again" in caplog.text)
    await world.until_states(a="Ready")


async def test_a_change_ends_a_fetch_that_nobody_wants_any_more(world, one):
    asked, hung = asyncio.Event(), asyncio.Event()

    async def hang(request):
        asked.set()
        await hung.wait()

    server = await serve(hang)
    world.want(1, a={"source": {"http": {"url": str(server.make_url("/a"))}}})
    await asked.wait()
    assert world.states() == {"a": "Fetching"}
    world.want(1, a={"source": {"http": {"url": str(server.make_url("/a"))}}}, b=one)
    await world.until_states(a="Fetching", b="Ready")
    world.want(2, a=one)
    await world.until_states(a="Ready")
    hung.set()
    await server.close()


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


async def test_a_model_is_loaded_again_for_its_stub_that_died_and_not_for_one_that_it_had_before(world, one):
    """Of a model that was removed and has come back, the server may be slow to reap the stub that it has ended."""
    world.want(1, a=one)
    await world.until_states(a="Ready")
    server = world.links.server
    for replaced, loads in ((True, ["a"]), (False, ["a", "a"])):
        await server.revive("a", lambda replaced=replaced: replaced)
        assert world.server.names("load_model") == loads


async def test_a_removal_that_fails_is_tried_again(world, one, monkeypatch):
    monkeypatch.setattr(adapters, "_LINK_RETRY_S", 0.02)
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


async def test_the_hold_ends_with_the_last_adapter_or_with_time(world, one, two, monkeypatch):
    world.core.gate.clear()
    world.want(1, a=one, b=two)
    world.board.hold()
    assert world.board.pending() == ["a", "b"]
    world.want(2, a=one, b=two, later=one)
    assert world.board.pending() == ["a", "b"], "what comes later holds up nothing"
    monkeypatch.setattr(adapters, "HOLD_S", -1.0)
    world.board.hold()
    assert world.board.pending() == []
    monkeypatch.setattr(adapters, "HOLD_S", 100.0)
    world.board.hold()
    world.core.gate.set()
    await world.until(lambda: not world.board.pending())
    await world.until_states(a="Ready", b="Ready", later="Ready")


async def test_catalogues_that_are_refused_change_nothing(world, one):
    world.want(5, a=one)
    with pytest.raises(Stale, match="4 is older than 5"):
        world.want(4)
    with pytest.raises(ConfigError, match="base model's name"):
        world.want(6, tales=one)
    await world.until_states(a="Ready")
    assert world.board.mark.generation == 5


async def test_an_older_catalogue_is_taken_in_the_place_of_the_one_that_it_names(world, one):
    world.want(5, a=one)
    mark = world.board.mark.digest
    for replaces in ("sha256:0", ""):
        with pytest.raises(Stale, match="2 is older than 5"):
            world.board.apply(Catalogue(2), replaces)
    world.board.apply(Catalogue(2), mark)
    assert world.board.mark.generation == 2 and world.board.statuses() == []
    with pytest.raises(Stale, match="1 is older than 2"):
        world.board.apply(Catalogue(1), mark)


async def test_a_defect_fails_one_adapter_and_is_logged(world, one, two, monkeypatch, caplog):
    load = CoreLink.load

    async def broken(self, digest, folder, pinned):
        if json.loads((folder / "adapter_config.json").read_text())["r"] == 3:
            raise KeyError("oops")
        await load(self, digest, folder, pinned)

    monkeypatch.setattr(CoreLink, "load", broken)
    adapter_folder(two, rank=3)
    world.want(1, a=one, b=two)
    await world.until_states(a="Ready", b="Failed")
    assert world.one("b").error == "KeyError: 'oops'"
    assert "oops" in caplog.text


async def test_a_change_that_is_taken_back_at_once_is_no_end_of_the_adapter(world, one):
    files = Files({"/a/adapter_config.json": b'{"r": 8}', "/a/adapter_model.safetensors": b"w"})
    asked, hung = asyncio.Event(), asyncio.Event()

    async def slow(request):
        asked.set()
        await hung.wait()
        return await files.handle(request)

    server = await serve(slow)
    there = {"source": {"http": {"url": str(server.make_url("/a"))}}}
    world.want(1, a=there)
    await asked.wait()
    world.want(2, a=one)
    world.want(3, a=there)
    hung.set()
    await world.until_states(a="Ready")
    await server.close()


async def test_what_fails_when_it_is_not_wanted_any_more_does_not_block_what_is(world, one, two, monkeypatch):
    load = CoreLink.load

    async def picky(self, digest, folder, pinned):
        await load(self, digest, folder, pinned)
        if json.loads((folder / "adapter_config.json").read_text())["r"] == 3:
            raise InvalidArgument("rank 3 is no power of two")

    monkeypatch.setattr(CoreLink, "load", picky)
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
    monkeypatch.setattr(adapters, "LINGER_S", 0.3)
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
    monkeypatch.setattr(adapters, "_LINK_RETRY_S", 0.02)
    world.want(1, a=one)
    await world.until_states(a="Ready")
    world.core.refuse["load_adapter"] = InvalidArgument("rank 64 exceeds 16")
    world.want(2, a=two)
    await world.until_states(a="Failed")
    world.down("core")
    world.up("core")
    world.core.refuse["load_adapter"] = Unavailable("no memory")
    await world.until(lambda: world.core.calls)
    assert world.board.serving() == set()
    world.core.refuse.clear()
    await world.until(lambda: world.board.serving() == {"a"})


async def test_a_name_that_returns_to_what_text_still_has_is_not_moved_by_the_next_call(world, one, two, monkeypatch):
    monkeypatch.setattr(adapters, "LINGER_S", 9.0)
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
