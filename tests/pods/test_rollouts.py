# SPDX-License-Identifier: Apache-2.0
"""Changes of a service with two pods, under load: no request fails in a rollout, a scale-down or an eviction.

`make rollouts RUNS=10` runs each case ten times; `make e2e` runs some of them once.
"""

import concurrent.futures
import json
import os
import threading

import pytest
from support.engine_processes import wait_for
from support.envoy import running_envoy
from support.pod_cluster import (
    OPERATOR_NAMESPACE,
    OTHER_SERVER_IMAGE,
    ServiceEndpoint,
    create_examples_volume,
    current_condition,
    diagnostics,
    example_service,
    get_service,
    is_ready,
    kill_supervisor,
    server_container,
    service_endpoint,
    serving_pods,
)
from support.steady_clients import KINDS, read_long_stream, steady_clients

from quire_spec import constants

RUNS = int(os.environ.get("QUIRE_ROLLOUT_RUNS", "0"))
"""Number of runs of every case; 0: one run of the cases for CI."""
IN_CI = ("engine", "eviction", "kill")
MAX_REFUSAL_S = 5.0
"""After the supervisor was killed, the Service leads to its pod for at most this long."""
ADAPTER_PATHS = ("adapters/sql", "adapters/pirate")


@pytest.fixture(scope="module")
def namespace(cluster, operator):
    """A namespace with examples/kind/tales.yaml on two pods, Ready."""
    if not cluster.programs:
        pytest.skip("kubectl port-forward reaches one pod only; the Service's own address is needed")
    with cluster.namespace("rollouts") as name:
        create_examples_volume(cluster, name)
        body = example_service(replicas=2)
        cluster.kubectl("apply", "--filename=-", namespace=name, stdin=json.dumps(body))
        try:
            wait_settled(cluster, name)
        except AssertionError as error:
            status = json.dumps(get_service(cluster, name).get("status", {}), indent=1)
            raise AssertionError(
                f"{status}\n{diagnostics(cluster, name)}\n{diagnostics(cluster, OPERATOR_NAMESPACE)}"
            ) from error
        yield name


def wait_settled(cluster, namespace, num_pods=2):
    """Wait until the service is Ready, and no pod is ending."""

    def is_settled():
        pods = all_pods(cluster, namespace)
        ready = current_condition(cluster, namespace, "Ready").get("status") == "True"
        return ready and len(pods) == num_pods and all(map(is_ready, pods))

    wait_for(is_settled, 400, f"{num_pods} ready pods")


def all_pods(cluster, namespace):
    """Return the server pods, also those that are being deleted."""
    selector = "app.kubernetes.io/instance=tales,app.kubernetes.io/component=server"
    return cluster.items("v1", "Pod", namespace, labelSelector=selector)


def uids(cluster, namespace):
    return {pod["metadata"]["uid"] for pod in all_pods(cluster, namespace)}


def patch(cluster, namespace, spec):
    body = json.dumps({"spec": spec})
    cluster.kubectl("patch", "llm", "tales", "--type=merge", f"--patch={body}", namespace=namespace)


def replace_all(cluster, namespace, spec):
    """Change the spec, and wait until both pods are other ones."""
    before = uids(cluster, namespace)
    patch(cluster, namespace, spec)
    wait_for(lambda: not before & uids(cluster, namespace), 500, "two new pods")
    wait_settled(cluster, namespace)


def change_image(cluster, namespace):
    image = get_service(cluster, namespace)["spec"].get("runtime", {}).get("image")
    replace_all(cluster, namespace, {"runtime": {"image": None if image else OTHER_SERVER_IMAGE}})


def change_engine(cluster, namespace):
    value = get_service(cluster, namespace)["spec"].get("engine", {}).get("maxNumQueuedReqs", 512)
    replace_all(cluster, namespace, {"engine": {"maxNumQueuedReqs": value + 1}})


def change_adapter(cluster, namespace):
    """Move the adapter to other files and back, without a restart."""
    before = uids(cluster, namespace)
    for _ in ADAPTER_PATHS:
        move_adapter(cluster, namespace)
    assert uids(cluster, namespace) == before


def move_adapter(cluster, namespace):
    (adapter,) = get_service(cluster, namespace)["spec"]["adapters"]
    path = next(path for path in ADAPTER_PATHS if path != adapter["source"]["pvc"]["path"])
    digests = adapter_digests(cluster, namespace)
    source = {"pvc": {"claimName": "examples", "path": path}}
    patch(cluster, namespace, {"adapters": [{"name": "pirate", "source": source}]})
    wait_for(lambda: adapter_digests(cluster, namespace) not in (digests, [None]), 60, "the other adapter")
    wait_settled(cluster, namespace)


def adapter_digests(cluster, namespace):
    status = get_service(cluster, namespace)["status"]
    return [adapter.get("digest") for adapter in status["adapters"] if adapter["state"] == "Ready"] or [None]


def scale_down(cluster, namespace):
    cluster.kubectl("scale", "llm/tales", "--replicas=1", namespace=namespace)
    wait_settled(cluster, namespace, 1)


