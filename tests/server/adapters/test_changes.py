# SPDX-License-Identifier: Apache-2.0
"""Adapters that are replaced, removed and added again while processes return errors or die."""

import asyncio
import json

from support.supervisor_harness import adapter_folder

from quire_server.adapters import manager
from quire_server.clients.handles import CoreHandle
from quire_spec.errors import Internal, InvalidArgument, Unavailable


async def test_replacement_switches_the_name_after_the_new_content_is_loaded(pod, one, two):
    pod.set_catalog(1, a=one)
    await pod.until_states(a="Ready")
    old = pod.status("a").digest
    pod.core.gate.clear()
    pod.set_catalog(2, a=two)
    await pod.until(lambda: len(pod.core.names("load_adapter")) == 2)
    assert (pod.status("a").state, pod.status("a").digest, pod.handles.text.digest_by_name) == (
        "Loading",
        old,
        {"a": old},
    )
    pod.core.gate.set()
    await pod.until_states(a="Ready")
    new = pod.status("a").digest
    await pod.until(lambda: pod.handles.cores["core"].slot_pinned_by_digest == {new: False})
    assert [m for m, _ in pod.core.calls] == ["load_adapter", "verify_adapter"] * 2 + ["unload_adapter"]
    assert pod.handles.text.digest_by_name == {"a": new}
    assert pod.server.names("load_model") == ["a"], "the server's model is not reloaded"


async def test_a_replaced_adapter_is_never_ready_with_its_previous_content(pod, one, two):
    pod.set_catalog(1, a=one)
    await pod.until_states(a="Ready")
    pod.set_catalog(2, a=two)
    # Before any task has run: the operator may read the status immediately after the push.
    assert pod.states() == {"a": "Fetching"}
    assert pod.manager.served_names() == {"a"}, "the previous content still serves"
    pod.set_catalog(3, a=one)
    assert pod.states() == {"a": "Fetching"}
    await pod.until_states(a="Ready")
    pod.set_catalog(4)
    assert pod.manager.served_names() == set()
    pod.set_catalog(5, a=one)
    assert pod.states() == {"a": "Fetching"}, "it may be partly removed"
    await pod.until_states(a="Ready")


async def test_next_generation_loads_changed_content_of_a_source(pod, one):
    pod.set_catalog(1, a=one)
    await pod.until_states(a="Ready")
    old = pod.status("a").digest
    adapter_folder(one, weights=b"changed")
    pod.set_catalog(1, a=one)
    await asyncio.sleep(0.05)
    assert pod.status("a").digest == old, "the catalog is unchanged"
    pod.set_catalog(2, a=one)
    await pod.until(lambda: pod.status("a").digest != old)
    await pod.until_states(a="Ready")


async def test_removal_unloads_model_then_name_then_content(pod, one, two):
    pod.set_catalog(1, a=one, b=two)
    await pod.until_states(a="Ready", b="Ready")
    kept = pod.status("b").digest
    pod.set_catalog(2, b=two)
    assert pod.states() == {"b": "Ready"}
    await pod.until(lambda: pod.handles.cores["core"].slot_pinned_by_digest == {kept: False})
    assert pod.server.calls[-1] == ("unload_model", "a")
    assert pod.text.names("set_adapters")[-1] == {"adapters": {"b": kept}, "limits": {}, "chat_templates": {}}
    assert pod.core.calls[-1][0] == "unload_adapter"


async def test_failed_removal_is_retried(pod, one, monkeypatch):
    monkeypatch.setattr(manager, "_CONNECTION_RETRY_S", 0.02)
    pod.set_catalog(1, a=one)
    await pod.until_states(a="Ready")
    pod.server.errors["unload_model"] = Internal("busy")
    pod.set_catalog(2)
    await pod.until(lambda: len(pod.server.names("unload_model")) >= 2)
    pod.server.errors.clear()
    await pod.until(lambda: not pod.handles.server.models and not pod.handles.cores["core"].slot_pinned_by_digest)


