# SPDX-License-Identifier: Apache-2.0
"""From an edit of an LLMService to what its pods hold and its status says: real API server, scheduler and controllers,
pods that answer on their admin port (support/fake_pods.py says what is scripted of them)."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.controller_harness import ControllerHarness, answer_model_readers, llm_service
from support.engine_processes import wait_for
from support.fake_kubelet import FakeKubelet
from support.fake_pods import FakePods

from quire_operator.kube import resources
from quire_spec.documents.adapter_catalog import AdapterCatalog

API = ("quire.dev/v1alpha1", "LLMService")
POLICY = ("networking.k8s.io/v1", "NetworkPolicy", "tales")
HELD, LET_GO = {"metadata": {"finalizers": ["example.com/held"]}}, {"metadata": {"finalizers": None}}
REACHED_S = 5.0
"""Within which an edit of the adapters is on every ready pod."""
SQL = {"name": "sql", "source": {"pvc": {"claimName": "models", "path": "sql"}}}
PIRATE = {"name": "pirate", "source": {"pvc": {"claimName": "models", "path": "pirate"}}}


@pytest.fixture(scope="module")
def kubelet(cluster):
    cluster.require_controllers()
    with FakeKubelet(cluster, "node-answering", gpus=2) as node:
        answer_model_readers(node)
        yield node


@pytest.fixture
def fleet(kubelet):
    with FakePods(kubelet) as fleet:
        yield fleet


class World:
    """An operator, its pods, and one service."""

    def __init__(self, cluster, namespace, operator, fleet):
        self.cluster, self.namespace, self.operator, self.fleet = cluster, namespace, operator, fleet

    def edit(self, **spec):
        return self.cluster.merge(*API, "tales", {"spec": spec}, self.namespace)

    def pods(self):
        return self.fleet.running_in(self.namespace)

    def conditions(self):
        return {c["type"]: (c["status"], c["reason"]) for c in self.operator.status().get("conditions", [])}

    def until(self, kind, status, reason=None, seconds=120.0):
        """Until a condition is so for the newest generation; the seconds it took."""
        begun = time.monotonic()

        def so():
            body = self.cluster.get(*API, "tales", self.namespace)
            found = [c for c in body.get("status", {}).get("conditions", []) if c["type"] == kind]
            newest = body["metadata"]["generation"]
            self.last = found
            return any(
                c["status"] == status and c["observedGeneration"] == newest and reason in (None, c["reason"])
                for c in found
            )

        try:
            wait_for(so, seconds, f"{kind}={status}/{reason}")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.last}, {self.conditions()}") from error
        return time.monotonic() - begun

    def held(self):
        """Adapters that each pod works on."""
        return [[a.name for a in m.fake_pod.catalog.adapters] for m in self.pods()]

    def events(self):
        found = self.cluster.items("events.k8s.io/v1", "Event", self.namespace)
        return [(e["type"], e["reason"]) for e in found if e["regarding"]["kind"] == API[1]]


@pytest.fixture
def world(cluster, namespace, fleet):
    """With a service of two ready pods and one adapter."""
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(replicas=2, adapters=[SQL]), namespace)
        world = World(cluster, namespace, operator, fleet)
        world.until("Ready", "True")
        yield world


def test_a_ready_service_reports_models_endpoints_and_measurement(world):
    status = world.operator.status()
    assert status["models"] == ["tales", "sql"]
    assert status["adaptersReady"] == "1/1"
    assert status["endpoints"]["http"] == f"http://tales.{world.namespace}.svc:8000"
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (2, 2, 2)
    assert status["plan"]["measured"]["kvTokens"] == 160_000
    assert "condition met" in world.cluster.kubectl(
        "wait", "llm/tales", "--for=condition=Ready", "--timeout=5s", namespace=world.namespace
    )
    reasons = [reason for _, reason in world.events()]
    assert {"Fits", "RolloutComplete", "Ready", "AdapterReady"} <= set(reasons)
    assert len(reasons) == len(set(reasons)), "each once"


def test_adapters_reach_every_pod_without_a_restart(world):
    pods = {m.pod["metadata"]["uid"] for m in world.pods()}
    world.edit(adapters=[SQL, PIRATE])
    assert world.until("AdaptersReady", "True", seconds=REACHED_S) < REACHED_S
    assert world.held() == [["sql", "pirate"]] * 2
    moved = {**SQL, "source": {"pvc": {"claimName": "models", "path": "sql-v2"}}}
    world.edit(adapters=[moved, PIRATE])
    assert world.until("AdaptersReady", "True", seconds=REACHED_S) < REACHED_S
    assert {m.fake_pod.catalog.adapters[0].source.pvc.path for m in world.pods()} == {"sql-v2"}
    world.edit(adapters=[PIRATE])
    assert world.until("AdaptersReady", "True", seconds=REACHED_S) < REACHED_S
    assert world.held() == [["pirate"]] * 2
    assert world.operator.status()["models"] == ["tales", "pirate"]
    assert {m.pod["metadata"]["uid"] for m in world.pods()} == pods
    pushes = [len(m.fake_pod.pushed_catalogs) for m in world.pods()]
    world.edit(rollout={"drainSeconds": 60})
    world.until("Ready", "True")
    assert [len(m.fake_pod.pushed_catalogs) for m in world.pods()] == pushes, "no push"


def test_a_failed_adapter_blocks_neither_other_adapters_nor_pods(world):
    for member in world.pods()[1:]:
        member.fake_pod.failing_adapters["pirate"] = "rank 64 is more than maxRank 16"
    world.edit(adapters=[SQL, PIRATE])
    world.until("AdaptersReady", "False", "LoadFailed", REACHED_S)
    status = world.operator.status()
    broken = world.pods()[1].pod["metadata"]["name"]
    assert status["adapters"][1]["message"] == f"pod {broken}: rank 64 is more than maxRank 16"
    assert (status["adapters"][1]["ready"], status["adapters"][1]["total"]) == (1, 2)
    assert status["models"] == ["tales", "sql"], "what one pod lacks is not called a model"
    assert world.conditions()["Available"] == ("True", "MinimumReplicas")
    assert world.conditions()["Ready"] == ("False", "LoadFailed")
    wait_for(lambda: ("Warning", "AdapterFailed") in world.events(), 10, "the event")


def test_a_restarted_container_gets_its_adapters_again(world, kubelet):
    member = world.pods()[0]
    before = member.fake_pod.num_restarts
    # The ConfigMap reaches a pod up to two minutes late: it starts from an empty one.
    member.fake_pod.restart(AdapterCatalog())
    kubelet.restart(member.pod)
    wait_for(lambda: member.fake_pod.num_restarts > before + 1, 10, "started anew")
    member.fake_pod.restart(AdapterCatalog())
    world.operator.requeue()
    world.until("Ready", "True", seconds=15)
    assert world.held() == [["sql"]] * 2


def test_a_service_restored_from_a_backup_gets_the_adapters_of_its_spec(world):
    """Its pods have catalogs of generations that the cluster does not know."""
    pirate = AdapterCatalog.from_json({"generation": 99, "adapters": [PIRATE]})
    pods = {m.pod["metadata"]["uid"] for m in world.pods()}
    for member in world.pods():
        member.fake_pod.catalog = pirate
    world.operator.requeue()
    assert world.held() == [["sql"]] * 2
    world.until("Ready", "True", seconds=REACHED_S)
    world.edit(adapters=[SQL, PIRATE])
    assert world.until("AdaptersReady", "True", seconds=REACHED_S) < REACHED_S
    assert {m.pod["metadata"]["uid"] for m in world.pods()} == pods, "without a restart"


def test_a_hanging_pod_does_not_delay_the_others(world):
    hanging, fine = world.pods()
    hanging.fake_pod.hangs = True
    world.operator.requeue()
    world.until("Ready", "Unknown", "PodsUnreachable", 20)
    message = {c["type"]: c["message"] for c in world.operator.status()["conditions"]}["Ready"]
    assert f"pod {hanging.pod['metadata']['name']} does not report its status: no response within 4 s" in message
    world.edit(adapters=[SQL, PIRATE])
    wait_for(lambda: len(fine.fake_pod.catalog.adapters) == 2, REACHED_S, "the other one told")
    wait_for(lambda: ("Warning", "PodsUnreachable") in world.events(), 10, "the event")
    hanging.fake_pod.hangs = False
    world.until("Ready", "True", seconds=20)
    assert world.held() == [["sql", "pirate"]] * 2


def test_a_slow_deletion_of_an_object_delays_neither_adapters_nor_status(world, cluster):
    """For example because of the finalizer of another controller."""
    cluster.merge(*POLICY, HELD, world.namespace)
    cluster.delete(*POLICY, world.namespace)
    world.edit(adapters=[SQL, PIRATE])
    world.until("AdaptersReady", "True", seconds=REACHED_S)
    assert world.held() == [["sql", "pirate"]] * 2
    world.until("Ready", "False", "Updating")
    (message,) = [c["message"] for c in world.operator.status()["conditions"] if c["type"] == "Ready"]
    assert message.endswith(
        f"NetworkPolicy {world.namespace}/tales is being deleted and waits for its finalizers example.com/held; the "
        "operator creates it again when the deletion is complete"
    )
    cluster.merge(*POLICY, LET_GO, world.namespace)
    world.until("Ready", "True", seconds=REACHED_S)


def test_a_replaced_service_is_not_ready_with_objects_of_its_predecessor(world, cluster):
    """Its objects were orphaned, the operator misses the deletion, and one object is deleted slowly."""
    cache = world.operator.controller.cache
    put, remove = cache.upsert, cache.remove
    ends = lambda kind, body: kind is resources.LLM_SERVICE and "deletionTimestamp" in body["metadata"]  # noqa: E731
    cache.upsert = lambda kind, body: None if ends(kind, body) else put(kind, body)
    cache.remove = lambda kind, body: None if kind is resources.LLM_SERVICE else remove(kind, body)
    cluster.merge(*POLICY, HELD, world.namespace)
    cluster.delete(*POLICY, world.namespace)
    wait_for(lambda: cache.get(resources.NETWORK_POLICY, world.namespace, "tales").deleting, 20, "it is going")
    cluster.delete(*API, "tales", world.namespace, propagationPolicy="Orphan")
    wait_for(lambda: not cluster.get(*API, "tales", world.namespace), 20, "it is gone")
    cluster.apply(llm_service(replicas=2, adapters=[SQL], engine={"maxModelLen": 512}), world.namespace)
    world.until("Ready", "False", "Updating")
    world.operator.requeue()
    assert world.conditions()["Ready"] == ("False", "Updating")
    cluster.merge(*POLICY, LET_GO, world.namespace)
    world.until("Ready", "True")


def test_a_difference_between_plan_and_measurement_is_reported(world):
    for member in world.pods():
        member.fake_pod.kv_tokens = 16
    world.operator.requeue()
    wait_for(lambda: ("Warning", "PlanDiffers") in world.events(), 20, "told")
    assert (
        "fewer than the plan's" in {c["type"]: c["message"] for c in world.operator.status()["conditions"]}["Planned"]
    )


def test_a_rollout_completes_at_full_occupancy_and_is_not_ready_meanwhile(cluster, namespace, fleet):
    """Both GPUs of the only node are taken: each new pod needs the one of an old one."""
    with ControllerHarness(cluster, namespace) as operator:
        gpu = {"product": "NVIDIA-L4", "count": 1}
        cluster.apply(llm_service(device="GPU", gpu=gpu, replicas=2, runtime={"image": "quire:one"}), namespace)
        world = World(cluster, namespace, operator, fleet)
        world.until("Ready", "True")
        old = {m.pod["metadata"]["uid"] for m in world.pods()}
        # The new pods start and do not come up yet.
        fleet.pod_options = lambda pod: {"unready_reason": "core is starting"}
        world.edit(runtime={"image": "quire:two"})
        wait_for(lambda: {m.pod["metadata"]["uid"] for m in world.pods()} - old, 120, "a new pod")
        world.until("Ready", "False", "PodsNotReady")
        assert world.conditions()["Available"] == ("True", "MinimumReplicas")
        fleet.pod_options = lambda pod: {}
        for member in world.pods():
            member.fake_pod.unready_reason = ""
        world.until("Ready", "True", seconds=60)
        images = {m.pod["spec"]["containers"][0]["image"] for m in world.pods()}
        assert images == {"quire:two"} and len(world.pods()) == 2
        # One more than there are GPUs.
        cluster.kubectl("scale", "llm", "tales", "--replicas=3", namespace=namespace)
        world.until("Ready", "False", "InsufficientGPU")
        message = {c["type"]: c["message"] for c in operator.status()["conditions"]}["Ready"]
        assert "Insufficient nvidia.com/gpu" in message
        wait_for(lambda: ("Warning", "InsufficientGPU") in world.events(), 10, "the event")
        assert operator.status()["readyReplicas"] == 2


MOVED = {**SQL, "source": {"pvc": {"claimName": "models", "path": "sql-v2"}}}


def paths(world):
    """Path that requests for sql use, on each pod."""
    return [m.fake_pod.catalog.adapters[0].source.pvc.path for m in world.pods()]


def live_paths(world):
    """Path in the ConfigMap, which pods read when they start, and the paths of the contents beside it."""
    data = world.cluster.get("v1", "ConfigMap", "tales-adapters", world.namespace)["data"]["adapters.json"]
    entry = json.loads(data)["adapters"][0]
    return [role and role["source"]["pvc"]["path"] for role in (entry, entry.get("candidate"), entry.get("previous"))]


def test_new_content_switches_only_after_every_pod_has_verified_it(world):
    slow = world.pods()[1].fake_pod
    slow.loading_adapters.add("sql@@candidate")
    world.edit(adapters=[MOVED])
    world.until("AdaptersReady", "False", "Loading", REACHED_S)
    assert paths(world) == ["sql", "sql"] and live_paths(world) == ["sql", "sql-v2", None]
    assert world.operator.status()["adapters"][0]["state"] == "Loading"
    assert world.operator.status()["models"] == ["tales", "sql"], "the old content serves"
    slow.loading_adapters.clear()
    wait_for(lambda: paths(world) != ["sql", "sql"], 20, "the switch")
    begun = time.monotonic()
    wait_for(lambda: paths(world) == ["sql-v2", "sql-v2"], 20, "the switch of the other pod")
    assert time.monotonic() - begun < 2.0
    world.until("AdaptersReady", "True", seconds=REACHED_S)
    assert live_paths(world) == ["sql-v2", None, "sql"], "the previous content stays"


def test_if_one_pod_fails_nothing_switches_and_a_new_pod_gets_the_live_content(world):
    broken = world.pods()[1]
    broken.fake_pod.failing_adapters["sql@@candidate"] = "CanaryFailed: the output is 'x', and must start with 'y'"
    world.edit(adapters=[MOVED, PIRATE])
    world.until("AdaptersReady", "False", "LoadFailed", REACHED_S)
    name = broken.pod["metadata"]["name"]
    entries = {entry["name"]: entry for entry in world.operator.status()["adapters"]}
    assert entries["sql"]["message"].startswith(f"pod {name}: CanaryFailed: the output is 'x'")
    assert "still serving sha256:" in entries["sql"]["message"]
    assert entries["pirate"]["state"] == "Ready", "it does not wait for the other adapter"
    wait_for(lambda: ("Warning", "AdapterFailed") in world.events(), 10, "the event")
    world.edit(replicas=3)
    wait_for(lambda: len(world.pods()) == 3, 120, "the third pod")
    assert paths(world) == ["sql"] * 3 and live_paths(world) == ["sql", "sql-v2", None]
    broken.fake_pod.failing_adapters.clear()
    wait_for(lambda: paths(world) == ["sql-v2"] * 3, 120, "the switch")
    world.until("Ready", "True")


def test_a_restarted_operator_goes_on_with_the_verification(world, cluster, namespace):
    slow = world.pods()[1].fake_pod
    slow.loading_adapters.add("sql@@candidate")
    world.edit(adapters=[MOVED])
    wait_for(lambda: live_paths(world) == ["sql", "sql-v2", None], 20, "the candidate")
    world.operator.stop()
    slow.loading_adapters.clear()
    with ControllerHarness(cluster, namespace):
        wait_for(lambda: paths(world) == ["sql-v2"] * 2, 120, "the switch")
        world.edit(adapters=[SQL])
        wait_for(lambda: paths(world) == ["sql"] * 2 and live_paths(world) == ["sql", None, "sql-v2"], 120, "back")


def test_a_promotion_reaches_every_pod(world):
    sources = [{"pvc": {"claimName": "models", "path": path}} for path in ("sql", "sql-v2")]
    versions = [{"name": f"v{i}", "source": source} for i, source in enumerate(sources, 1)]
    world.edit(adapters=[{"name": "sql", "versions": versions}])
    world.until("AdaptersReady", "True", seconds=REACHED_S)

    def weights():
        return [{v.name: v.weight for v in m.fake_pod.catalog.adapters[0].versions} for m in world.pods()]

    assert weights() == [{"v1": 1, "v2": 1}] * 2
    env = {**os.environ, "KUBECONFIG": str(world.cluster.kubeconfig)}
    command = [str(Path(sys.executable).with_name("quire")), "adapter", "promote", "sql"]
    options = ["-n", world.namespace, "--service", "tales"]
    promoted = subprocess.run([*command, "v2", *options], env=env, capture_output=True, text=True, check=True)
    assert "version v2 gets all requests" in promoted.stdout
    wait_for(lambda: weights() == [{"v1": 0, "v2": 1}] * 2, REACHED_S, weights)
    missing = subprocess.run([*command, "v3", *options], env=env, capture_output=True, text=True)
    assert missing.returncode == 1 and "has no version 'v3', but v1, v2" in missing.stderr
