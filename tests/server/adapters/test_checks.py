# SPDX-License-Identifier: Apache-2.0
"""An adapter is checked before requests use it."""

import asyncio

import pytest
from support.supervisor_harness import catalog

from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.errors import InvalidArgument, Unavailable
from quire_spec.protocol.results import AdapterCheck

CANARY = {"prompt": "a", "expect": "b"}


def set_catalog(pod, generation, folders, canary=None, **fields):
    document = catalog(generation, **folders)
    for entry in document["adapters"]:
        entry["canary"] = canary
    pod.manager.set_catalog(AdapterCatalog.from_json(document | fields))


async def test_an_adapter_without_effect_is_used_with_a_warning_or_refused(pod, one, two):
    """Only the policy changes, so the checks are not repeated."""
    pod.set_catalog(1, a=one, b=two)
    await pod.until_states(a="Ready", b="Ready")
    assert pod.status("a").warning == "" and pod.status("a").effect == 1.0
    digest = pod.status("b").digest
    pod.set_catalog(2, a=one)
    await pod.until(lambda: pod.core.names("unload_adapter"))
    pod.core.checks[digest] = AdapterCheck(2e-7)
    pod.set_catalog(3, a=one, b=two)
    await pod.until_states(a="Ready", b="Ready")
    assert pod.status("b").warning.startswith("NoEffect: ") and "2e-07" in pod.status("b").warning
    num_checks = len(pod.core.names("verify_adapter"))
    set_catalog(pod, 4, {"a": one, "b": two}, onNoEffect="Refuse")
    await pod.until_states(a="Ready", b="Failed")
    assert pod.status("b").error.startswith("NoEffect: ")
    assert len(pod.core.names("verify_adapter")) == num_checks
    set_catalog(pod, 5, {"a": one, "b": two}, onNoEffect="Warn")
    await pod.until_states(a="Ready", b="Ready")


@pytest.mark.parametrize(
    "error", [InvalidArgument("CanaryFailed: the output is 'x'"), Unavailable("the canary did not end")]
)
async def test_a_content_that_fails_its_canary_never_serves(pod, one, two, error):
    set_catalog(pod, 1, {"a": one}, CANARY)
    await pod.until_states(a="Ready")
    first = pod.status("a").digest
    pod.core.errors["verify_adapter"] = error
    set_catalog(pod, 2, {"a": two}, CANARY)
    await pod.until_states(a="Failed")
    assert pod.status("a").error == f"{error} (still serving {first})"
    await pod.until(lambda: pod.core.names("unload_adapter"))
    assert pod.text.names("set_adapters")[-1]["adapters"] == {"a": first}
    assert pod.manager.served_names() == {"a"}
    assert [args["digest"] for args in pod.core.names("unload_adapter")] == [
        args["digest"] for args in pod.core.names("load_adapter") if args["digest"] != first
    ]


async def test_a_restarted_core_does_not_repeat_the_checks(pod, one):
    pod.set_catalog(1, a=one)
    await pod.until_states(a="Ready")
    pod.down("core")
    pod.up("core")
    await pod.until(lambda: pod.core.names("load_adapter"))
    await pod.until_states(a="Ready")
    assert not pod.core.names("verify_adapter")


async def test_a_new_canary_is_run_while_the_adapter_serves(pod, one):
    pod.set_catalog(1, a=one)
    await pod.until_states(a="Ready")
    pod.core.errors["verify_adapter"] = InvalidArgument("CanaryFailed: the output is 'x'")
    set_catalog(pod, 2, {"a": one}, CANARY)
    await pod.until_states(a="Failed")
    await asyncio.sleep(0.05)
    assert pod.manager.served_names() == {"a"} and not pod.core.names("unload_adapter")
    assert pod.core.names("verify_adapter")[-1]["canary"].expect == "b"


async def test_canaries_that_never_end_do_not_delay_other_adapters(pod, one, two):
    hanging = asyncio.Event()
    call = pod.core.call

    async def hang(method, result_type, args=None, *, timeout_s):
        if method == "verify_adapter" and args["canary"] is not None:
            await hanging.wait()
        return await call(method, result_type, args, timeout_s=timeout_s)

    pod.core.call = hang
    document = catalog(1, **{f"c{i}": one for i in range(9)}, plain=two)
    for entry in document["adapters"][:9]:
        entry["canary"] = CANARY
    pod.manager.set_catalog(AdapterCatalog.from_json(document))
    await pod.until(lambda: pod.states()["plain"] == "Ready")
    assert "Ready" not in {state for name, state in pod.states().items() if name != "plain"}
    hanging.set()
    await pod.until(lambda: set(pod.states().values()) == {"Ready"})
