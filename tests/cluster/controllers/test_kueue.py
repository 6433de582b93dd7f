# SPDX-License-Identifier: Apache-2.0
"""Kueue admits the pods of a service one after the other, or its groups, as far as the quota of its queue reaches."""

import time

import pytest
from support.controller_harness import ControllerHarness, llm_service
from support.controllers import running_kueue, running_lws
from support.disaggregated_set import running_double
from support.engine_processes import wait_for

from quire_operator.controller.status import groups

pytestmark = [pytest.mark.usefixtures("fake_pods"), pytest.mark.timeout(600)]

API = "kueue.x-k8s.io/v1beta2"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
LWS = "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"
REST_S = 6.0


def cluster_queue(num_pods):
    """A queue with quota for so many pods."""
    resources = [{"name": "pods", "nominalQuota": num_pods}]
    resources += [{"name": name, "nominalQuota": "1000000Gi"} for name in ("cpu", "memory")]
    group = {"coveredResources": [r["name"] for r in resources], "flavors": [{"name": "any", "resources": resources}]}
    spec = {"namespaceSelector": {}, "resourceGroups": [group]}
    return {"apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": "gpus"}, "spec": spec}


def make_queue(cluster, namespace, num_pods):
    """Make a queue of the namespace with quota for so many pods."""
    cluster.apply({"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": "any"}})
    cluster.apply(cluster_queue(num_pods))
    spec = {"clusterQueue": "gpus"}
    cluster.apply({"apiVersion": API, "kind": "LocalQueue", "metadata": {"name": "llm"}, "spec": spec}, namespace)


def gated(cluster, namespace, component="server"):
    """Whether each pod of the service waits for Kueue."""
    pods = cluster.items("v1", "Pod", namespace, labelSelector=f"app.kubernetes.io/component={component}")
    return sorted("schedulingGates" in pod["spec"] for pod in pods)


def waits_for_quota(operator):
    progressing = operator.condition("Progressing")
    reason, message = progressing.get("reason"), progressing.get("message", "")
    return reason == "WaitingForQuota" and "insufficient unused quota" in message


def is_ready(operator):
    service = operator.cluster.get("quire.dev/v1alpha1", "LLMService", "tales", operator.namespace)
    is_current = operator.status().get("observedGeneration") == service["metadata"]["generation"]
    return is_current and operator.condition("Ready").get("status") == "True"


def versions(cluster, namespace):
    """The resourceVersions of all objects that Kueue, LeaderWorkerSet and the operator could write."""
    kinds = [("v1", "Pod"), ("v1", "Service"), ("v1", "ConfigMap"), ("apps/v1", "StatefulSet"), LWS]
    kinds += [(API, "Workload"), ("quire.dev/v1alpha1", "LLMService")]
    metas = [(kind, body["metadata"]) for kind in kinds for body in cluster.items(*kind, namespace)]
    return {(kind, meta["name"]): meta["resourceVersion"] for kind, meta in metas}


def check_at_rest(operator):
    """Check that nothing is written for some seconds, and that passes of the operator write nothing."""
    wait_for(operator.is_idle, 20, "an operator that does not write against Kueue")
    before, writes = versions(operator.cluster, operator.namespace), list(operator.recorded_writes)
    deadline = time.monotonic() + REST_S
    while time.monotonic() < deadline:
        operator.requeue()
        time.sleep(0.5)
    assert operator.recorded_writes == writes
    assert versions(operator.cluster, operator.namespace) == before


def test_pods_wait_for_quota(cluster, namespace, kubelet, tmp_path):
    cluster.merge("v1", "Namespace", namespace, {"metadata": {"labels": {"kueue": "true"}}})
    with running_kueue(cluster, tmp_path), ControllerHarness(cluster, namespace) as operator:
        make_queue(cluster, namespace, 1)
        cluster.apply(llm_service(replicas=2, labels={QUEUE_LABEL: "llm"}), namespace)
        wait_for(lambda: gated(cluster, namespace) == [False, True], 60, operator.status)
        wait_for(lambda: waits_for_quota(operator), 30, operator.status)
        wait_for(lambda: operator.status().get("readyReplicas") == 1, 30, operator.status)
        settled = len(operator.recorded_writes)
        wait_for(operator.is_idle, 20, "an operator that does not write against Kueue")
        assert len(operator.recorded_writes) - settled <= 4, operator.recorded_writes[settled:]
        cluster.apply(cluster_queue(2))
        wait_for(lambda: operator.status().get("readyReplicas") == 2, 60, operator.status)
        assert gated(cluster, namespace) == [False, False]
        wait_for(lambda: operator.condition("Ready").get("status") == "True", 40, operator.status)


