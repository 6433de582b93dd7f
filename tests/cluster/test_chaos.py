# SPDX-License-Identifier: Apache-2.0
"""Two LLMServices through random operations and faults, at a real API server.

No status contradicts itself or the pods. In the end both services are Ready and the operator writes nothing.
`FUZZ_HISTORIES=40` tries the first 40 seeds, `FUZZ_HISTORIES=40-99` those from 40 on; with `FUZZ_EVENTS=60` each has
more steps.
"""

import os
import time

import pytest
from support.chaos.downloads import source_of
from support.chaos.environment import ChaosEnvironment
from support.chaos.invariants import LLM_SERVICE_KIND, desired_catalog_digest, is_reported_ready
from support.chaos.operations import SERVICES, RandomOperations
from support.chaos.recorders import RecordingFakePods, is_ready, is_serving_pod_of, source_digest
from support.controller_harness import CHILDREN
from support.engine_processes import wait_for

from quire_operator.controller import reconciler
from quire_operator.render import object_names

NUM_EVENTS = int(os.environ.get("FUZZ_EVENTS", "16"))
SETTLE_TIMEOUT_S, QUIET_S = 45.0, 1.0
MANAGED = f"{object_names.MANAGED_BY}={object_names.MANAGER}"
first, _, last = os.environ.get("FUZZ_HISTORIES", "1").rpartition("-")
SEEDS = range(int(first), int(last) + 1) if first else range(int(last))


@pytest.fixture(scope="module")
def fake_pods(kubelet):
    with RecordingFakePods(kubelet) as fake_pods:
        yield fake_pods


