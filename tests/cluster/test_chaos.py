# SPDX-License-Identifier: Apache-2.0
"""Two LLMServices through random histories, at a real API server: no status ever says what is not so, and in the end
both are Ready and everybody is quiet.

`FUZZ_HISTORIES=40` tries the first 40 seeds, `FUZZ_HISTORIES=40-99` those from 40 on; with `FUZZ_EVENTS=60` each is
longer.
"""

import os
import time

import pytest
from support.chaos.downloads import source_of
from support.chaos.environment import ChaosEnvironment
from support.chaos.invariants import LLM_SERVICE_KIND, desired_catalog_digest
from support.chaos.operations import SERVICES, RandomOperations
from support.chaos.recorders import RecordingFakePods, is_ready, is_serving_pod_of, source_digest
from support.controller_harness import CHILDREN, answer_model_readers
from support.engine_processes import wait_for
from support.fake_kubelet import FakeKubelet

from quire_operator.controller import reconciler
from quire_operator.render import object_names

NUM_EVENTS = int(os.environ.get("FUZZ_EVENTS", "16"))
SETTLED_S, QUIET_S = 45.0, 1.0
"""By when a status is what is so; for how long nothing is to be written then."""
MANAGED = f"{object_names.MANAGED_BY}={object_names.MANAGER}"
first, _, last = os.environ.get("FUZZ_HISTORIES", "1").rpartition("-")
SEEDS = range(int(first), int(last) + 1) if first else range(int(last))


@pytest.fixture(scope="module")
def fleet(cluster):
    """Pods on a node."""
    cluster.require_controllers()
    with FakeKubelet(cluster, "node-histories") as node:
        answer_model_readers(node)
        with RecordingFakePods(node) as fleet:
            yield fleet


