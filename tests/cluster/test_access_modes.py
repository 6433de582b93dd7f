# SPDX-License-Identifier: Apache-2.0
"""A claim that only one node can mount: the pods of its service run on one node, also when there are more of them."""

import time

import pytest
from support.chaos.downloads import finished_download, is_download
from support.controller_harness import ControllerHarness, llm_service
from support.engine_processes import wait_for
from support.fake_kubelet import FakeContainer, FakeKubelet
from support.fake_pods import FakePods

from quire_spec.documents.download_result import DownloadReason

API, KIND = "quire.dev/v1alpha1", "LLMService"
CLAIM = ("v1", "PersistentVolumeClaim", "tales-models")


@pytest.fixture(scope="module")
def kubelets(cluster, kubelet):
    """Two nodes."""
    with FakePods(kubelet), FakeKubelet(cluster, "second") as second, FakePods(second):
        yield kubelet, second


def server_pods(cluster, namespace):
    return cluster.items("v1", "Pod", namespace, labelSelector="app.kubernetes.io/component=server")


def nodes(cluster, namespace):
    return {pod["spec"].get("nodeName") for pod in server_pods(cluster, namespace)}


def scale(cluster, namespace, replicas):
    cluster.kubectl("scale", "llm", "tales", f"--replicas={replicas}", namespace=namespace)


def set_downloads(kubelets, namespace, container):
    for kubelet in kubelets:
        kubelet.set_behavior(lambda pod: is_download(pod) and pod["metadata"]["namespace"] == namespace, container)


@pytest.fixture
def operator(cluster, namespace, kubelets, place):
    """An operator and a service with one pod and the default claim."""
    set_downloads(kubelets, namespace, finished_download(DownloadReason.DOWNLOADED))
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(model={"source": {"http": {"url": f"{place.url}/a"}}}), namespace)
        wait_for(lambda: operator.condition("Ready").get("status") == "True", 120, "Ready")
        assert cluster.get(*CLAIM, namespace)["spec"]["accessModes"] == ["ReadWriteOnce"]
        yield operator


def test_scaling_and_updates_stay_on_the_node_of_the_claim(operator, cluster, namespace, kubelets, place):
    (node,) = nodes(cluster, namespace)
    scale(cluster, namespace, 4)
    wait_for(lambda: operator.status().get("readyReplicas") == 4, 120, "four pods")
    assert nodes(cluster, namespace) == {node}
    message = operator.condition("ModelCached")["message"]
    assert "claim tales-models is ReadWriteOnce, so all pods must run on one node; to use several nodes, set" in message
    wait_for(lambda: operator.condition("Ready")["status"] == "True", 20, "Ready")
    # The Job of the next revision mounts the claim while the pods do.
    set_downloads(kubelets, namespace, FakeContainer())
    surge = {"maxSurge": 1, "maxUnavailable": 0}
    source = {"http": {"url": f"{place.url}/b"}}
    cluster.merge(API, KIND, "tales", {"spec": {"model": {"source": source}, "rollout": surge}}, namespace)
    pods = lambda: cluster.items("v1", "Pod", namespace, fieldSelector="status.phase=Running")  # noqa: E731
    (pod,) = wait_for(lambda: list(filter(is_download, pods())), 120, "the download")
    assert pod["spec"]["nodeName"] == node
    set_downloads(kubelets, namespace, finished_download(DownloadReason.DOWNLOADED))
    wait_for(lambda: operator.condition("Ready")["status"] == "True", 120, "Ready")
    assert nodes(cluster, namespace) == {node}


def test_a_lost_node_does_not_hold_the_pods(operator, cluster, namespace):
    """With no pod left, the next one can start on any node, and the volume follows it."""
    (node,) = nodes(cluster, namespace)
    cluster.merge("v1", "Node", node, {"spec": {"unschedulable": True}})
    (pod,) = server_pods(cluster, namespace)
    cluster.delete("v1", "Pod", pod["metadata"]["name"], namespace)
    wait_for(lambda: nodes(cluster, namespace) not in ({node}, set(), {None}), 120, "another node")
    cluster.merge("v1", "Node", node, {"spec": {"unschedulable": None}})


def test_a_pod_on_another_node_is_explained(operator, cluster, namespace, kubelets):
    """If its node has no room, a pod starts on another one, which cannot mount the claim."""
    operator.controller.reconciler._deps.pod_warnings._poll_s = 0.5
    (node,), (first,) = nodes(cluster, namespace), server_pods(cluster, namespace)
    cluster.merge("v1", "Node", node, {"spec": {"unschedulable": True}})
    is_second = lambda pod: (  # noqa: E731
        pod["metadata"]["namespace"] == namespace and pod["metadata"]["uid"] != first["metadata"]["uid"]
    )
    for kubelet in kubelets:
        kubelet.set_behavior(is_second, FakeContainer(waiting=("ContainerCreating", "")))
    scale(cluster, namespace, 2)
    (pod,) = wait_for(lambda: list(filter(is_second, server_pods(cluster, namespace))), 20, "the second pod")
    message = 'Multi-Attach error for volume "pv-1" Volume is already used by pod(s) on a different node'
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 5))
    regarding = {"kind": "Pod", "namespace": namespace, **{k: pod["metadata"][k] for k in ("name", "uid")}}
    event = {
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": "attach", "namespace": namespace}, "count": 1,
        "involvedObject": regarding, "type": "Warning", "reason": "FailedAttachVolume", "message": message,
        "firstTimestamp": now, "lastTimestamp": now, "source": {"component": "attachdetach-controller"},
    }  # fmt: skip
    cluster.request("POST", f"/api/v1/namespaces/{namespace}/events", event)
    told = lambda: operator.condition("Progressing").get("message", "")  # noqa: E731
    wait_for(lambda: "Multi-Attach" in told(), 120, "the controller's message")
    assert "; claim tales-models is ReadWriteOnce, so all pods must run on one node; to use several" in told()
    assert operator.condition("Available")["status"] == "True"
    cluster.merge("v1", "Node", node, {"spec": {"unschedulable": None}})


def test_several_replicas_from_the_start_use_several_nodes(cluster, namespace, kubelets, place):
    set_downloads(kubelets, namespace, finished_download(DownloadReason.DOWNLOADED))
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(model={"source": {"http": {"url": f"{place.url}/a"}}}, replicas=4), namespace)
        wait_for(lambda: operator.status().get("readyReplicas") == 4, 120, "four pods")
        assert cluster.get(*CLAIM, namespace)["spec"]["accessModes"] == ["ReadWriteMany"]
        assert len(nodes(cluster, namespace)) == 2
        assert "so all pods" not in operator.condition("ModelCached")["message"]


def test_explicit_access_modes_of_a_running_service_refuse_nothing(operator, cluster, namespace):
    """The modes of an existing claim cannot change; the service keeps running and scales."""
    edit = {"cache": {"accessModes": ["ReadWriteMany"]}, "replicas": 3}
    cluster.merge(API, KIND, "tales", {"spec": edit}, namespace)
    wait_for(lambda: operator.status().get("readyReplicas") == 3, 120, "three pods")
    assert len(nodes(cluster, namespace)) == 1
    wait_for(lambda: operator.condition("Ready")["status"] == "True", 20, "Ready")
