# SPDX-License-Identifier: Apache-2.0
"""The comparison of the object cache with the API server, which finds stale watches."""

import asyncio
from types import SimpleNamespace

import pytest

from quire_operator.controller.cache_verifier import CacheDiverged, CacheVerifier
from quire_operator.controller.metrics import ControllerMetrics
from quire_operator.controller.object_cache import LABEL_SELECTOR, ObjectCache
from quire_operator.kube.api_client import ObjectList
from quire_operator.kube.errors import ObjectNotFound
from quire_operator.kube.resources import LLM_SERVICE, POD, POD_MONITOR

OURS = {"app.kubernetes.io/managed-by": "quire-operator", "app.kubernetes.io/instance": "s"}


def body(name="s-0", version="5", uid="u"):
    """An object of ours."""
    return {
        "metadata": {"name": name, "namespace": "n", "uid": uid, "resourceVersion": str(version), "labels": OURS},
        "spec": {},
    }


class Listed:
    """What an API server lists, by kind; an error is raised. Not a real one: it would have to lose events on demand."""

    def __init__(self, kinds=None):
        self.found = {POD: (), LLM_SERVICE: (), **(kinds or {})}
        self.asked = []

    async def list(self, resource, namespace=None, label_selector="", metadata_only=False):
        assert metadata_only and label_selector == ("" if resource is LLM_SERVICE else LABEL_SELECTOR)
        self.asked.append((resource, namespace))
        found = self.found[resource]
        if isinstance(found, Exception):
            raise found
        return ObjectList(tuple({"metadata": item["metadata"]} for item in found), "9")


@pytest.fixture
def cache():
    return ObjectCache()


def verifier(listed, cache, *watched, namespaces=()):
    """A Verifier of these kinds and LLMServices."""
    synced = asyncio.Event()
    synced.set()
    watches = [SimpleNamespace(resource=kind, namespace=None, synced=synced) for kind in watched or (POD,)]
    made = CacheVerifier(listed, cache, watches, ControllerMetrics(), namespaces)
    made.results = lambda: {
        sample.labels["result"]: sample.value
        for metric in made._metrics.verifications.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
    return made


async def test_the_same(cache):
    listed = Listed({POD: [body("a"), body("b")], LLM_SERVICE: [body("s")]})
    for name in ("a", "b"):
        cache.upsert(POD, body(name))
    cache.upsert(LLM_SERVICE, body("s"))
    found = verifier(listed, cache)
    await found.verify(0.0)
    assert found.results() == {"same": 2} and listed.asked == [(LLM_SERVICE, None), (POD, None)]


async def test_newer_in_the_cache_than_in_the_list_is_no_fault(cache):
    cache.upsert(POD, body(version="10"))
    found = verifier(Listed({POD: [body(version="9")]}), cache)
    await found.verify(0.0)
    assert found.results() == {"same": 2}


@pytest.mark.parametrize(
    "cached, listed",
    [
        ([], [body()]),
        ([body(version="5")], [body(version="10")]),
        ([body(version="a")], [body(version="b")]),
        ([body()], []),
        ([body(uid="u", version="5")], [body(uid="other", version="4")]),
    ],
    ids=["missing", "old", "versions without an order", "deleted", "recreated"],
)
async def test_behind_for_good(cache, cached, listed):
    for each in cached:
        cache.upsert(POD, each)
    found = verifier(Listed({POD: listed}), cache)
    with pytest.raises(CacheDiverged, match="the watch of pods is stale: 1 objects differ from the list: n/s-0"):
        await found.verify(0.0)
    assert found.results() == {"same": 1, "diverged": 1}


async def catches_up(cache, listed, arrive):
    """Verify while something arrives in the grace time; the results."""
    found = verifier(listed, cache)
    verifying = asyncio.create_task(found.verify(0.05))
    while (POD, None) not in listed.asked:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    arrive()
    await verifying
    assert listed.asked.count((POD, None)) == 2, "it was behind at first"
    return found.results()


@pytest.mark.parametrize(
    ("cached", "listed", "listed_later"),
    [
        ([body(version="5")], [body(version="10")], [body(version="10")]),
        # Stale at both comparisons, but at different versions: the events arrive late.
        ([body(version="5")], [body(version="10")], [body(version="20")]),
        # An object whose deletion event is late, and one that was created and deleted without an event.
        ([body("old")], [body("new")], []),
    ],
    ids=["late", "changing", "deleted"],
)
async def test_objects_that_change_in_the_grace_time_are_not_stale(cache, cached, listed, listed_later):
    api = Listed({POD: listed})
    for each in cached:
        cache.upsert(POD, each)

    def arrive():
        api.found[POD] = listed_later
        if listed_later:
            cache.upsert(POD, listed[0])
        else:
            cache.remove(POD, cached[0])

    assert await catches_up(cache, api, arrive) == {"same": 2}


async def test_one_that_catches_up_does_not_excuse_another(cache):
    listed = Listed({POD: [body("a"), body("b")]})
    with pytest.raises(CacheDiverged, match="1 objects differ from the list: n/b"):
        await catches_up(cache, listed, lambda: cache.upsert(POD, body("a")))


async def test_services_are_compared_in_the_namespaces_that_are_served(cache):
    listed = Listed({LLM_SERVICE: [body("s")]})
    found = verifier(listed, cache, namespaces=("n", "m"))
    with pytest.raises(CacheDiverged, match="llmservices is stale"):
        await found.verify(0.0)
    assert listed.asked[0] == (LLM_SERVICE, "n")


async def test_evicts_a_service_that_was_deleted_without_an_event():
    evicted = []
    cache = ObjectCache(evicted.append)
    cache.upsert(LLM_SERVICE, body("s"))
    evicted.clear()
    found = verifier(Listed(), cache)
    await found.verify(0.0)
    assert evicted == [("n", "s")] and cache.get(LLM_SERVICE, "n", "s") is None
    assert found.results() == {"same": 2}


async def test_a_kind_that_cannot_be_listed_keeps_no_other_from_being_compared(cache, caplog):
    """For example because its CRD was deleted."""
    listed = Listed({POD_MONITOR: ObjectNotFound("GET podmonitors: 404", 404), POD: [body()]})
    with pytest.raises(CacheDiverged, match="pods"):
        await verifier(listed, cache, POD_MONITOR, POD).verify(0.0)
    assert "cache was not verified kind=PodMonitor error=GET podmonitors: 404" in caplog.text


async def test_it_looks_again_and_again_and_ends_with_what_it_finds(cache):
    listed = Listed()
    running = asyncio.create_task(verifier(listed, cache).run(0.01, 0.0))
    async with asyncio.timeout(5):
        while listed.asked.count((POD, None)) < 3:
            await asyncio.sleep(0.01)
        listed.found[POD] = [body()]
        with pytest.raises(CacheDiverged):
            await running
