# SPDX-License-Identifier: Apache-2.0
"""A pod verifies a candidate while it serves the current content, then switches to it, and keeps the previous one."""

import asyncio
import shutil

import pytest

from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.pod_status import AdapterState
from quire_spec.errors import InvalidArgument

CANARY = {"prompt": "a", "expect": "b"}


def set_entry(pod, generation, folder, **roles):
    contents = {role: {"source": {"path": str(path)}, "canary": CANARY} for role, path in roles.items()}
    entry = {"name": "a", "source": {"path": str(folder)}, "canary": CANARY, **contents}
    pod.manager.set_catalog(AdapterCatalog.from_json({"generation": generation, "adapters": [entry]}))


def served(pod):
    return pod.text.names("set_adapters")[-1]["adapters"]


@pytest.fixture
async def verified(pod, one, two):
    """A pod that serves `one` and has verified `two`."""
    set_entry(pod, 1, one)
    await pod.until_states(a="Ready")
    set_entry(pod, 2, one, candidate=two)
    await pod.until(lambda: pod.status("a").candidate.state is AdapterState.VERIFIED)
    return pod


async def test_a_candidate_is_verified_and_not_used(verified):
    status = verified.status("a")
    assert status.state is AdapterState.READY and status.candidate.digest != status.digest
    assert status.candidate.effect == 1.0
    assert served(verified) == {"a": status.digest} and verified.manager.served_names() == {"a"}
    assert [args["digest"] for args in verified.core.names("verify_adapter")] == [
        status.digest,
        status.candidate.digest,
    ]
    assert verified.server.names("load_model") == ["a"]


async def test_the_switch_needs_no_source_and_no_check(verified, one, two):
    first, second = verified.status("a").digest, verified.status("a").candidate.digest
    shutil.rmtree(one)
    shutil.rmtree(two)
    calls = len(verified.core.calls)
    set_entry(verified, 2, two, previous=one)
    await verified.until(lambda: served(verified) == {"a": second})
    await verified.until_states(a="Ready")
    await asyncio.sleep(0.1)
    status = verified.status("a")
    assert (status.digest, status.previous.digest, status.candidate) == (second, first, None)
    assert status.previous.state is AdapterState.VERIFIED
    assert verified.core.calls[calls:] == [], "the previous content stays loaded"


async def test_a_rollback_needs_no_source_either(verified, one, two):
    first, second = verified.status("a").digest, verified.status("a").candidate.digest
    set_entry(verified, 2, two, previous=one)
    await verified.until(lambda: served(verified) == {"a": second})
    shutil.rmtree(one)
    set_entry(verified, 3, two, candidate=one, previous=one)
    await verified.until(lambda: verified.status("a").candidate.state is AdapterState.VERIFIED)
    set_entry(verified, 3, one, previous=two)
    await verified.until(lambda: served(verified) == {"a": first})
    assert verified.status("a").previous.digest == second


async def test_a_candidate_that_fails_changes_nothing(pod, one, two):
    set_entry(pod, 1, one)
    await pod.until_states(a="Ready")
    digest = pod.status("a").digest
    pod.core.errors["verify_adapter"] = InvalidArgument("CanaryFailed: the output is 'x', and must start with 'b'")
    set_entry(pod, 2, one, candidate=two)
    await pod.until(lambda: pod.status("a").candidate.state is AdapterState.FAILED)
    await pod.until(lambda: pod.core.names("unload_adapter"))
    assert pod.status("a").candidate.error == "CanaryFailed: the output is 'x', and must start with 'b'"
    assert pod.states() == {"a": "Ready"} and pod.status("a").error == ""
    assert served(pod) == {"a": digest}


async def test_a_restarted_core_gets_all_contents(verified, one, two):
    verified.down("core")
    verified.up("core")
    await verified.until(lambda: len(verified.core.names("load_adapter")) == 2)
    await verified.until_states(a="Ready")
    await verified.until(lambda: verified.status("a").candidate.state is AdapterState.VERIFIED)
    assert not verified.core.names("verify_adapter")


async def test_a_candidate_does_not_delay_readiness(pod, one, two):
    pod.core.gate.clear()
    set_entry(pod, 1, one, candidate=two)
    pod.manager.gate_readiness()
    assert pod.manager.gating() == ["a"]
    assert [adapter.name for adapter in pod.manager.unsettled()] == ["a"]
    pod.core.gate.set()
    await pod.until_states(a="Ready")
