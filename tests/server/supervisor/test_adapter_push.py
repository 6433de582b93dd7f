# SPDX-License-Identifier: Apache-2.0
"""Adapters from the operator to two real supervisors with servers: each pod has them in 5 s, and still after deaths.

Text and core are stand-ins (support/fake_engine.py says why); the way from an LLMService to tokens is tested end to
end.
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
from quire_spec.documents.adapter_catalog import AdapterCatalog, AdapterSpec, Source

pytestmark = [pytest.mark.server, pytest.mark.timeout(120)]

KEY = "key-of-the-admin-port"
REACHED_S = 5.0
"""Within which an edit is on every ready pod."""


def catalogue(generation, **folders):
    return AdapterCatalog(generation, tuple(AdapterSpec(name, Source(path=str(f))) for name, f in folders.items()))


class Operator:
    """What the reconciler does about adapters: it looks, tells, and judges, every 0.2 s."""

    def __init__(self, pods):
        self.pods = pods
        self.pusher = PodAdminClient()
        self.seen = []

    async def look(self, wanted):
        self.seen = await self.pusher.refresh(self.pods, wanted, KEY)
        ready = [p for p in self.seen if p.report and p.report.ready]
        return evaluate_adapters(wanted, self.seen, ready)

    async def until(self, wanted, state, seconds):
        """Until AdaptersReady is as said on both pods; the seconds it took."""
        begun = time.monotonic()
        while True:
            found = await self.look(wanted)
            if found.condition.is_true is state and all(p.report and p.report.ready for p in self.seen):
                return time.monotonic() - begun
            assert time.monotonic() - begun < seconds, (found, [p.report_error for p in self.seen])
            await asyncio.sleep(0.2)

    def told(self, name):
        """State of an adapter on each pod, and whether clients can use it there."""
        found = []
        for p in self.seen:
            (status,) = [a for a in p.report.adapters if a.name == name]
            found.append((status.state.value, name in p.report.models))
        return found


async def test_adapters_reach_every_pod_and_come_back(tmp_path):
    one = adapter_folder(tmp_path / "one", weights=b"1" * 1000)
    two = adapter_folder(tmp_path / "two", weights=b"2" * 1000)
    bad = adapter_folder(tmp_path / "bad", rank=0)
    (tmp_path / "key").write_text(KEY)
    flags = (f"--admin-key-file={tmp_path / 'key'}",)
    empty = {"generation": 0, "adapters": []}
    with running_supervisor(tmp_path / "a", empty, *flags) as a, running_supervisor(tmp_path / "b", empty, *flags) as b:
        pods = [ready_pod(n, ip="127.0.0.1", health_port=s.ports["health"]) for n, s in (("a", a), ("b", b))]
        operator = Operator(pods)
        try:
            # Added.
            first = catalogue(1, sql=one)
            assert await operator.until(first, True, REACHED_S) < REACHED_S
            assert operator.told("sql") == [("Ready", True)] * 2
            old = [p.report.adapters[0].digest for p in operator.seen]
            # Another source under the same name: never ready with the old content.
            second = catalogue(2, sql=two)
            holds = (await operator.look(second)).condition.is_true
            assert not holds or not {p.report.adapters[0].digest for p in operator.seen} & {*old}
            assert await operator.until(second, True, REACHED_S) < REACHED_S
            new = [p.report.adapters[0].digest for p in operator.seen]
            assert len({*old, *new}) == 2
            # One that is broken holds up nobody.
            third = catalogue(3, sql=two, bad=bad)
            await operator.until(third, False, REACHED_S)
            while operator.told("bad") != [("Failed", False)] * 2:
                await operator.look(third)
            found = await operator.look(third)
            assert operator.told("sql") == [("Ready", True)] * 2
            assert (found.ready_summary, found.condition.reason) == ("1/2", "LoadFailed")
            assert found.entries[1]["message"] == "pod a: rank 0 is not a rank"
            # Removed.
            fourth = catalogue(4, sql=two)
            assert await operator.until(fourth, True, REACHED_S) < REACHED_S
            assert [[x.name for x in p.report.adapters] for p in operator.seen] == [["sql"]] * 2
            # The core of one dies: it has started anew, and holds everything again.
            started = {p.name: p.core_started_at for p in operator.seen}
            # It takes its time, so that it can be seen on its way.
            a.set_behaviour(load_s=2.0)
            os.kill(operator.seen[0].report.processes["core"].pid, signal.SIGKILL)
            a.wait(lambda: a.health()[0] != 200, 5, "noticed")
            assert (await operator.look(fourth)).entries[0]["total"] == 1
            await operator.until(fourth, True, 30)
            assert {p.name for p in operator.seen if p.core_started_at != started[p.name]} == {"a"}
            assert set(await asyncio.to_thread(a.core_adapter_digests)) == {new[0]}
            # An older catalogue, from an operator that is behind, changes nothing.
            await operator.look(catalogue(2, sql=one))
            assert [p.report.generation for p in operator.seen] == [4, 4]
            # The same adapters under another generation are not looked at again.
            assert (await operator.look(replace(fourth, generation=9))).condition.is_true is True
            assert [p.report.generation for p in operator.seen] == [4, 4]
            # Unless the older one is all there is: the service was restored from a backup.
            restored = catalogue(2, sql=one)
            operator.seen = await operator.pusher.refresh(pods, restored, KEY, replace_newer=True)
            assert [p.report.generation for p in operator.seen] == [2, 2]
            await operator.until(restored, True, REACHED_S)
            assert {p.report.adapters[0].digest for p in operator.seen} == set(old)
        finally:
            await operator.pusher.close()


async def test_a_container_that_starts_anew_is_told_what_its_file_does_not_say(tmp_path):
    one = adapter_folder(tmp_path / "one")
    (tmp_path / "key").write_text(KEY)
    flags = (f"--admin-key-file={tmp_path / 'key'}",)
    # As long as the kubelet has not brought the ConfigMap, a container starts from the one before.
    stale = {"generation": 1, "adapters": []}
    wanted = catalogue(2, sql=one)
    for name in ("first", "second"):
        with running_supervisor(tmp_path / name, stale, *flags, load_s=2.0) as container:
            operator = Operator([ready_pod("s-0", ip="127.0.0.1", health_port=container.ports["health"])])
            try:
                assert (await operator.look(wanted)).condition.is_true is False
                await operator.until(wanted, True, REACHED_S)
            finally:
                await operator.pusher.close()


def test_a_pod_is_not_ready_before_it_holds_its_adapters_nor_after_its_core_died(tmp_path):
    one = adapter_folder(tmp_path / "one")
    first = to_json(catalogue(1, sql=one))
    with started_supervisor(tmp_path / "pod", first, load_s=1.0) as container:
        for _ in range(2):
            container.wait(lambda: "adapters are being loaded: sql" in str(container.health()[1]), 30, "holding")
            assert container.adapter("sql")["state"] == "Loading"
            container.wait_ready(30)
            assert container.adapter("sql")["state"] == "Ready"
            assert container.generate("sql", "x", max_tokens=2).status == 200, "no 404 from a ready pod"
            os.kill(container.pid("core"), signal.SIGKILL)
        assert container.stop() == 0
