# SPDX-License-Identifier: Apache-2.0
"""An adapter is loaded into every core, and is served while a restarted core loads it again."""

import asyncio

import pytest

from quire_spec.documents.pod_status import AdapterState
from quire_spec.errors import InvalidArgument
from quire_spec.protocol.client import ConnectionLost


@pytest.fixture
def cores(pod):
    """A pod with two cores."""
    pod.second = pod.up_core("core-1")
    return pod


def loads(process):
    return len(process.names("load_adapter"))


async def test_every_core_loads_an_adapter_before_its_name_is_published(cores, one):
    cores.second.gate.clear()
    cores.set_catalog(1, a=one)
    await cores.until(lambda: loads(cores.core) == 1 == loads(cores.second))
    await asyncio.sleep(0.05)
    assert cores.states() == {"a": "Loading"} and cores.text.names("set_adapters") == []
    cores.second.gate.set()
    await cores.until_states(a="Ready")


async def test_a_restarted_core_loads_it_again_while_it_is_served(cores, one):
    cores.set_catalog(1, a=one)
    await cores.until_states(a="Ready")
    del cores.handles.cores["core-1"]
    cores.manager.resync()
    await asyncio.sleep(0.05)
    assert cores.states() == {"a": "Ready"} and cores.manager.served_names() == {"a"}
    third = cores.up_core("core-1")
    third.gate.clear()
    await cores.until(lambda: loads(third) == 1)
    assert cores.states() == {"a": "Ready"} and cores.manager.served_names() == {"a"}
    third.gate.set()
    digest = cores.status("a").digest
    await cores.until(lambda: digest in cores.handles.cores["core-1"].slot_pinned_by_digest)
    assert loads(cores.core) == 1, "the other core is left alone"


async def test_a_core_that_dies_in_a_load_is_named_and_the_load_is_repeated(cores, one):
    cores.second.errors["load_adapter"] = ConnectionLost("engine core-1 ended")
    cores.set_catalog(1, a=one)
    await cores.until(lambda: loads(cores.second) == 1)
    await asyncio.sleep(0.05)
    assert cores.states() == {"a": "Loading"}
    cores.second = cores.up_core("core-1")
    await cores.until_states(a="Ready")


async def test_an_adapter_that_one_core_rejects_fails(cores, one):
    cores.second.errors["load_adapter"] = InvalidArgument("rank")
    cores.set_catalog(1, a=one)
    await cores.until_states(a="Failed")
    assert cores.status("a").state is AdapterState.FAILED and "rank" in cores.status("a").error
