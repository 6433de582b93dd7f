# SPDX-License-Identifier: Apache-2.0
"""Replicas that are groups of pods, under the real controller of LeaderWorkerSet with its webhooks, on nodes without a
kubelet."""

import contextlib
import time

import pytest
from support.cluster import optional_crd
from support.controller_harness import ControllerHarness, answer_model_readers, llm_service
from support.controllers import running_lws
from support.engine_processes import wait_for
from support.fake_kubelet import FakeContainer, FakeKubelet

from quire_operator.controller.status import groups
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


def policies(cluster, namespace):
    return {
        body["metadata"]["name"]: body for body in cluster.items("networking.k8s.io/v1", "NetworkPolicy", namespace)
    }


def workers_without_policy(cluster, namespace):
    """Names of the workers, also of those that are ending, that no policy lets connect to their group."""
    found = policies(cluster, namespace).values()
    selectors = [body["spec"]["podSelector"]["matchLabels"].items() for body in found]
    return [
        (name, sorted(policies(cluster, namespace)))
        for name, pod in pods(cluster, namespace).items()
        if (labels := pod["metadata"]["labels"].items()) >= {("app.kubernetes.io/component", "worker")}
        and not any(selector <= labels for selector in selectors)
    ]


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


def test_fields_that_an_older_release_lacks_are_named_until_it_is_upgraded(cluster, namespace, kubelet, monkeypatch):
    monkeypatch.setattr(discovery, "REFRESH_INTERVAL_S", 1.0)
    crd, new_crd = optional_crd("LeaderWorkerSet"), optional_crd("LeaderWorkerSet")
    del crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["networkConfig"]
    cluster.apply_crd(crd)
    try:
        with ControllerHarness(cluster, namespace) as operator:
            cluster.apply(of_groups(), namespace)
            operator.wait_settled()
            config = operator.condition("ConfigValid")
            assert (config["status"], config["reason"]) == ("True", "FieldsLeftOut")
            assert "the API server does not know LeaderWorkerSet spec.networkConfig, so" in config["message"]
            time.sleep(2)  # two refreshes with the same schema, which must not write the field
            (body,) = cluster.items(*LWS, namespace)
            assert "networkConfig" not in body["spec"]
            cluster.apply_crd(new_crd)
            wait_for(lambda: operator.condition("ConfigValid")["reason"] == "Accepted", 120, operator.status)
            assert "networkConfig" in cluster.items(*LWS, namespace)[0]["spec"]
    finally:
        cluster.delete_crd(crd["metadata"]["name"])


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
    fewest, most, unprotected = 2, 0, []

    def is_replaced(old, num_pods):
        nonlocal fewest, most
        unprotected.extend(workers_without_policy(cluster, namespace))
        labels = [pod["metadata"]["labels"] for pod in pods(cluster, namespace).values() if is_alive(pod)]
        servers = [label for label in labels if label.get("app.kubernetes.io/component") == "server"]
        fewest, most = min(fewest, len(serving(cluster, namespace))), max(most, len(servers))
        return cluster.items(*old, namespace) == [] and len(pod_names(cluster, namespace)) == num_pods

    for size, kind, old in ((3, LWS, DEPLOYMENT), (1, DEPLOYMENT, LWS)):
        cluster.merge(API, KIND, "tales", {"spec": {"engine": {"pipelineParallelSize": size}}}, namespace)
        wait_for(lambda: is_replaced(old, 2 * size), 120, operator.status)  # noqa: B023
        wait_ready(operator, 90)
        assert cluster.get(*kind, "tales", namespace)["spec"]["replicas"] == 2
        assert len(serving(cluster, namespace)) == 2
    assert not unprotected, "pods of groups that still run cannot reach each other"
    wait_for(lambda: "tales-group" not in policies(cluster, namespace), 30, "no policy of groups")
    assert fewest >= 1 + surge, "fewer than maxUnavailable permits"
    assert most <= 2 + surge, "more than maxSurge permits"


def test_groups_of_another_size_replace_each_other(operator, cluster, namespace):
    cluster.apply(of_groups(), namespace)
    wait_ready(operator)
    cluster.merge(API, KIND, "tales", {"spec": {"engine": {"pipelineParallelSize": 3}}}, namespace)
    wait_ready(operator, 90)
    assert len(pod_names(cluster, namespace)) == 6 and operator.status()["groups"]["size"] == 3


