# SPDX-License-Identifier: Apache-2.0
"""The adapter manager, from catalog to serving, while processes return errors, die and restart."""

import asyncio
import json
from pathlib import Path

import pytest
from support.supervisor_harness import adapter_folder, catalog

from quire_server.adapters import manager
from quire_server.adapters.manager import StaleCatalog
from quire_server.clients.handles import CoreHandle
from quire_spec.documents.adapter_catalog import AdapterCatalog, AdapterLimits, CatalogVersion
from quire_spec.errors import ConfigError, InvalidArgument


async def test_activation_loads_content_then_name_then_model(pod, one):
    pod.set_catalog(1, a=one)
    await pod.until_states(a="Ready")
    digest = pod.status("a").digest
    (load,) = pod.core.names("load_adapter")
    assert load == {"digest": digest, "path": str(pod.folder / "cache/adapters" / digest), "pinned": False}
    assert pod.text.names("set_adapters") == [{"adapters": {"a": digest}, "limits": {}, "chat_templates": {}}]
    assert pod.server.names("load_model") == ["a"]


async def test_the_text_process_gets_the_chat_template_of_an_adapter(pod, one):
    """Adding, changing and removing the file is new content; an adapter without one has none."""
    template = one / "chat_template.jinja"
    sent = []
    for generation, text in enumerate(("first", "second", None), 1):
        template.unlink(missing_ok=True) if text is None else template.write_text(text)
        pod.set_catalog(generation, a=one)
        await pod.until_states(a="Ready")
        await pod.until(lambda: len(pod.text.names("set_adapters")) > len(sent))
        sent.append(pod.text.names("set_adapters")[-1])
    assert len({message["adapters"]["a"] for message in sent}) == 3
    files = [message["chat_templates"] for message in sent]
    assert files[2] == {}
    assert [Path(file["a"]).read_text() for file in files[:2]] == ["first", "second"]


async def test_limits_change_without_a_load(pod, one):
    for generation, limits in enumerate([{"maxConcurrentRequests": 4}, {"maxTokensPerSecond": 9}, None], 1):
        pod.set_catalog(generation, a={"source": {"path": str(one)}, "limits": limits})
        await pod.until_states(a="Ready")
        sent = {} if limits is None else {"a": AdapterLimits(**limits)}
        await pod.until(lambda sent=sent: pod.text.names("set_adapters")[-1]["limits"] == sent)
    assert len(pod.core.names("load_adapter")) == 1
    assert len(pod.text.names("set_adapters")) == 3


async def test_two_names_of_one_content_share_one_load_and_pinning(pod, one):
    pinned = {"source": {"path": str(one)}, "pinned": True}
    pod.set_catalog(1, a=one, b=pinned)
    await pod.until_states(a="Ready", b="Ready")
    assert pod.handles.cores["core"].slot_pinned_by_digest == {pod.status("a").digest: True}
    pod.set_catalog(2, a=one)
    await pod.until(lambda: pod.handles.cores["core"].slot_pinned_by_digest == {pod.status("a").digest: False})
    assert "unload_adapter" not in [m for m, _ in pod.core.calls]


async def test_process_death_during_a_call_does_not_fail_the_adapter(pod, one):
    pod.core.gate.clear()
    pod.set_catalog(1, a=one)
    await pod.until(lambda: pod.core.calls)
    core = pod.core
    pod.down("core")
    core.gate.set()
    await pod.until_states(a="Loading")
    pod.up("core")
    await pod.until_states(a="Ready")
    assert pod.status("a").error == ""


async def test_adapter_rejected_by_the_core_is_retried_only_after_a_change(pod, one, two):
    pod.core.errors["load_adapter"] = InvalidArgument(f"adapter '{pod.folder}': rank 64 exceeds 16")
    pod.set_catalog(1, a=one)
    await pod.until_states(a="Failed")
    assert "rank 64" in pod.status("a").error
    for _ in range(3):
        pod.manager.resync()
        await asyncio.sleep(0.02)
    pod.set_catalog(1, a=one)
    await asyncio.sleep(0.05)
    assert len(pod.core.names("load_adapter")) == 1
    pod.set_catalog(2, a=two)
    await pod.until(lambda: len(pod.core.names("load_adapter")) == 2)
    pod.core.errors.clear()
    pod.set_catalog(3, a=one)
    await pod.until_states(a="Ready")


