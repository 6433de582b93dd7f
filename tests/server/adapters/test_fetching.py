# SPDX-License-Identifier: Apache-2.0
"""How the manager fetches adapters: hung hosts, temporary errors, denied access, and superseded fetches."""

import asyncio
import json
import time

import pytest
from aiohttp import web

from quire_server.adapters import manager
from quire_server.adapters.fetcher import AdapterFetcher, SourceOptions
from quire_server.downloads.adapter_cache import AdapterCache
from quire_sources.factory import concurrency_key
from quire_spec.dataclass_json import from_json
from quire_spec.documents.sources import Source
from quire_spec.errors import Internal


async def test_hung_host_does_not_delay_adapters_of_other_hosts(pod, one, serve):
    asked, over = [], asyncio.Event()

    async def hang(request):
        asked.append(request.path)
        await over.wait()
        return web.Response(status=503)

    url = await serve(hang)
    hung = {f"hung-{i}": {"source": {"http": {"url": f"{url}/{i}"}}} for i in range(20)}
    pod.set_catalog(1, **hung, a=one)
    await pod.until(lambda: pod.status("a").state.value == "Ready" and len(asked) == manager._MAX_FETCHES_PER_HOST)
    await asyncio.sleep(0.05)
    assert len(asked) == manager._MAX_FETCHES_PER_HOST, "other fetches of that host wait"
    over.set()
    pod.set_catalog(2, a=one)
    await pod.until_states(a="Ready")


@pytest.mark.parametrize(
    ("source", "key"),
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
def test_concurrency_key(source, key):
    assert concurrency_key(from_json(Source, source, "source")) == key


async def test_temporary_errors_are_retried_with_backoff(pod, one, monkeypatch):
    monkeypatch.setattr(manager, "_FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(manager, "_MAX_RETRY_S", 0.05)
    pod.server.errors["load_model"] = Internal("no shared memory")
    pod.set_catalog(1, a=one)
    await pod.until(lambda: len(pod.server.names("load_model")) >= 3)
    assert pod.status("a").state == "Failed"
    assert pod.status("a").error == "no shared memory"
    pod.server.errors.clear()
    await pod.until_states(a="Ready")


@pytest.mark.parametrize("before", [None, "Bearer wrong"])
async def test_changed_secret_is_used_within_seconds(make_pod, tmp_path, monkeypatch, before, serve):
    """However long the retry delay has become."""
    monkeypatch.setattr(manager, "_SECRET_POLL_S", 0.05)
    monkeypatch.setattr(manager, "_FIRST_RETRY_S", 600.0)
    monkeypatch.setattr(manager, "_MAX_RETRY_S", 600.0)
    asked = []

    async def guarded(request):
        asked.append(request.headers.get("Authorization"))
        if asked[-1] != "Bearer right":
            return web.Response(status=401)
        return web.Response(body=b'{"r": 8}' if request.path.endswith(".json") else b"w")

    url = await serve(guarded)
    secret = tmp_path / "secrets" / "keys"
    secret.parent.mkdir()
    if before:
        secret.write_text(json.dumps({"Authorization": before}))
    source = {"url": f"{url}/a", "headersSecretRef": {"name": "keys"}}
    async with AdapterFetcher(AdapterCache(tmp_path / "cache"), SourceOptions(secrets_dir=secret.parent)) as fetcher:
        pod = make_pod(tmp_path, fetcher)
        pod.set_catalog(1, a={"source": {"http": source}})
        await pod.until_states(a="Failed")
        tried = len(asked)
        assert {None: "create the Secret"}.get(before, "HTTP 401") in pod.status("a").error
        await asyncio.sleep(0.2)
        assert len(asked) == tried
        secret.write_text(json.dumps({"Authorization": "Bearer right"}))
        await pod.until_states(a="Ready")
        await pod.manager.close()


async def test_retry_after_is_honored_up_to_the_longest_retry_delay(pod, monkeypatch, serve):
    monkeypatch.setattr(manager, "_FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(manager, "_MAX_RETRY_S", 0.5)
    asked = []

    async def busy(request):
        asked.append(time.monotonic())
        return web.Response(status=503, headers={"Retry-After": "1000000"})

    url = await serve(busy)
    pod.set_catalog(1, a={"source": {"http": {"url": f"{url}/a"}}})
    # The error is visible between two attempts; during one, the state is Fetching.
    await pod.until(lambda: "the server requests a delay of 86400 s" in pod.status("a").error)
    await pod.until(lambda: len(asked) >= 2)
    assert asked[1] - asked[0] >= 0.5


async def test_removed_source_keeps_the_fetched_adapter(pod, one, caplog):
    pod.set_catalog(1, a=one)
    await pod.until_states(a="Ready")
    (one / "adapter_config.json").unlink()
    pod.set_catalog(2, a=one)
    await pod.until(lambda: "source could not be checked" in caplog.text)
    await pod.until_states(a="Ready")


async def test_change_of_source_cancels_the_running_fetch(pod, one, serve):
    asked, hung = asyncio.Event(), asyncio.Event()

    async def hang(request):
        asked.set()
        await hung.wait()

    url = await serve(hang)
    pod.set_catalog(1, a={"source": {"http": {"url": f"{url}/a"}}})
    await asked.wait()
    assert pod.states() == {"a": "Fetching"}
    pod.set_catalog(1, a={"source": {"http": {"url": f"{url}/a"}}}, b=one)
    await pod.until_states(a="Fetching", b="Ready")
    pod.set_catalog(2, a=one)
    await pod.until_states(a="Ready")
    hung.set()
