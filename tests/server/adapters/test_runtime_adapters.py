# SPDX-License-Identifier: Apache-2.0
"""Adapters that are loaded and unloaded one at a time: the catalog afterwards, failures, and allowed locations."""

import asyncio

import pytest
from support.supervisor_harness import adapter_folder

from quire_server.adapters.runtime_adapters import RuntimeAdapters
from quire_spec.errors import InvalidArgument, NotFound, Unavailable


def arguments(name, location, in_place=False):
    return {"name": name, "location": str(location) if not isinstance(location, dict) else location} | {
        "in_place": in_place
    }


@pytest.fixture
async def adapters(pod, tmp_path):
    pod.set_catalog(3)
    return RuntimeAdapters(pod.manager, [tmp_path])


async def test_load_replace_and_unload(pod, adapters, one, two):
    await adapters.load_lora_adapter(**arguments("a", one))
    assert pod.manager.served_names() == {"a"} and pod.manager.catalog_version.generation == 3
    first = pod.status("a").digest
    with pytest.raises(InvalidArgument, match="set load_inplace"):
        await adapters.load_lora_adapter(**arguments("a", two))
    await adapters.load_lora_adapter(**arguments("a", "two", in_place=True))
    assert pod.status("a").digest != first
    adapter_folder(two, weights=b"new content at the same path")
    second = pod.status("a").digest
    await adapters.load_lora_adapter(**arguments("a", two, in_place=True))
    assert pod.status("a").digest not in (first, second)
    await adapters.unload_lora_adapter("a")
    assert pod.manager.catalog.adapters == () and pod.server.calls[-1] == ("unload_model", "a")
    with pytest.raises(NotFound, match="'a' does not exist"):
        await adapters.unload_lora_adapter("a")


async def test_a_failed_load_leaves_the_catalog_as_it_was(pod, adapters, one, two):
    pod.core.errors["load_adapter"] = InvalidArgument("rank must be positive")
    with pytest.raises(InvalidArgument, match="rank must be positive"):
        await adapters.load_lora_adapter(**arguments("a", one))
    assert pod.manager.catalog.adapters == ()
    pod.core.errors.clear()
    await pod.until(lambda: not pod.manager.is_known("a"))
    await adapters.load_lora_adapter(**arguments("a", one))
    digest = pod.status("a").digest
    pod.core.errors["load_adapter"] = InvalidArgument("rank must be positive")
    with pytest.raises(InvalidArgument, match="rank must be positive"):
        await adapters.load_lora_adapter(**arguments("a", two, in_place=True))
    pod.core.errors.clear()
    await pod.until_states(a="Ready")
    assert pod.status("a").digest == digest and pod.manager.catalog.adapters[0].source.path == str(one)


async def test_concurrent_loads_of_one_name_load_it_once(pod, adapters, one, two):
    results = await asyncio.gather(
        *(adapters.load_lora_adapter(**arguments("a", folder)) for folder in (one, two, one)), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None), InvalidArgument, type(None)]
    assert len(pod.core.names("load_adapter")) == 1


async def test_an_abandoned_load_is_joined_replaced_or_cancelled(pod, adapters, one, two):
    pod.core.gate.clear()
    abandoned = asyncio.create_task(adapters.load_lora_adapter(**arguments("a", one)))
    await pod.until(lambda: pod.core.names("load_adapter"))
    abandoned.cancel()
    repeated = asyncio.create_task(adapters.load_lora_adapter(**arguments("a", one)))
    await asyncio.sleep(0.05)
    with pytest.raises(InvalidArgument, match="being loaded from another source; set load_inplace"):
        await adapters.load_lora_adapter(**arguments("a", two))
    replaced = asyncio.create_task(adapters.load_lora_adapter(**arguments("a", two, in_place=True)))
    with pytest.raises(Unavailable, match="another call has changed 'a'"):
        await repeated
    pod.core.gate.set()
    await replaced
    assert pod.manager.catalog.adapters[0].source.path == str(two)
    await adapters.unload_lora_adapter("a")
    pod.core.gate.clear()
    unloaded = asyncio.create_task(adapters.load_lora_adapter(**arguments("a", one)))
    await asyncio.sleep(0.05)
    with pytest.raises(NotFound):
        await adapters.unload_lora_adapter("a")
    with pytest.raises(Unavailable, match="another call has changed 'a'"):
        await unloaded
    pod.core.gate.set()
    assert pod.manager.catalog.adapters == () and not adapters._loads


async def test_only_the_newest_of_several_loads_in_place_goes_on(pod, adapters, one, two, tmp_path):
    three = adapter_folder(tmp_path / "three", weights=b"3" * 1000)
    pod.core.gate.clear()
    first = asyncio.create_task(adapters.load_lora_adapter(**arguments("a", one)))
    await pod.until(lambda: pod.core.names("load_adapter"))
    others = [
        asyncio.create_task(adapters.load_lora_adapter(**arguments("a", folder, in_place=True)))
        for folder in (two, three)
    ]
    results = await asyncio.wait_for(asyncio.gather(first, others[0], return_exceptions=True), 5)
    assert [type(result) for result in results] == [Unavailable, Unavailable]
    pod.core.gate.set()
    await asyncio.wait_for(others[1], 5)
    assert pod.manager.catalog.adapters[0].source.path == str(three) and not adapters._loads


@pytest.mark.parametrize(
    "location", ["/etc", "..", "../..", "one/../../x", "/nowhere", "a\0b", "", 5, "x" * 10_000, {"path": "/etc"}, {}]
)
async def test_other_locations_are_rejected(adapters, one, location):
    with pytest.raises(InvalidArgument, match="lora_path"):
        await adapters.load_lora_adapter("a", location, False)


async def test_a_link_out_of_the_allowed_folder_is_rejected(adapters, tmp_path, tmp_path_factory):
    (tmp_path / "link").symlink_to(adapter_folder(tmp_path_factory.mktemp("outside") / "x"))
    with pytest.raises(InvalidArgument, match="allowed"):
        await adapters.load_lora_adapter(**arguments("a", "link"))


async def test_names_that_are_not_served_yet_are_announced(pod, one):
    def announced():
        return pod.text.names("set_loading_adapters")[-1:]

    pod.core.gate.clear()
    pod.set_catalog(4, a=one, retried=one / "absent")
    await pod.until(lambda: announced() == [{"names": ["a", "retried"]}])
    pod.core.gate.set()
    await pod.until(lambda: pod.manager.served_names() == {"a"})
    pod.set_catalog(5)
    await pod.until(lambda: announced() == [{"names": []}] and pod.core.names("unload_adapter"))
    pod.core.errors["load_adapter"] = InvalidArgument("it will never load")
    pod.set_catalog(6, a=one)
    await pod.until_states(a="Failed")
    await pod.until(lambda: announced() == [{"names": []}])