@pytest.mark.parametrize("groups_first", [True, False])
def test_a_service_with_the_name_of_a_group_is_refused(operator, cluster, namespace, groups_first):
    """LeaderWorkerSet would use the Service of the other LLMService for the addresses of the group."""
    other = llm_service("tales-0", rollout=FAST)
    services = [("tales", of_groups()), ("tales-0", other)][:: 1 if groups_first else -1]
    cluster.apply(services[0][1], namespace)
    wait_for(lambda: operator.condition("Ready", services[0][0]).get("status") == "True", 90, operator.status)
    if groups_first:
        # As while the group is created anew.
        cluster.delete("v1", "Service", "tales-0", namespace)
    refused, manifest = services[1]
    cluster.apply(manifest, namespace)
    wait_for(lambda: operator.condition("ConfigValid", refused).get("reason") == "Conflict", 30, operator.status)
    words = "belongs to group 0 of the LeaderWorkerSet 'tales'" if groups_first else "that the Service of group 0 needs"
    condition = operator.condition("ConfigValid", refused)
    assert f"Service 'tales-0' in namespace {namespace!r}" in condition["message"] and words in condition["message"]
    assert operator.condition("Ready", services[0][0])["status"] == "True"
    assert len(cluster.items(*LWS, namespace)) == groups_first
    assert len(cluster.items(*DEPLOYMENT, namespace)) == (not groups_first)


def reason_is(operator, reason, words="", timeout=40):
    """Wait until Progressing has a reason, and its message contains some words."""

    def found():
        condition = operator.condition("Progressing")
        return condition.get("reason") == reason and words in condition["message"]

    wait_for(found, timeout, lambda: (reason, operator.status().get("conditions"), operator.status().get("groups")))


def restarted(operator, reason, words=""):
    """Check that another operator process reports the same."""
    operator.stop()
    with ControllerHarness(operator.cluster, operator.namespace) as second:
        second.wait_settled()
        reason_is(second, reason, words, 20)


def test_a_group_that_is_created_anew_again_and_again_is_reported(operator, cluster, namespace, kubelet):
    cluster.apply(of_groups(replicas=1), namespace)
    wait_ready(operator)
    is_leader = {"namespace": namespace, "name": "tales-0"}.items()
    kubelet.set_behavior(lambda pod: is_leader <= pod["metadata"].items(), FakeContainer(ready=False))
    restarted_uids = set()

    def is_created_anew_again_and_again():
        """LeaderWorkerSet can delete a group twice for one restart: its cache still has the old worker at first."""
        worker = pods(cluster, namespace).get("tales-0-1")
        if worker and is_alive(worker) and worker["metadata"]["uid"] not in restarted_uids:
            restarted_uids.add(worker["metadata"]["uid"])
            kubelet.restart(worker, message="CUDA error: out of memory")
        return sum(entry["recreated"] for entry in operator.status()["groups"].get("history", ())) >= 3

    wait_for(is_created_anew_again_and_again, 120, operator.status)
    words = "times, because a pod of it restarted; rank 1 ended with Error (exit code 1): CUDA"
    reason_is(operator, "GroupCrashLooping", words)
    restarted(operator, "GroupCrashLooping", words)


HALF_A_NODE = {"runtime": {"cpu": "600"}, "replicas": 1}


def test_a_group_without_room_for_all_its_pods_is_incomplete(operator, cluster, namespace, monkeypatch):
    monkeypatch.setattr(groups, "INCOMPLETE_AFTER_S", 3.0)
    cluster.apply(of_groups(**HALF_A_NODE), namespace)
    words = "only 1 of 2 pods of group 0 have a node, and wait for the others; pod tales-0"
    reason_is(operator, "GangIncomplete", words)
    restarted(operator, "GangIncomplete", words)