def evict(cluster, namespace):
    """Evict each pod in turn, as kubectl drain does."""
    for pod in serving_pods(cluster, namespace):
        name = pod["metadata"]["name"]
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
        cluster.request("POST", f"{cluster.path('v1', 'Pod', namespace, name)}/eviction", eviction)
        wait_for(lambda uid=pod["metadata"]["uid"]: uid not in uids(cluster, namespace), 200, f"the end of {name}")
        wait_settled(cluster, namespace)


CASES = {
    "image": change_image, "engine": change_engine, "adapter": change_adapter, "scale-down": scale_down,
    "eviction": evict,
}  # fmt: skip


def selected(*names):
    """Return the runs of cases: in CI some of them once, otherwise all."""
    if RUNS:
        return [pytest.param(name, id=f"{name}-{run}") for run in range(RUNS) for name in names]
    return [name for name in names if name in IN_CI]


@pytest.mark.parametrize("name", selected(*CASES))
def test_no_request_fails(cluster, namespace, name):
    with service_endpoint(cluster, namespace) as endpoint, steady_clients(endpoint) as clients:
        wait_for(lambda: len(clients.num_answers) == 3 * len(KINDS), 60, "an answer for each client")
        CASES[name](cluster, namespace)
        done = clients.num_answers.copy()
        wait_for(lambda: clients.num_answers.keys() == (clients.num_answers - done).keys(), 60, "further answers")
    print(f"\n{name}: {clients.num_answers.total()} answers, {len(clients.failures)} failures")
    assert clients.failures == []
    if name == "scale-down":
        cluster.kubectl("scale", "llm/tales", "--replicas=2", namespace=namespace)
        wait_settled(cluster, namespace)


@pytest.mark.parametrize("name", selected("kill"))
def test_a_killed_supervisor(cluster, namespace, name, tmp_path):
    """Open requests end with one error, and the Service leads to the pod for some seconds only. Clients of Envoy do not
    notice that."""
    hosts = [(pod["status"]["podIP"], constants.OPENAI_PORT) for pod in serving_pods(cluster, namespace)]
    victim = serving_pods(cluster, namespace)[0]
    pod_name, count = victim["metadata"]["name"], server_container(victim)["restartCount"]
    ports = {port["name"]: port["containerPort"] for port in victim["spec"]["containers"][0]["ports"]}
    direct = ServiceEndpoint(victim["status"]["podIP"], ports)
    started = {kind: threading.Event() for kind in KINDS}

    def is_restarted():
        return server_container(cluster.get("v1", "Pod", pod_name, namespace))["restartCount"] == count + 1

    with (
        running_envoy(hosts, tmp_path) as port,
        steady_clients(ServiceEndpoint("127.0.0.1", {"openai": port}), ("openai",)) as envoys_clients,
        service_endpoint(cluster, namespace) as endpoint,
        steady_clients(endpoint) as clients,
    ):
        wait_for(lambda: len(clients.num_answers) == 3 * len(KINDS), 60, "an answer for each client")
        wait_for(lambda: len(envoys_clients.num_answers) == 3, 60, "an answer for each client of Envoy")
        with concurrent.futures.ThreadPoolExecutor() as threads:
            streams = {kind: threads.submit(read_long_stream, direct, kind, started[kind]) for kind in KINDS}
            wait_for(lambda: all(event.is_set() for event in started.values()), 30, "open streams")
            ended = {kind: stream.result() for kind, stream in streams.items() if stream.done()}
            assert not ended, "these streams are too short for this test"
            kill_supervisor(cluster, namespace, pod_name)
            errors = {kind: stream.result(timeout=30) for kind, stream in streams.items()}
        wait_for(is_restarted, 240, "the container runs again")
        wait_settled(cluster, namespace)
    if RUNS > 1:
        # The kubelet waits longer and longer before it starts a container again that was killed, up to 5 minutes.
        cluster.delete("v1", "Pod", pod_name, namespace)
        wait_for(lambda: victim["metadata"]["uid"] not in uids(cluster, namespace), 120, "another pod")
        wait_settled(cluster, namespace)
    sent = [failure.sent_at for failure in clients.failures]
    refused_s = max((failure.failed_at for failure in clients.failures), default=0) - min(sent, default=0)
    print(
        f"\nkill: {clients.num_answers.total()} answers, {len(sent)} failures within {refused_s:.1f} s: "
        f"{sorted({failure.error for failure in clients.failures})}; the open streams: {errors}; "
        f"behind Envoy: {envoys_clients.num_answers.total()} answers, {envoys_clients.failures}"
    )
    assert {kind: len(found) for kind, found in errors.items()} == dict.fromkeys(KINDS, 1), errors
    assert refused_s <= MAX_REFUSAL_S, clients.failures
    # Only requests that were open when the supervisor was killed fail behind Envoy, at most one of each client.
    failed = [failure.client for failure in envoys_clients.failures]
    assert len(failed) == len(set(failed)), envoys_clients.failures
    assert not [f for f in envoys_clients.failures if "onnection refused" in f.error or "connection failure" in f.error]
