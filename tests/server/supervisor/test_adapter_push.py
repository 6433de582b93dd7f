# SPDX-License-Identifier: Apache-2.0
"""Adapter catalogs from the operator's client to two real supervisors with servers: applied in 5 s, kept after deaths.

Text and core are fakes (support/fake_engine.py). The path from an LLMService to tokens is tested end to end elsewhere.
"""

import asyncio
import os
import signal
import time
from dataclasses import replace

import pytest
from support.observed_factories import ready_pod
from support.supervisor_harness import adapter_folder, running_supervisor, started_supervisor

from quire_operator.controller.observe.pod_admin_client import PodAdminClient
from quire_operator.controller.status.adapters import evaluate_adapters
from quire_spec.dataclass_json import to_json
from quire_spec.documents.adapter_catalog import AdapterCatalog, AdapterSpec
from quire_spec.documents.sources import Source

pytestmark = [pytest.mark.server, pytest.mark.timeout(120)]

KEY = "key-of-the-admin-port"
APPLIED_S = 5.0
"""Deadline for a change to be applied by every ready pod."""


def catalog(generation, **folders):
    return AdapterCatalog(generation, tuple(AdapterSpec(name, Source(path=str(f))) for name, f in folders.items()))


class Operator:
    """The adapter part of the reconciler: polls pods, pushes the catalog, and evaluates the reports, every 0.2 s."""

    def __init__(self, pods):
        self.pods = pods
        self.client = PodAdminClient()
        self.observed_pods = []

    async def reconcile(self, desired):
        self.observed_pods = await self.client.push_catalog(self.pods, desired, KEY)
        ready = [p for p in self.observed_pods if p.report and p.report.ready]
        return evaluate_adapters(desired, self.observed_pods, ready)

    async def wait_adapters_ready(self, desired, state, seconds):
        """Wait until both pods are ready and AdaptersReady is `state`; return the seconds."""
        started_at = time.monotonic()
        while True:
            status = await self.reconcile(desired)
            if status.condition.is_true is state and all(p.report and p.report.ready for p in self.observed_pods):
                return time.monotonic() - started_at
            assert time.monotonic() - started_at < seconds, (status, [p.report_error for p in self.observed_pods])
            await asyncio.sleep(0.2)

    def reported(self, name):
        """Return an adapter's state on each pod, and whether clients can use it there."""
        states = []
        for p in self.observed_pods:
            (status,) = [a for a in p.report.adapters if a.name == name]
            states.append((status.state.value, name in p.report.models))
        return states


