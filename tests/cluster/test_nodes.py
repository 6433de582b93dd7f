# SPDX-License-Identifier: Apache-2.0
"""A running service keeps its plan and its pods when nodes join, leave or change."""

import pytest
from support.controller_harness import ControllerHarness, llm_service
from support.engine_processes import wait_for
from support.fake_kubelet import GPU_LABELS, FakeKubelet

from quire_operator.controller import plan_service

API, KIND = "quire.dev/v1alpha1", "LLMService"
TAINT = {"key": "team", "value": "ml", "effect": "NoSchedule"}
T4 = {"nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/gpu.memory": "15360"}
SHARED = {"nvidia.com/gpu.replicas": "4"}
pytestmark = pytest.mark.usefixtures("fake_pods")


@pytest.fixture(autouse=True)
def nodes_are_read_in_each_pass(monkeypatch):
    monkeypatch.setattr(plan_service, "_NODES_TTL_S", 0.0)


@pytest.fixture
def operator(cluster, namespace, kubelet):
    """An operator and a service on a GPU that serves."""
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(device="GPU"), namespace)
        wait_for(lambda: operator.condition("Ready").get("status") == "True", 120, "Ready")
        yield operator


def state(operator):
    return operator.status()["plan"], operator.child("Deployment")["spec"]["template"]


def scale(cluster, namespace, operator, replicas):
    path = f"{cluster.path(API, KIND, namespace, 'tales')}/scale"
    cluster.request("PATCH", path, {"spec": {"replicas": replicas}}, "application/merge-patch+json")
    wait_for(lambda: operator.child("Deployment")["spec"]["replicas"] == replicas, 20, f"{replicas} replicas")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (SHARED, "share each GPU among 4 pods"),
        (T4, "the smallest GPU for new pods is now Tesla-T4 with"),
        ({**T4, "nvidia.com/gpu.memory": "100"}, "the smallest GPU for new pods is now Tesla-T4 with"),
        ({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}, ""),
    ],
)
def test_a_node_joins_and_leaves(operator, cluster, namespace, labels, message):
    before = state(operator)
    planned = operator.condition("Planned")
    with FakeKubelet(cluster, "joins", labels={**GPU_LABELS, **labels}):
        operator.requeue()
        assert state(operator) == before
        told = operator.condition("Planned")
        assert (told["status"], told["reason"]) == ("True", planned["reason"])
        assert message in told["message"] and ("keep their plan" in told["message"]) == bool(message)
        scale(cluster, namespace, operator, 2)
        assert state(operator) == before
    operator.requeue()
    assert operator.condition("Planned")["message"] == planned["message"]


@pytest.mark.parametrize("change", [{"spec": {"unschedulable": True}}, {"spec": {"taints": [TAINT]}},
                                    {"metadata": {"labels": dict.fromkeys(GPU_LABELS)}}])  # fmt: skip
def test_the_node_of_its_pods_changes(operator, cluster, namespace, kubelet, change):
    before = state(operator)
    node = cluster.get("v1", "Node", kubelet.name)
    cluster.merge("v1", "Node", kubelet.name, change)
    operator.requeue()
    assert state(operator) == before and operator.condition("Planned")["status"] == "True"
    scale(cluster, namespace, operator, 2)
    undo = {"spec": {"unschedulable": None, "taints": None}, "metadata": {"labels": node["metadata"]["labels"]}}
    cluster.merge("v1", "Node", kubelet.name, undo)


@pytest.mark.parametrize("change", [{"unschedulable": True}, {"taints": [TAINT]}])
def test_a_new_plan_ignores_nodes_on_which_no_pod_can_start(cluster, namespace, kubelet, change):
    with FakeKubelet(cluster, "other", labels={**GPU_LABELS, **SHARED}):
        cluster.merge("v1", "Node", "other", {"spec": change})
        with ControllerHarness(cluster, namespace) as operator:
            cluster.apply(llm_service(device="GPU"), namespace)
            wait_for(lambda: operator.condition("Planned").get("status") == "True", 120, "Planned")
            assert operator.status()["plan"]["gpu"]["product"] == "NVIDIA-L4"


def test_a_service_without_pods_is_planned_for_the_nodes_of_now(operator, cluster, namespace):
    scale(cluster, namespace, operator, 0)
    with FakeKubelet(cluster, "joins", labels={**GPU_LABELS, **T4}):
        wait_for(
            lambda: operator.requeue() or operator.status()["plan"]["gpu"]["product"] == "Tesla-T4", 20, "another plan"
        )


def test_a_pool_that_cannot_be_planned_does_not_stop_the_running_pods(operator, cluster, namespace):
    """A change of the pods needs a plan; the rest follows the spec."""
    _, template = state(operator)
    with FakeKubelet(cluster, "joins", labels={**GPU_LABELS, **SHARED}):
        cluster.merge(API, KIND, "tales", {"spec": {"engine": {"maxModelLen": 512}}}, namespace)
        wait_for(lambda: operator.condition("Planned").get("reason") == "SharedGPU", 20, "SharedGPU")
        scale(cluster, namespace, operator, 3)
        assert state(operator)[1] == template
    wait_for(lambda: operator.requeue() or state(operator)[1] != template, 120, "the change")
