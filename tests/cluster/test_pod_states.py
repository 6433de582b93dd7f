# SPDX-License-Identifier: Apache-2.0
"""Pods that wait for a gate, a queue or a resource claim, that were rejected, and an autoscaler without metrics."""

import time

import pytest
from kubernetes.dynamic.exceptions import DynamicApiError
from support.controller_harness import ControllerHarness, llm_service
from support.engine_processes import wait_for
from support.fake_kubelet import FakeContainer

API, KIND = "quire.dev/v1alpha1", "LLMService"
SERVER_PODS = "app.kubernetes.io/component=server"
pytestmark = pytest.mark.usefixtures("fake_pods")


@pytest.fixture
def operator(cluster, namespace, kubelet):
    """An operator that reads events and queues often."""
    with ControllerHarness(cluster, namespace) as operator:
        operator.controller.reconciler._deps.pod_warnings._poll_s = 0.5
        yield operator


def message_of(operator, kind, reason, words=""):
    """The message of a condition, as soon as it has a reason and contains some words."""

    def found():
        condition = operator.condition(kind)
        return condition.get("reason") == reason and words in condition["message"] and condition["message"]

    try:
        return wait_for(found, 120, f"{kind}: {reason}: {words}")
    except AssertionError as error:
        raise AssertionError(f"{error}: {operator.status().get('conditions')}") from error


def server_pods(cluster, namespace):
    return cluster.items("v1", "Pod", namespace, labelSelector=SERVER_PODS)


def gated(gate):
    return llm_service(podTemplate={"spec": {"schedulingGates": [{"name": gate}]}})


def test_a_gate_is_named(operator, cluster, namespace):
    cluster.apply(gated("example.com/wait"), namespace)
    message = message_of(operator, "Progressing", "SchedulingGated")
    assert message.endswith(": the scheduler waits until gate example.com/wait is removed")
    assert operator.condition("Progressing")["status"] == "True"


def test_a_queue_of_kueue_is_named_with_its_message(operator, cluster, namespace):
    cluster.apply(gated("kueue.x-k8s.io/admission"), namespace)
    message_of(operator, "Progressing", "WaitingForQuota", "gate kueue.x-k8s.io/admission")
    with cluster.optional_kind("Workload"):
        (pod,) = server_pods(cluster, namespace)
        owner = {"apiVersion": "v1", "kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        words = "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu, 1 more needed"
        condition = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": words}
        meta = {"name": "pod-tales", "ownerReferences": [owner]}
        template = {"spec": {"containers": [{"name": "server", "image": "server"}]}}
        workload = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": meta}
        pod_set = {"name": "main", "count": 1, "template": template}
        cluster.apply({**workload, "spec": {"podSets": [pod_set]}}, namespace)
        status = {"conditions": [condition | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]}
        cluster.merge(
            workload["apiVersion"], "Workload", "pod-tales", {"status": status}, namespace, subresource="status"
        )
        message_of(operator, "Progressing", "WaitingForQuota", words)


def test_a_missing_resource_claim_template_is_named(operator, cluster, namespace):
    claims = [{"name": "gpu", "resourceClaimTemplateName": "no-such-template"}]
    cluster.apply(llm_service(podTemplate={"spec": {"resourceClaims": claims}}), namespace)
    message = message_of(operator, "Progressing", "PodsNotReady", "FailedResourceClaimCreation")
    assert "no-such-template" in message


def test_rejected_pods_are_named(operator, cluster, namespace, kubelet):
    """As a kubelet rejects them whose device plugin reports no healthy device."""
    cluster.apply(llm_service(), namespace)
    wait_for(lambda: operator.condition("Ready").get("status") == "True", 120, "Ready")
    (pod,) = server_pods(cluster, namespace)
    name = pod["metadata"]["name"]
    kubelet.set_behavior(
        lambda body: body["metadata"]["namespace"] == namespace and body["metadata"]["name"] != name,
        FakeContainer(ready=False),
    )
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    rejected = {
        "phase": "Failed", "reason": "UnexpectedAdmissionError",
        "message": "Allocate failed due to no healthy devices present",
        "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": now}], "containerStatuses": None,
    }  # fmt: skip
    wait_for(lambda: is_written(cluster, name, namespace, rejected), 20, "the rejection")
    message = message_of(operator, "Progressing", "PodsNotReady", "UnexpectedAdmissionError")
    assert f"pod {name}: the pod has failed: UnexpectedAdmissionError: Allocate failed due to no healthy" in message


def is_written(cluster, name, namespace, status):
    try:
        cluster.merge("v1", "Pod", name, {"status": status}, namespace, "status")
    except DynamicApiError:
        return False
    return cluster.get("v1", "Pod", name, namespace)["status"]["phase"] == status["phase"]


def test_an_autoscaler_without_metrics_is_named(operator, cluster, namespace):
    scaling = {"kind": "HorizontalPodAutoscaler", "minReplicas": 1, "maxReplicas": 3}
    cluster.apply(llm_service(autoscaling=scaling), namespace)
    wait_for(lambda: operator.condition("Autoscaling").get("reason") == "AutoscalerFailed", 120, "the autoscaler")
    message = operator.condition("Autoscaling")["message"]
    assert message.startswith("HorizontalPodAutoscaler tales: ScalingActive is False: FailedGet")
    assert operator.condition("Ready")["status"] == "True"
    cluster.merge(API, KIND, "tales", {"spec": {"autoscaling": None}}, namespace)
    wait_for(lambda: not operator.condition("Autoscaling"), 20, "no condition without an autoscaler")


def is_replaced(cluster, namespace, name):
    names = [pod["metadata"]["name"] for pod in server_pods(cluster, namespace)]
    return name not in names and len(names) == 2


def test_a_deleted_pod_makes_no_event_without_news(operator, cluster, namespace):
    cluster.apply(llm_service(replicas=2), namespace)
    wait_for(lambda: operator.condition("Ready").get("status") == "True", 120, "Ready")
    for pod in server_pods(cluster, namespace):
        name = pod["metadata"]["name"]
        cluster.delete("v1", "Pod", name, namespace)
        wait_for(lambda name=name: is_replaced(cluster, namespace, name), 120, "another pod")
        wait_for(lambda: operator.condition("Ready").get("status") == "True", 120, "Ready")
    events = cluster.items("events.k8s.io/v1", "Event", namespace)
    notes = [event.get("note", "") for event in events if event["regarding"]["kind"] == KIND]
    assert notes and not [note for note in notes if "the others are starting" in note]