async def test_failed_unload_is_retried(pod, one, two):
    pod.set_catalog(1, a=one)
    await pod.until_states(a="Ready")
    pod.core.errors["unload_adapter"] = Unavailable("no response")
    pod.set_catalog(2, a=two)
    await pod.until(lambda: pod.core.names("unload_adapter"))
    assert len(pod.handles.cores["core"].slot_pinned_by_digest) == 2
    pod.core.errors.clear()
    pod.set_catalog(3)
    await pod.until(lambda: not pod.handles.cores["core"].slot_pinned_by_digest)


async def test_failure_of_a_superseded_adapter_does_not_block_its_successor(pod, one, two, monkeypatch):
    load = CoreHandle.load_adapter

    async def picky(self, digest, folder, pinned):
        await load(self, digest, folder, pinned)
        if json.loads((folder / "adapter_config.json").read_text())["r"] == 3:
            raise InvalidArgument("rank 3 is not a power of two")

    monkeypatch.setattr(CoreHandle, "load_adapter", picky)
    pod.core.gate.clear()
    pod.set_catalog(1, a=adapter_folder(two, rank=3))
    await pod.until(lambda: pod.core.calls)
    pod.set_catalog(2, a=one)
    pod.core.gate.set()
    await pod.until_states(a="Ready")


async def test_content_stays_loaded_until_the_text_process_has_new_names(pod, one, two, monkeypatch):
    monkeypatch.setattr(manager, "UNLOAD_DELAY_S", 0.3)
    pod.set_catalog(1, a=one, b=two)
    await pod.until_states(a="Ready", b="Ready")
    old = pod.status("a").digest
    pod.set_catalog(2, a=one)
    await pod.until(lambda: len(pod.text.calls) > 2 or pod.handles.text.digest_by_name == {"a": old})
    pod.text.gate.clear()
    pod.set_catalog(3, a=two)
    await pod.until(lambda: pod.status("a").digest != old)
    await asyncio.sleep(0.6)
    assert old in pod.handles.cores["core"].slot_pinned_by_digest, "text still sends requests for it"
    pod.text.gate.set()
    await pod.until(lambda: list(pod.handles.cores["core"].slot_pinned_by_digest) == [pod.status("a").digest])


async def test_failed_reactivation_is_retried(pod, one, two, monkeypatch):
    monkeypatch.setattr(manager, "_CONNECTION_RETRY_S", 0.02)
    pod.set_catalog(1, a=one)
    await pod.until_states(a="Ready")
    pod.core.errors["load_adapter"] = InvalidArgument("rank 64 exceeds 16")
    pod.set_catalog(2, a=two)
    await pod.until_states(a="Failed")
    pod.down("core")
    pod.up("core")
    pod.core.errors["load_adapter"] = Unavailable("no memory")
    await pod.until(lambda: pod.core.calls)
    assert pod.manager.served_names() == set()
    pod.core.errors.clear()
    await pod.until(lambda: pod.manager.served_names() == {"a"})


async def test_text_process_receives_an_empty_name_list(pod, two):
    """Otherwise the text process would report every name as not ready forever."""
    expected = [{"adapters": {}, "limits": {}, "chat_templates": {}}]
    pod.set_catalog(1)
    await pod.until(lambda: pod.text.names("set_adapters") == expected)
    pod.down("text")
    pod.up("text")
    await pod.until(lambda: pod.text.names("set_adapters") == expected)
    pod.set_catalog(2, a=two / "nowhere")
    pod.down("text")
    pod.up("text")
    await pod.until_states(a="Failed")
    await pod.until(lambda: pod.text.names("set_adapters") == expected)
    # The failed adapter is invalid and is not retried.
    pod.down("text")
    pod.up("text")
    await pod.until(lambda: pod.text.names("set_adapters") == expected)


async def test_load_that_timed_out_is_unloaded_when_unused(pod, two):
    """The core may have finished the load, and a pinned adapter would keep its slot forever."""
    pod.core.errors["load_adapter"] = Unavailable("core: no answer to 'load_adapter' within 300 s")
    pod.set_catalog(1, a=two)
    await pod.until_states(a="Failed")
    [digest] = [args["digest"] for args in pod.core.names("load_adapter")][:1]
    pod.set_catalog(2)
    await pod.until(lambda: pod.core.names("unload_adapter") == [{"digest": digest}])
