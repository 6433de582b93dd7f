# SPDX-License-Identifier: Apache-2.0
"""Replicas that are groups of pods, under the real controller of LeaderWorkerSet with its webhooks, on nodes without a
kubelet."""

import pytest
from support.controller_harness import ControllerHarness, llm_service
from support.controllers import running_lws
from support.engine_processes import wait_for

from quire_operator.kube import discovery

API, KIND = "quire.dev/v1alpha1", "LLMService"
LWS = "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"
DEPLOYMENT = "apps/v1", "Deployment"
FAST = {"minReadySeconds": 0}
pytestmark = pytest.mark.usefixtures("fake_pods")


@pytest.fixture(scope="module")
def lws(cluster, kubelet, tmp_path_factory):
    """The controller of LeaderWorkerSet."""
    with running_lws(cluster, tmp_path_factory.mktemp("lws")):
        yield


@pytest.fixture
def operator(cluster, namespace, lws):
    with ControllerHarness(cluster, namespace) as operator:
        yield operator


def of_groups(size=2, **spec):
    return llm_service(**{"engine": {"pipelineParallelSize": size}, "replicas": 2, "rollout": FAST, **spec})


def pods(cluster, namespace):
    return {pod["metadata"]["name"]: pod for pod in cluster.items("v1", "Pod", namespace)}


def pod_names(cluster, namespace):
    return sorted(name for name in pods(cluster, namespace) if "model" not in name)


def is_alive(pod):
    return "deletionTimestamp" not in pod["metadata"]


def serving(cluster, namespace):
    """Names of the ready pods that the Service of the clients selects. Its EndpointSlices stay empty, because the
    addresses of these pods are loopback addresses."""
    selector = cluster.get("v1", "Service", "tales", namespace)["spec"]["selector"].items()
    return {
        name
        for name, pod in pods(cluster, namespace).items()
        if selector <= pod["metadata"]["labels"].items()
        and is_alive(pod)
        and any(c["type"] == "Ready" and c["status"] == "True" for c in pod.get("status", {}).get("conditions", ()))
    }


def wait_ready(operator, timeout=60):
    def is_ready():
        status = operator.status()
        generation = operator.cluster.get(API, KIND, "tales", operator.namespace)["metadata"]["generation"]
        ready = operator.condition("Ready")
        return (status.get("observedGeneration"), ready.get("status")) == (generation, "True")

    try:
        wait_for(is_ready, timeout, "Ready")
    except AssertionError as error:
        raise AssertionError(f"{error}: {operator.status()}") from error


def everything(cluster, namespace):
    kinds = [("v1", "Service"), ("v1", "ConfigMap"), LWS, ("apps/v1", "StatefulSet"), ("v1", "Pod"), (API, KIND)]
    metas = [(kind, body["metadata"]) for kind in kinds for body in cluster.items(*kind, namespace)]
    return {(kind, meta["name"]): meta["resourceVersion"] for kind, meta in metas}


def test_without_the_kind_the_plan_says_so_and_a_later_installation_is_seen(
    cluster, namespace, kubelet, tmp_path, monkeypatch
):
    monkeypatch.setattr(discovery, "REFRESH_INTERVAL_S", 1.0)
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(rollout=FAST), namespace)
        wait_ready(operator)
        cluster.merge(API, KIND, "tales", {"spec": {"engine": {"pipelineParallelSize": 2}}}, namespace)

        def refused():
            planned = operator.condition("Planned")
            return (planned["status"], planned["reason"]) == ("False", "NoLeaderWorkerSet")

        wait_for(refused, 20, operator.status)
        assert operator.condition("Available")["status"] == "True", "the pods of the Deployment serve on"
        with running_lws(cluster, tmp_path):
            wait_ready(operator)
            assert pod_names(cluster, namespace) == ["tales-0", "tales-0-1"]
            assert cluster.items(*DEPLOYMENT, namespace) == []


