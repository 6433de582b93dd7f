# SPDX-License-Identifier: Apache-2.0
"""How adapters come from their sources: what hangs, what may pass, what is refused, and what nobody wants any more."""

import asyncio
import json
import time

import pytest
from aiohttp import web
from support.fake_sources import FakeHttpServer, start_server

from quire_server.adapters import manager
from quire_server.adapters.fetcher import AdapterFetcher, SourceOptions
from quire_server.downloads.adapter_cache import AdapterCache
from quire_sources.factory import concurrency_key
from quire_spec.dataclass_json import from_json
from quire_spec.documents.adapter_catalog import Source
from quire_spec.errors import Internal


async def test_a_place_that_hangs_keeps_no_adapter_of_another_place_waiting(world, one):
    asked, over = [], asyncio.Event()

    async def hang(request):
        asked.append(request.path)
        await over.wait()
        return web.Response(status=503)

    server = await start_server(hang)
    hung = {f"hung-{i}": {"source": {"http": {"url": str(server.make_url(f"/{i}"))}}} for i in range(20)}
    world.want(1, **hung, a=one)
    await world.until(lambda: world.one("a").state.value == "Ready" and len(asked) == manager._MAX_FETCHES_PER_HOST)
    await asyncio.sleep(0.05)
    assert len(asked) == manager._MAX_FETCHES_PER_HOST, "others of that place wait for their turn"
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
    assert concurrency_key(from_json(Source, source, "source")) == place


async def test_what_may_pass_is_tried_again_after_growing_pauses(world, one, monkeypatch):
    monkeypatch.setattr(manager, "_FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(manager, "_MAX_RETRY_S", 0.05)
    world.server.refuse["load_model"] = Internal("no shared memory")
    world.want(1, a=one)
    await world.until(lambda: len(world.server.names("load_model")) >= 3)
    assert world.one("a").state == "Failed"
    assert world.one("a").error == "no shared memory"
    world.server.refuse.clear()
    await world.until_states(a="Ready")


async def test_a_source_that_comes_back_is_fetched_then(world, monkeypatch):
    monkeypatch.setattr(manager, "_FIRST_RETRY_S", 0.02)
    files = FakeHttpServer({"/a/adapter_config.json": b'{"r": 8}', "/a/adapter_model.safetensors": b"w"}, is_down=True)
    server = await start_server(files.handle)
    world.want(1, a={"source": {"http": {"url": str(server.make_url("/a"))}}})
    await world.until_states(a="Failed")
    assert "503" in world.one("a").error
    files.is_down = False
    await world.until_states(a="Ready")
    await server.close()


@pytest.mark.parametrize("before", [None, "Bearer wrong"])
async def test_a_secret_that_is_made_or_mended_is_used_within_seconds(world_of, tmp_path, monkeypatch, before):
    """Whatever the pause after failures has grown to."""
    monkeypatch.setattr(manager, "_SECRET_POLL_S", 0.05)
    monkeypatch.setattr(manager, "_FIRST_RETRY_S", 600.0)
    monkeypatch.setattr(manager, "_MAX_RETRY_S", 600.0)
    asked = []

    async def guarded(request):
        asked.append(request.headers.get("Authorization"))
        if asked[-1] != "Bearer right":
            return web.Response(status=401)
        return web.Response(body=b'{"r": 8}' if request.path.endswith(".json") else b"w")

    server = await start_server(guarded)
    secret = tmp_path / "secrets" / "keys"
    secret.parent.mkdir()
    if before:
        secret.write_text(json.dumps({"Authorization": before}))
    source = {"url": str(server.make_url("/a")), "headersSecretRef": {"name": "keys"}}
    async with AdapterFetcher(AdapterCache(tmp_path / "cache"), SourceOptions(secrets_dir=secret.parent)) as fetcher:
        world = world_of(tmp_path, fetcher)
        world.want(1, a={"source": {"http": source}})
        await world.until_states(a="Failed")
        tried = len(asked)
        assert {None: "create the Secret"}.get(before, "HTTP 401") in world.one("a").error
        await asyncio.sleep(0.2)
        assert len(asked) == tried
        secret.write_text(json.dumps({"Authorization": "Bearer right"}))
        await world.until_states(a="Ready")
        await world.board.close()
    await server.close()


async def test_a_source_is_left_alone_as_long_as_it_asks_for_within_bounds(world, monkeypatch):
    monkeypatch.setattr(manager, "_FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(manager, "_MAX_RETRY_S", 0.5)
    asked = []

    async def busy(request):
        asked.append(time.monotonic())
        return web.Response(status=503, headers={"Retry-After": "1000000"})

    server = await start_server(busy)
    world.want(1, a={"source": {"http": {"url": str(server.make_url("/a"))}}})
    # Said between two tries: while one is made, the state is Fetching.
    await world.until(lambda: "the server requests a delay of 86400 s" in world.one("a").error)
    await world.until(lambda: len(asked) >= 2)
    assert asked[1] - asked[0] >= 0.5
    await server.close()


async def test_a_source_that_is_gone_leaves_what_was_fetched(world, one, caplog):
    world.want(1, a=one)
    await world.until_states(a="Ready")
    (one / "adapter_config.json").unlink()
    world.want(2, a=one)
    await world.until(lambda: "source could not be checked" in caplog.text)
    await world.until_states(a="Ready")


async def test_a_change_ends_a_fetch_that_nobody_wants_any_more(world, one):
    asked, hung = asyncio.Event(), asyncio.Event()

    async def hang(request):
        asked.set()
        await hung.wait()

    server = await start_server(hang)
    world.want(1, a={"source": {"http": {"url": str(server.make_url("/a"))}}})
    await asked.wait()
    assert world.states() == {"a": "Fetching"}
    world.want(1, a={"source": {"http": {"url": str(server.make_url("/a"))}}}, b=one)
    await world.until_states(a="Fetching", b="Ready")
    world.want(2, a=one)
    await world.until_states(a="Ready")
    hung.set()
    await server.close()