@pytest.fixture
def hasty(monkeypatch):
    """Operators that look at their pods often, so that seconds are enough."""
    for name, seconds in {
        "_POLL_S": 0.3,
        "_MAX_POLL_S": 0.5,
        "_READY_POLL_S": 0.5,
        "_FAILED_DOWNLOAD_RETRY_S": 2.0,
    }.items():
        monkeypatch.setattr(reconciler, name, seconds)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_status_ever_says_what_is_not_so(cluster, namespace, fleet, hasty, tmp_path, seed):
    with ChaosEnvironment(cluster, namespace, fleet, tmp_path) as world:
        try:
            history = RandomOperations(world, seed)
            history.start()
            for half in range(2):
                for _ in range(NUM_EVENTS // 2):
                    history.step()
                history.unblock()
                if half:
                    history.restore_all()
                world.log_step("what comes of it is waited for")
                settle(world)
            # The scheduler comes back within ten seconds to a pod that it had no node for.
            wait_for(lambda: all_ready(world), SETTLED_S, "all are ready")
            settle(world)
            # A new operator, which has nothing to remember, finds nothing to do.
            world.stop_operator()
            world.start_operator()
            settle(world)
            assert world.operator.recorded_writes == []
            collected(world)
        except BaseException as error:
            raise AssertionError(f"{error}\n{account(world, seed)}") from error
        finally:
            wrong = world.invariants.violations()
        assert not wrong, "\n".join([*wrong, account(world, seed)])


def all_ready(world):
    world.fake_pods.refresh_secrets()
    return all(judged(world.get_service(name)["status"])["Ready"]["status"] == "True" for name in SERVICES)


def settle(world):
    """Wait until each status is correct and the operator writes nothing."""
    end = time.monotonic() + SETTLED_S
    while True:
        world.fake_pods.refresh_secrets()
        found = [f"{name}: {words}" for name in SERVICES for words in differences(world, name)]
        if not found:
            before = world.total_writes(), versions(world)
            time.sleep(QUIET_S)
            after = world.total_writes(), versions(world)
            if before == after and not any(differences(world, name) for name in SERVICES):
                world.log_step("it has come")
                return
            changed = sorted(dict(after[1].items() ^ before[1].items()))
            found = [f"not quiet: {changed}, {after[0] - before[0]} writes"]
        assert time.monotonic() < end, f"not settled after {SETTLED_S} s: {found}"
        time.sleep(0.1)


def versions(world):
    """Of everything that an operator writes."""
    return {
        (kind, body["metadata"]["name"]): body["metadata"]["resourceVersion"]
        for version, kind in [LLM_SERVICE_KIND, *CHILDREN, ("batch/v1", "Job"), ("events.k8s.io/v1", "Event")]
        for body in world.cluster.items(version, kind, world.namespace)
        if kind != "Event" or body.get("regarding", {}).get("kind") == LLM_SERVICE_KIND[1]
    }


def differences(world, name):
    """Return the differences between a status and the cluster."""
    body = world.get_service(name)
    spec, status, generation = body["spec"], body.get("status", {}), body["metadata"]["generation"]
    if status.get("observedGeneration") != generation:
        return [f"observedGeneration {status.get('observedGeneration')}, and it is {generation}"]
    pods = [
        Pod(world, pod) for pod in world.cluster.items("v1", "Pod", world.namespace) if is_serving_pod_of(pod, name)
    ]
    pods = sorted((pod for pod in pods if pod.alive), key=lambda pod: pod.name)
    ready = [pod for pod in pods if pod.ready]
    said = [pod.said.models if pod.said else [] for pod in ready]
    deployment = world.cluster.get("apps/v1", "Deployment", name, world.namespace) or {}
    wanted = {
        "replicas": deployment.get("status", {}).get("replicas", 0),
        "readyReplicas": len(ready),
        "models": [model for model in said[0] if all(model in others for others in said)] if said else [],
    }
    usable = is_usable(spec, name)
    if usable:
        wanted["adapters"] = [entry_of(adapter, pods, ready, spec) for adapter in spec.get("adapters", [])]
    found = [f"{key} {status.get(key)}, and it is {value}" for key, value in wanted.items() if status.get(key) != value]
    conditions = {kind: condition["status"] for kind, condition in judged(status).items()}
    holds = {"ConfigValid": str(usable), "Ready": ready_of(spec, usable, pods, ready, deployment, wanted)}
    if usable and fits(spec) and not spec.get("paused"):
        holds["ModelCached"] = "True"
    found += [f"{kind} {conditions[kind]}, and it is {it}" for kind, it in holds.items() if conditions[kind] != it]
    if holds["Ready"] == "True" and not found:
        plan, length = status["plan"], spec.get("engine", {}).get("maxModelLen")
        if length not in (None, plan["maxModelLen"]["value"]):
            found.append(f"plan of {plan['maxModelLen']}, and the spec says {length}")
        tokens = min((n for pod in ready if (n := pod.started_pods.fake_pod.kv_tokens)), default=None)
        if tokens not in (None, plan.get("measured", {}).get("kvTokens")):
            found.append(f"plan that measured {plan.get('measured')}, and it is {tokens}")
    return found


class Pod:
    """A pod as it is now."""

    def __init__(self, world, body):
        meta, phase = body["metadata"], body["status"].get("phase")
        self.name = meta["name"]
        self.alive = "deletionTimestamp" not in meta and phase in ("Pending", "Running")
        self.started_pods = world.fake_pods.started_pods.get(meta["uid"])
        self.said = self.started_pods.fake_pod.current_status() if self.started_pods and phase == "Running" else None
        self.ready = is_ready(body) and (self.said is None or self.said.ready)

    def state(self, adapter, spec):
        """State and error of an adapter of a spec."""
        works = self.said and self.said.catalogue == desired_catalog_digest(spec)
        found = next((a for a in self.said.adapters if a.name == adapter["name"]), None) if works else None
        return (found.state.value, found.error) if found else ("Pending", "")


def entry_of(adapter, pods, ready, spec):
    """The entry of status.adapters."""
    shown = ready or [pod for pod in pods if pod.said]
    states = [(*pod.state(adapter, spec), pod.name) for pod in shown]
    order = ("Failed", "Pending", "Fetching", "Loading", "Ready")
    state, error, blamed = min(states, key=lambda it: (order.index(it[0]), it[2]), default=("Pending", "", ""))
    num_ready = sum(pod.state(adapter, spec)[0] == "Ready" for pod in ready)
    entry = {"name": adapter["name"], "ready": num_ready, "total": len(ready), "state": state}
    digest = {"digest": source_digest(adapter["source"])} if any(state == "Ready" for state, *_ in states) else {}
    return entry | digest | ({"message": f"pod {blamed}: {error}"} if error else {})


def ready_of(spec, usable, pods, ready, deployment, wanted):
    """Status of the condition Ready."""
    count = spec.get("replicas", 1)
    if not usable or (not spec.get("paused") and not fits(spec)):
        return "False"
    if spec.get("paused"):
        return "Unknown"
    kinds = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
    numbers = [deployment.get("status", {}).get(kind, 0) for kind in kinds]
    there = len(pods) == len(ready) == count and set(numbers) == {count}
    if count == 0 or not there or not all(pod.started_pods.matches_spec(spec) for pod in pods):
        return "False"
    if not all(pod.said for pod in ready):
        return "Unknown"
    on_all = all(entry["ready"] == count for entry in wanted["adapters"])
    return str(on_all and all(pod.said.catalogue == desired_catalog_digest(spec) for pod in ready))


def is_usable(spec, name):
    """Whether an operator can do anything with it: UNUSABLE."""
    adapters = spec.get("adapters") or []
    model = spec["model"]
    taken = model.get("servedName", name) in [adapter["name"] for adapter in adapters]
    slots = spec.get("lora", {}).get("maxLoaded", 8)
    pinned = sum(adapter.get("pinned", False) for adapter in adapters)
    sources = [model["source"], *(adapter["source"] for adapter in adapters)]
    one_each = model["source"].keys() <= {"pvc", "http"} and all(len(source) == 1 for source in sources)
    return one_each and not taken and (slots > 0 or not adapters) and pinned <= slots


def fits(spec):
    """Whether there is memory for it."""
    return spec.get("runtime", {}).get("memory") is None


def judged(status):
    return {condition["type"]: condition for condition in status.get("conditions", [])}


def collected(world):
    """Until nothing of services that are gone is left."""
    end = time.monotonic() + SETTLED_S
    while found := not_owned(world):
        assert time.monotonic() < end, f"left behind: {found}"
        time.sleep(0.2)


def not_owned(world):
    """Wait until no object has a deleted owner. Orphaned objects have no owner."""
    owners = {body["metadata"]["uid"] for name in SERVICES if (body := world.get_service(name))}
    found = []
    for version, kind in (*CHILDREN, ("apps/v1", "ReplicaSet"), ("batch/v1", "Job"), ("v1", "Pod")):
        bodies = world.cluster.items(version, kind, world.namespace, labelSelector=MANAGED)
        found += [(kind, body["metadata"]["name"]) for body in bodies if not owned(body, owners)]
        if kind == "Job":
            found += [(kind, body["metadata"]["name"]) for body in bodies if is_of_no_use(world, body)]
        owners |= {body["metadata"]["uid"] for body in bodies if kind in ("Deployment", "ReplicaSet", "Job")}
    return found


def is_of_no_use(world, job):
    """Whether a Job of a service brings what the service has no use for."""
    labels = job["metadata"]["labels"]
    service = world.get_service(labels.get(object_names.INSTANCE, ""))
    download = labels.get(object_names.COMPONENT) == object_names.DOWNLOAD and job["metadata"].get("ownerReferences")
    return (
        bool(service and download) and source_of(job["spec"]["template"]["spec"]) != service["spec"]["model"]["source"]
    )


def owned(body, owners):
    found = body["metadata"].get("ownerReferences", [])
    return not found or any(owner["uid"] in owners for owner in found)


def account(world, seed):
    """The history, and what the services said meanwhile."""
    lines, wont = list(world.step_log), ("ModelCached", "Available")
    before = {}
    for version in world.invariants.services.versions:
        meta, status = version.body["metadata"], version.body.get("status", {})
        if status != before.get(meta["uid"]):
            before[meta["uid"]] = status
            short = [f"{kind}={c['status']}/{c['reason']}" for kind, c in judged(status).items() if kind not in wont]
            short += [c["message"] for c in judged(status).values() if c["reason"] == "PodsUnreachable"][:1]
            lines.append(
                f"{version.seen_at:.2f}   {meta['name']} {meta['uid'][:4]} {meta['generation']}: {' '.join(short)}"
            )
    return "\n".join([f"seed {seed} (FUZZ_HISTORIES={seed}-{seed}):", *sorted(lines, key=moment)])


def moment(line):
    return float(line.partition(" ")[0])