def test_groups_are_made_rolled_out_and_left_alone(operator, cluster, namespace):
    cluster.apply(of_groups(), namespace)
    wait_ready(operator)
    assert pod_names(cluster, namespace) == ["tales-0", "tales-0-1", "tales-1", "tales-1-1"]
    status = operator.status()
    assert status["groups"] == {"size": 2, "wanted": 2, "ready": 2}
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (2, 2, 2)
    assert operator.condition("Available")["message"] == "2 of 2 groups serve"
    assert operator.condition("Progressing")["message"] == "2 of 2 groups have this generation and are ready"
    environment = {
        e["name"]: e.get("value") for e in pods(cluster, namespace)["tales-1-1"]["spec"]["containers"][0]["env"]
    }
    assert environment["LWS_LEADER_ADDRESS"] == f"tales-1.tales-1.{namespace}"
    assert (environment["LWS_GROUP_SIZE"], environment["LWS_WORKER_INDEX"]) == ("2", "1")
    assert serving(cluster, namespace) == {"tales-0", "tales-1"}
    (budget,) = cluster.items("policy/v1", "PodDisruptionBudget", namespace)
    wait_for(
        lambda: cluster.items("policy/v1", "PodDisruptionBudget", namespace)[0]["status"]["expectedPods"] == 4, 20, "4"
    )
    assert budget["spec"]["maxUnavailable"] == 2

    # At rest, neither this operator nor one that has just started writes anything.
    operator.requeue()
    before, writes = everything(cluster, namespace), list(operator.recorded_writes)
    for _ in range(3):
        operator.requeue()
    assert operator.recorded_writes == writes
    operator.stop()
    with ControllerHarness(cluster, namespace) as second:
        second.wait_settled()
        assert second.recorded_writes == [] and everything(cluster, namespace) == before
        uids = {name: pod["metadata"]["uid"] for name, pod in pods(cluster, namespace).items()}
        cluster.merge(API, KIND, "tales", {"spec": {"replicas": 3}}, namespace)
        wait_ready(second)
        assert {name: pod["metadata"]["uid"] for name, pod in pods(cluster, namespace).items()}.items() >= uids.items()
        cluster.merge(API, KIND, "tales", {"spec": {"engine": {"maxLogprobs": 7}}}, namespace)
        wait_ready(second, 120)
        found = pods(cluster, namespace)
        assert len(found) == 6 and not {pod["metadata"]["uid"] for pod in found.values()} & set(uids.values())


@pytest.mark.parametrize("surge", [1, 0])
def test_another_number_of_nodes_replaces_the_workload_and_keeps_serving(operator, cluster, namespace, surge):
    rollout = FAST | {"maxSurge": surge, "maxUnavailable": 1 - surge}
    cluster.apply(llm_service(replicas=2, rollout=rollout), namespace)
    wait_ready(operator)
    fewest, most = 2, 0

    def is_replaced(old, num_pods):
        nonlocal fewest, most
        labels = [pod["metadata"]["labels"] for pod in pods(cluster, namespace).values() if is_alive(pod)]
        servers = [label for label in labels if label.get("app.kubernetes.io/component") == "server"]
        fewest, most = min(fewest, len(serving(cluster, namespace))), max(most, len(servers))
        return cluster.items(*old, namespace) == [] and len(pod_names(cluster, namespace)) == num_pods

    for size, kind, old in ((3, LWS, DEPLOYMENT), (1, DEPLOYMENT, LWS)):
        cluster.merge(API, KIND, "tales", {"spec": {"engine": {"pipelineParallelSize": size}}}, namespace)
        wait_for(lambda: is_replaced(old, 2 * size), 90, operator.status)  # noqa: B023
        wait_ready(operator, 90)
        assert cluster.get(*kind, "tales", namespace)["spec"]["replicas"] == 2
        assert len(serving(cluster, namespace)) == 2
    assert fewest >= 1 + surge, "fewer than maxUnavailable permits"
    assert most <= 2 + surge, "more than maxSurge permits"


def test_groups_of_another_size_replace_each_other(operator, cluster, namespace):
    cluster.apply(of_groups(), namespace)
    wait_ready(operator)
    cluster.merge(API, KIND, "tales", {"spec": {"engine": {"pipelineParallelSize": 3}}}, namespace)
    wait_ready(operator, 90)
    assert len(pod_names(cluster, namespace)) == 6 and operator.status()["groups"]["size"] == 3