@pytest.mark.parametrize("name", ["core", "text"])
async def test_names_are_served_only_while_processes_have_them(pod, one, name):
    pod.set_catalog(1, a={"source": {"path": str(one)}, "pinned": True})
    await pod.until_states(a="Ready")
    pod.down(name)
    assert pod.manager.served_names() == set()
    pod.up(name)
    assert pod.manager.served_names() == set()
    await pod.until(lambda: pod.manager.served_names() == {"a"})


async def test_digest_depends_on_content_and_not_on_generation(pod, one, two):
    assert pod.manager.catalog_version == CatalogVersion(0, "")
    pod.set_catalog(1, a=one)
    first = pod.manager.catalog_version.digest
    pod.set_catalog(2, a=one)
    assert pod.manager.catalog_version.digest == first == AdapterCatalog.from_json(catalog(9, a=one)).version.digest
    pod.set_catalog(3, a=two)
    assert pod.manager.catalog_version.digest != first


async def test_model_is_reloaded_only_if_its_current_stub_died(pod, one):
    """The server may reap the old stub of a model late, after the model was removed and added again."""
    pod.set_catalog(1, a=one)
    await pod.until_states(a="Ready")
    server = pod.handles.server
    for replaced, loads in ((True, ["a"]), (False, ["a", "a"])):
        await server.reload_model("a", lambda replaced=replaced: replaced)
        assert pod.server.names("load_model") == loads


async def test_readiness_gate_ends_with_the_last_adapter_or_a_deadline(pod, one, two, monkeypatch):
    pod.core.gate.clear()
    pod.set_catalog(1, a=one, b=two)
    pod.manager.gate_readiness()
    assert pod.manager.gating() == ["a", "b"]
    pod.set_catalog(2, a=one, b=two, later=one)
    assert pod.manager.gating() == ["a", "b"], "a later adapter does not delay readiness"
    monkeypatch.setattr(manager, "READINESS_GATE_S", -1.0)
    pod.manager.gate_readiness()
    assert pod.manager.gating() == []
    monkeypatch.setattr(manager, "READINESS_GATE_S", 100.0)
    pod.manager.gate_readiness()
    pod.core.gate.set()
    await pod.until(lambda: not pod.manager.gating())
    await pod.until_states(a="Ready", b="Ready", later="Ready")


async def test_rejected_catalogs_change_nothing(pod, one):
    pod.set_catalog(5, a=one)
    with pytest.raises(StaleCatalog, match="4 is older than 5"):
        pod.set_catalog(4)
    with pytest.raises(ConfigError, match="base model's name"):
        pod.set_catalog(6, tales=one)
    await pod.until_states(a="Ready")
    assert pod.manager.catalog_version.generation == 5


async def test_older_catalog_is_accepted_if_it_names_the_replaced_digest(pod, one):
    pod.set_catalog(5, a=one)
    mark = pod.manager.catalog_version.digest
    for replaces in ("sha256:0", ""):
        with pytest.raises(StaleCatalog, match="2 is older than 5"):
            pod.manager.set_catalog(AdapterCatalog(2), replaces)
    pod.manager.set_catalog(AdapterCatalog(2), mark)
    assert pod.manager.catalog_version.generation == 2 and pod.manager.statuses() == []
    with pytest.raises(StaleCatalog, match="1 is older than 2"):
        pod.manager.set_catalog(AdapterCatalog(1), mark)


async def test_unexpected_exception_fails_one_adapter_and_is_logged(pod, one, two, monkeypatch, caplog):
    load = CoreHandle.load_adapter

    async def broken(self, digest, folder, pinned):
        if json.loads((folder / "adapter_config.json").read_text())["r"] == 3:
            raise KeyError("oops")
        await load(self, digest, folder, pinned)

    monkeypatch.setattr(CoreHandle, "load_adapter", broken)
    adapter_folder(two, rank=3)
    pod.set_catalog(1, a=one, b=two)
    await pod.until_states(a="Ready", b="Failed")
    assert pod.status("b").error == "KeyError: 'oops'"
    assert "oops" in caplog.text