async def test_catalog_is_applied_by_every_pod_and_after_restarts(tmp_path):
    one = adapter_folder(tmp_path / "one", weights=b"1" * 1000)
    two = adapter_folder(tmp_path / "two", weights=b"2" * 1000)
    bad = adapter_folder(tmp_path / "bad", rank=0)
    (tmp_path / "key").write_text(KEY)
    config = {"adminKeyFile": tmp_path / "key"}
    empty = {"generation": 0, "adapters": []}
    with running_supervisor(tmp_path / "a", empty, config) as a, running_supervisor(tmp_path / "b", empty, config) as b:
        pods = [ready_pod(n, ip="127.0.0.1", health_port=s.ports["health"]) for n, s in (("a", a), ("b", b))]
        operator = Operator(pods)
        try:
            # Added.
            first = catalog(1, sql=one)
            assert await operator.wait_adapters_ready(first, True, APPLIED_S) < APPLIED_S
            assert operator.reported("sql") == [("Ready", True)] * 2
            old = [p.report.adapters[0].digest for p in operator.observed_pods]
            # New content under the same name: AdaptersReady is never true with the old content.
            second = catalog(2, sql=two)
            is_ready = (await operator.reconcile(second)).condition.is_true
            assert not is_ready or not {p.report.adapters[0].digest for p in operator.observed_pods} & {*old}
            assert await operator.wait_adapters_ready(second, True, APPLIED_S) < APPLIED_S
            new = [p.report.adapters[0].digest for p in operator.observed_pods]
            assert len({*old, *new}) == 2
            # A broken adapter does not affect the others.
            third = catalog(3, sql=two, bad=bad)
            await operator.wait_adapters_ready(third, False, APPLIED_S)
            while operator.reported("bad") != [("Failed", False)] * 2:
                await operator.reconcile(third)
            status = await operator.reconcile(third)
            assert operator.reported("sql") == [("Ready", True)] * 2
            assert (status.ready_summary, status.condition.reason) == ("1/2", "LoadFailed")
            assert status.entries[1]["message"] == "pod a: rank must be positive, got 0"
            # Removed.
            fourth = catalog(4, sql=two)
            assert await operator.wait_adapters_ready(fourth, True, APPLIED_S) < APPLIED_S
            assert [[x.name for x in p.report.adapters] for p in operator.observed_pods] == [["sql"]] * 2
            # The core of one pod dies: it restarts and loads everything again.
            started = {p.name: p.core_started_at for p in operator.observed_pods}
            # A slow load, so that the state in between is observable.
            a.set_behaviour(load_s=2.0)
            os.kill(operator.observed_pods[0].report.processes["core"].pid, signal.SIGKILL)
            a.wait(lambda: a.health()[0] != 200, 5, "noticed")
            assert (await operator.reconcile(fourth)).entries[0]["total"] == 1
            await operator.wait_adapters_ready(fourth, True, 30)
            assert {p.name for p in operator.observed_pods if p.core_started_at != started[p.name]} == {"a"}
            assert set(await asyncio.to_thread(a.core_adapter_digests)) == {new[0]}
            # An older catalog from a stale operator changes nothing.
            await operator.reconcile(catalog(2, sql=one))
            assert [p.report.generation for p in operator.observed_pods] == [4, 4]
            # Equal adapters under another generation are not pushed again.
            assert (await operator.reconcile(replace(fourth, generation=9))).condition.is_true is True
            assert [p.report.generation for p in operator.observed_pods] == [4, 4]
            # An older catalog is accepted if the service was restored from a backup.
            restored = catalog(2, sql=one)
            operator.observed_pods = await operator.client.push_catalog(pods, restored, KEY, replace_newer=True)
            assert [p.report.generation for p in operator.observed_pods] == [2, 2]
            await operator.wait_adapters_ready(restored, True, APPLIED_S)
            assert {p.report.adapters[0].digest for p in operator.observed_pods} == set(old)
        finally:
            await operator.client.close()


async def test_restarted_container_with_stale_file_gets_the_current_catalog(tmp_path):
    one = adapter_folder(tmp_path / "one")
    (tmp_path / "key").write_text(KEY)
    config = {"adminKeyFile": tmp_path / "key"}
    # Until the kubelet has updated the ConfigMap, a container starts with the previous one.
    stale = {"generation": 1, "adapters": []}
    desired = catalog(2, sql=one)
    with running_supervisor(tmp_path / "container", stale, config, load_s=2.0) as container:
        operator = Operator([ready_pod("s-0", ip="127.0.0.1", health_port=container.ports["health"])])
        try:
            assert (await operator.reconcile(desired)).condition.is_true is False
            await operator.wait_adapters_ready(desired, True, APPLIED_S)
        finally:
            await operator.client.close()


def test_pod_is_ready_only_with_its_adapters_loaded_also_after_core_died(tmp_path):
    one = adapter_folder(tmp_path / "one")
    first = to_json(catalog(1, sql=one))
    with started_supervisor(tmp_path / "pod", first, load_s=1.0) as container:
        for _ in range(2):
            container.wait(lambda: "adapters are loading: sql" in str(container.health()[1]), 30, "loading adapters")
            assert container.adapter("sql")["state"] == "Loading"
            container.wait_ready(30)
            assert container.adapter("sql")["state"] == "Ready"
            assert container.generate("sql", "x", max_tokens=2).status == 200, "a ready pod must not return 404"
            os.kill(container.pid("core"), signal.SIGKILL)
        assert container.stop() == 0