def test_groups_wait_for_quota_and_are_made_anew_by_a_change(cluster, namespace, kubelet, tmp_path, monkeypatch):
    """With the controllers and webhooks of both Kueue and LeaderWorkerSet."""

    def uid():
        return (cluster.get(*LWS, "tales", namespace) or {"metadata": {}})["metadata"].get("uid")

    def is_made_anew():
        told.add(operator.condition("Progressing").get("message", ""))
        return uid() not in (None, *uids)

    monkeypatch.setattr(groups, "INCOMPLETE_AFTER_S", 1.0)
    cluster.merge("v1", "Namespace", namespace, {"metadata": {"labels": {"kueue": "true"}}})
    framework = "leaderworkerset.x-k8s.io/leaderworkerset"
    with (
        running_lws(cluster, tmp_path),
        running_kueue(cluster, tmp_path, framework),
        ControllerHarness(cluster, namespace) as operator,
    ):
        make_queue(cluster, namespace, 2)
        # As of a service that enters the queue later. Kueue refuses this for a set that exists.
        service = llm_service(replicas=2, engine={"pipelineParallelSize": 2}, rollout={"minReadySeconds": 0})
        cluster.apply(service, namespace)
        wait_for(lambda: is_ready(operator), 60, operator.status)
        uids, told = {uid()}, set()
        cluster.merge(
            "quire.dev/v1alpha1", "LLMService", "tales", {"metadata": {"labels": {QUEUE_LABEL: "llm"}}}, namespace
        )
        wait_for(is_made_anew, 60, operator.status)
        uids.add(uid())
        assert cluster.get(*LWS, "tales", namespace)["metadata"]["labels"][QUEUE_LABEL] == "llm"
        # Quota for one group of two pods.
        wait_for(lambda: gated(cluster, namespace) == [False, True], 60, operator.status)
        wait_for(lambda: gated(cluster, namespace, "worker") == [False, True], 60, operator.status)
        wait_for(lambda: waits_for_quota(operator), 30, operator.status)
        wait_for(lambda: operator.status()["groups"]["ready"] == 1, 60, operator.status)
        time.sleep(2 * groups.INCOMPLETE_AFTER_S)
        operator.requeue()
        assert waits_for_quota(operator), operator.condition("Progressing")
        check_at_rest(operator)
        cluster.apply(cluster_queue(4))
        wait_for(lambda: is_ready(operator), 60, operator.status)
        check_at_rest(operator)
        cluster.merge("quire.dev/v1alpha1", "LLMService", "tales", {"spec": {"runtime": {"cpu": "3"}}}, namespace)
        wait_for(is_made_anew, 60, operator.status)
        assert any("Kueue does not permit the change" in message for message in told), told
        wait_for(lambda: is_ready(operator), 90, operator.status)
        assert gated(cluster, namespace) == gated(cluster, namespace, "worker") == [False, False]
        # What Kueue permits rolls out in place.
        uids.add(uid())
        cluster.merge("quire.dev/v1alpha1", "LLMService", "tales", {"spec": {"engine": {"maxLogprobs": 7}}}, namespace)
        wait_for(lambda: is_ready(operator), 120, operator.status)
        assert uid() in uids


@pytest.mark.parametrize(("nodes", "is_in_spec"), [(1, False), (2, True)])
def test_roles_wait_for_quota(cluster, namespace, kubelet, tmp_path, nodes, is_in_spec):
    """The Workload of a role belongs to the LeaderWorkerSet of that role, whose name only its controller knows. Kueue
    would never start pods that have the label of the queue themselves."""
    cluster.merge("v1", "Namespace", namespace, {"metadata": {"labels": {"kueue": "true"}}})
    engine = {"kvCacheOffloading": {"memory": "64Mi"}, "pipelineParallelSize": nodes}
    roles = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}
    queue = {QUEUE_LABEL: "llm"}

    with (
        running_lws(cluster, tmp_path),
        running_kueue(cluster, tmp_path, "leaderworkerset.x-k8s.io/leaderworkerset"),
        running_double(cluster),
        ControllerHarness(cluster, namespace) as operator,
    ):
        # Quota for one role.
        make_queue(cluster, namespace, nodes)
        service = llm_service(disaggregation=roles, engine=engine, **({"labels": queue} if is_in_spec else {}))
        if not is_in_spec:
            service["metadata"]["labels"] = queue
        cluster.apply(service, namespace)
        wait_for(lambda: gated(cluster, namespace) == [False, True], 60, operator.status)
        wait_for(lambda: waits_for_quota(operator), 30, operator.status)
        check_at_rest(operator)
        cluster.apply(cluster_queue(2 * nodes))
        wait_for(lambda: is_ready(operator), 60, operator.status)
        assert gated(cluster, namespace) == [False, False]
        check_at_rest(operator)