@pytest.fixture
def short_intervals(monkeypatch):
    """The operator polls its pods every half second, so that the test takes seconds."""
    for name in ("_POLL_S", "_MAX_POLL_S", "_READY_POLL_S"):
        monkeypatch.setattr(reconciler, name, 0.5)
    monkeypatch.setattr(reconciler, "_FAILED_DOWNLOAD_RETRY_S", 2.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_statuses_are_correct_during_faults_and_settle_afterwards(
    cluster, namespace, fake_pods, short_intervals, tmp_path, seed
):
    with ChaosEnvironment(cluster, namespace, fake_pods, tmp_path) as environment:
        try:
            operations = RandomOperations(environment, seed)
            operations.start()
            for half in range(2):
                for _ in range(NUM_EVENTS // 2):
                    operations.step()
                operations.unblock()
                if half:
                    operations.restore_all()
                settle(environment)
            # The scheduler tries an unschedulable pod again after ten seconds.
            wait_for(lambda: all_ready(environment), SETTLE_TIMEOUT_S, "all services Ready")
            settle(environment)
            # A new operator, which has no state, makes no write.
            environment.stop_operator()
            environment.start_operator()
            settle(environment)
            assert environment.operator.recorded_writes == []
            wait_for(lambda: not objects_left_behind(environment), SETTLE_TIMEOUT_S, "garbage collection")
        except BaseException as error:
            left = objects_left_behind(environment)
            raise AssertionError(f"{error}; left behind: {left}\n{history(environment, seed)}") from error
        violations = environment.invariants.violations()
        assert not violations, "\n".join([*violations, history(environment, seed)])


def all_ready(environment):
    environment.fake_pods.refresh_secrets()
    return all(is_reported_ready(environment.get_service(name)["status"]) for name in SERVICES)


def settle(environment):
    """Wait until each status is correct and the operator writes nothing."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        environment.fake_pods.refresh_secrets()
        problems = [f"{name}: {problem}" for name in SERVICES for problem in differences(environment, name)]
        if not problems:
            before = resource_versions(environment)
            time.sleep(QUIET_S)
            after = resource_versions(environment)
            if before == after and not any(differences(environment, name) for name in SERVICES):
                environment.log_step("settled")
                return
            problems = [f"written: {sorted(dict(after.items() ^ before.items()))}"]
        assert time.monotonic() < deadline, f"not settled after {SETTLE_TIMEOUT_S} s: {problems}"
        time.sleep(0.1)


def resource_versions(environment):
    """Return the versions of all objects that the operator writes."""
    return {
        (kind, body["metadata"]["name"]): body["metadata"]["resourceVersion"]
        for version, kind in [LLM_SERVICE_KIND, *CHILDREN, ("batch/v1", "Job"), ("events.k8s.io/v1", "Event")]
        for body in environment.cluster.items(version, kind, environment.namespace)
        if kind != "Event" or body.get("regarding", {}).get("kind") == LLM_SERVICE_KIND[1]
    }


def differences(environment, name):
    """Return the differences between a status and the cluster."""
    body = environment.get_service(name)
    spec, status, generation = body["spec"], body.get("status", {}), body["metadata"]["generation"]
    if status.get("observedGeneration") != generation:
        return [f"observedGeneration is {status.get('observedGeneration')}, not {generation}"]
    pods = [ObservedPod(environment, pod) for pod in environment.pods_of(name) if is_serving_pod_of(pod, name)]
    pods = sorted((pod for pod in pods if pod.alive), key=lambda pod: pod.name)
    ready = [pod for pod in pods if pod.ready]
    models = [pod.report.models if pod.report else [] for pod in ready]
    deployment = environment.cluster.get("apps/v1", "Deployment", name, environment.namespace) or {}
    expected = {
        "replicas": deployment.get("status", {}).get("replicas", 0),
        "readyReplicas": len(ready),
        "models": [model for model in models[0] if all(model in others for others in models)] if models else [],
    }
    valid = is_valid(spec, name)
    if valid:
        expected["adapters"] = [adapter_entry(adapter, pods, ready, spec) for adapter in spec.get("adapters", [])]
    found = [f"{key} is {status.get(key)}, not {value}" for key, value in expected.items() if status.get(key) != value]
    conditions = {c["type"]: c["status"] for c in status["conditions"]}
    expected_conditions = {
        "ConfigValid": str(valid),
        "Ready": expected_ready(spec, valid, pods, ready, deployment, expected),
    }
    if valid and fits(spec) and not spec.get("paused"):
        expected_conditions["ModelCached"] = "True"
    found += [
        f"{kind} is {conditions[kind]}, not {value}"
        for kind, value in expected_conditions.items()
        if conditions[kind] != value
    ]
    if expected_conditions["Ready"] == "True" and not found:
        plan, length = status["plan"], spec.get("engine", {}).get("maxModelLen")
        if length not in (None, plan["maxModelLen"]["value"]):
            found.append(f"the plan contains {plan['maxModelLen']}, and the spec {length}")
        tokens = min((n for pod in ready if (n := pod.started_pod.fake_pod.kv_tokens)), default=None)
        if tokens not in (None, plan.get("measured", {}).get("kvTokens")):
            found.append(f"the plan contains the measurement {plan.get('measured')}, not {tokens}")
    return found


class ObservedPod:
    """A pod as it is now."""

    def __init__(self, environment, body):
        meta, phase = body["metadata"], body["status"].get("phase")
        self.name = meta["name"]
        self.alive = "deletionTimestamp" not in meta and phase in ("Pending", "Running")
        self.started_pod = environment.fake_pods.started_pods.get(meta["uid"])
        self.report = self.started_pod.fake_pod.current_status() if self.started_pod and phase == "Running" else None
        self.ready = is_ready(body) and (self.report is None or self.report.ready)

    def state(self, adapter, spec):
        """Return state and error of an adapter of a spec."""
        is_current = self.report and self.report.catalogue == desired_catalog_digest(spec)
        found = next((a for a in self.report.adapters if a.name == adapter["name"]), None) if is_current else None
        return (found.state.value, found.error) if found else ("Pending", "")


def adapter_entry(adapter, pods, ready, spec):
    """Return the expected entry of status.adapters."""
    shown = ready or [pod for pod in pods if pod.report]
    states = [(*pod.state(adapter, spec), pod.name) for pod in shown]
    order = ("Failed", "Pending", "Fetching", "Loading", "Ready")
    state, error, pod_name = min(states, key=lambda it: (order.index(it[0]), it[2]), default=("Pending", "", ""))
    num_ready = sum(pod.state(adapter, spec)[0] == "Ready" for pod in ready)
    entry = {"name": adapter["name"], "ready": num_ready, "total": len(ready), "state": state}
    digest = {"digest": source_digest(adapter["source"])} if any(state == "Ready" for state, *_ in states) else {}
    return entry | digest | ({"message": f"pod {pod_name}: {error}"} if error else {})


def expected_ready(spec, valid, pods, ready, deployment, expected):
    """Return the expected status of the condition Ready."""
    count = spec.get("replicas", 1)
    if not valid or (not spec.get("paused") and not fits(spec)):
        return "False"
    if spec.get("paused"):
        return "Unknown"
    kinds = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
    numbers = [deployment.get("status", {}).get(kind, 0) for kind in kinds]
    is_complete = len(pods) == len(ready) == count and set(numbers) == {count}
    if count == 0 or not is_complete or not all(pod.started_pod.matches_spec(spec) for pod in pods):
        return "False"
    if not all(pod.report for pod in ready):
        return "Unknown"
    on_all = all(entry["ready"] == count for entry in expected["adapters"])
    return str(on_all and all(pod.report.catalogue == desired_catalog_digest(spec) for pod in ready))


def is_valid(spec, name):
    """Whether the operator accepts a spec."""
    adapters = spec.get("adapters") or []
    model = spec["model"]
    is_name_taken = model.get("servedName", name) in [adapter["name"] for adapter in adapters]
    slots = spec.get("lora", {}).get("maxLoaded", 8)
    pinned = sum(adapter.get("pinned", False) for adapter in adapters)
    is_source_valid = len(model["source"]) == 1 and model["source"].keys() <= {"pvc", "http"}
    return is_source_valid and not is_name_taken and (slots > 0 or not adapters) and pinned <= slots


def fits(spec):
    """Whether the memory is sufficient."""
    return spec.get("runtime", {}).get("memory") is None


def objects_left_behind(environment):
    """Return the objects whose owner was deleted, and Jobs that download another source."""
    services = {name: environment.get_service(name) for name in SERVICES}
    owners = {service["metadata"]["uid"] for service in services.values() if service}
    found = []
    for version, kind in (*CHILDREN, ("apps/v1", "ReplicaSet"), ("batch/v1", "Job"), ("v1", "Pod")):
        for body in environment.cluster.items(version, kind, environment.namespace, labelSelector=MANAGED):
            meta = body["metadata"]
            references = meta.get("ownerReferences", [])
            is_owned = not references or any(owner["uid"] in owners for owner in references)
            if not is_owned or (references and kind == "Job" and is_outdated_download(body, services)):
                found.append((kind, meta["name"]))
            if kind in ("Deployment", "ReplicaSet", "Job"):
                owners.add(meta["uid"])
    return found


def is_outdated_download(job, services):
    """Whether a Job downloads a source that its service does not use."""
    labels = job["metadata"]["labels"]
    service = services.get(labels.get(object_names.INSTANCE))
    if not service or labels.get(object_names.COMPONENT) != object_names.DOWNLOAD:
        return False
    return source_of(job["spec"]["template"]["spec"]) != service["spec"]["model"]["source"]


def history(environment, seed):
    """Return the operations and the conditions of the services, by time."""
    lines, last_status = list(environment.step_log), {}
    for version in environment.invariants.services.versions:
        meta, status = version.body["metadata"], version.body.get("status", {})
        if status != last_status.get(meta["uid"]):
            last_status[meta["uid"]] = status
            conditions = [f"{c['type']}={c['status']}/{c['reason']}" for c in status.get("conditions", [])]
            lines.append(f"{version.seen_at:.2f}   {meta['name']} {meta['generation']}: {' '.join(conditions)}")
    lines.sort(key=lambda line: float(line.partition(" ")[0]))
    return "\n".join([f"seed {seed} (FUZZ_HISTORIES={seed}-{seed}):", *lines])