def test_a_lost_node_is_named_until_its_pods_are_gone(operator, cluster, namespace, kubelet, monkeypatch):
    monkeypatch.setattr(groups, "OVERDUE_AFTER_S", 1.0)
    serving_pods = {"on_start": kubelet.on_start, "probe": kubelet.probe, "on_end": kubelet.on_end}
    with FakeKubelet(cluster, "node-that-is-lost", **serving_pods) as lost:
        answer_model_readers(lost)
        cluster.apply(of_groups(**HALF_A_NODE), namespace)
        wait_ready(operator)
        on_lost = [pod for pod in pods(cluster, namespace).values() if pod["spec"]["nodeName"] == lost.name]
        (name,) = [pod["metadata"]["name"] for pod in on_lost]
        lost._stop.set()
        lost._thread.join()
        # As when the taint of a node that does not answer evicts its pods.
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        cluster.request("DELETE", path, gracePeriodSeconds=1)
        words = f"node {lost.name} does not answer, so that pod {name} does not end"
        reason_is(operator, "GroupNodeLost", words)
        restarted(operator, "GroupNodeLost", words)
    with FakeKubelet(cluster, "node-that-is-new", **serving_pods), ControllerHarness(cluster, namespace) as second:
        # As when the node is deleted.
        cluster.request("DELETE", path, gracePeriodSeconds=0)
        wait_ready(second)
        assert pod_names(cluster, namespace) == ["tales-0", "tales-0-1"]


def test_a_queued_set_waits_for_quota_and_is_made_anew_by_a_change(operator, cluster, namespace):
    """Kueue's gates, Workloads and refusals, without Kueue."""
    queue = {"kueue.x-k8s.io/queue-name": "llm"}
    gates = {"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}}
    service = of_groups(replicas=1, podTemplate=gates)
    service["metadata"]["labels"] = queue
    operator.controller.reconciler._deps.pod_warnings._poll_s = 0.5
    with cluster.optional_kind("Workload"), immutable_sets(cluster):
        cluster.apply(service, namespace)
        reason_is(operator, "WaitingForQuota", "gate kueue.x-k8s.io/admission")
        first = cluster.get(*LWS, "tales", namespace)["metadata"]
        assert queue.items() <= first["labels"].items()
        owner = {"apiVersion": LWS[0], "kind": LWS[1], "name": "tales", "uid": first["uid"]}
        words = "insufficient unused quota for nvidia.com/gpu, 1 more needed"
        workload = "kueue.x-k8s.io/v1beta2", "Workload"
        template = {"spec": {"containers": [{"name": "server", "image": "server"}]}}
        pod_sets = [{"name": "main", "count": 2, "template": template}]
        meta = {"name": "tales-0", "ownerReferences": [owner]}
        manifest = {"apiVersion": workload[0], "kind": workload[1], "metadata": meta, "spec": {"podSets": pod_sets}}
        cluster.apply(manifest, namespace)
        condition = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": words}
        status = {"conditions": [condition | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]}
        cluster.merge(*workload, "tales-0", {"status": status}, namespace, subresource="status")
        reason_is(operator, "WaitingForQuota", words)
        cluster.merge(API, KIND, "tales", {"spec": {"podTemplate": None}}, namespace)
        wait_ready(operator)
        assert cluster.get(*LWS, "tales", namespace)["metadata"]["uid"] != first["uid"]


@contextlib.contextmanager
def immutable_sets(cluster):
    """Refuse changes of the templates of a LeaderWorkerSet, as Kueue's webhook does for one in a queue."""
    policy = "admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy"
    binding = policy[0], "ValidatingAdmissionPolicyBinding"
    name = {"name": "immutable-sets"}
    rule = {"apiGroups": [LWS[0].split("/")[0]], "apiVersions": ["v1"], "operations": ["UPDATE"]}
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [rule | {"resources": ["leaderworkersets"]}]},
        "validations": [
            {
                "expression": "object.spec.leaderWorkerTemplate == oldObject.spec.leaderWorkerTemplate",
                "message": "spec.leaderWorkerTemplate: Invalid value: field is immutable",
            }
        ],
    }
    cluster.apply({"apiVersion": policy[0], "kind": policy[1], "metadata": name, "spec": spec})
    spec = {"policyName": name["name"], "validationActions": ["Deny"]}
    cluster.apply({"apiVersion": binding[0], "kind": binding[1], "metadata": name, "spec": spec})
    try:
        yield
    finally:
        for kind in (binding, policy):
            cluster.delete(*kind, name["name"])
