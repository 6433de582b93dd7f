# SPDX-License-Identifier: Apache-2.0
"""The node without a kubelet (support/fake_kubelet.py): by what it writes, scheduler and controllers do their part."""

import pytest
from support.engine_processes import wait_for
from support.fake_kubelet import COMPLETED, FakeContainer, FakeKubelet

LABELS = {"app": "x"}


@pytest.fixture(scope="module")
def node(cluster):
    cluster.require_controllers()
    with FakeKubelet(cluster, "node-of-two", gpus=2, labels={"pool": "two"}) as kubelet:
        yield kubelet


def template(gpus=0, restart="Always", **spec):
    limits = {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}} if gpus else {}
    container = {"name": "server", "image": "none", "ports": [{"containerPort": 8003, "name": "health"}], **limits}
    body = {"containers": [container], "nodeSelector": {"pool": "two"}, "restartPolicy": restart, **spec}
    return {"metadata": {"labels": LABELS}, "spec": body}


def deployment(replicas, gpus=0, **spec):
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "x"},
        "spec": {"replicas": replicas, "selector": {"matchLabels": LABELS}, "template": template(gpus, **spec)},
    }


def status(cluster, namespace):
    return cluster.get("apps/v1", "Deployment", "x", namespace)["status"]


def pods(cluster, namespace):
    return cluster.items("v1", "Pod", namespace)


def test_pods_become_ready_have_addresses_of_their_own_and_go(cluster, namespace, node):
    cluster.apply(deployment(2), namespace)
    wait_for(lambda: status(cluster, namespace).get("readyReplicas") == 2, 30, "ready")
    assert len({pod["status"]["podIP"] for pod in pods(cluster, namespace)}) == 2
    cluster.apply(deployment(0), namespace)
    wait_for(lambda: not pods(cluster, namespace), 30, "gone")


def test_a_third_gpu_is_not_there(cluster, namespace, node):
    cluster.apply(deployment(3, gpus=1), namespace)
    wait_for(lambda: status(cluster, namespace).get("readyReplicas") == 2, 30, "two ready")

    def words():
        conditions = [c for p in pods(cluster, namespace) for c in p["status"].get("conditions", [])]
        return [c["message"] for c in conditions if c.get("reason") == "Unschedulable"]

    (message,) = wait_for(words, 30, "unschedulable")
    assert "Insufficient nvidia.com/gpu" in message


def test_a_pod_does_what_a_test_says(cluster, namespace, node):
    node.set_behavior(
        lambda pod: pod["metadata"]["namespace"] == namespace,
        FakeContainer(waiting=("ImagePullBackOff", 'Back-off pulling image "none"')),
    )
    cluster.apply(deployment(1), namespace)
    (pod,) = wait_for(lambda: [p for p in pods(cluster, namespace) if p["status"].get("containerStatuses")], 30)
    assert pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "ImagePullBackOff"
    node.set_behavior(lambda pod: pod["metadata"]["namespace"] == namespace, FakeContainer())
    wait_for(lambda: status(cluster, namespace).get("readyReplicas") == 1, 30, "ready")
    node.restart(pod, "it crashed")

    def restarted():
        (found,) = pods(cluster, namespace)[0]["status"]["containerStatuses"]
        return found["restartCount"] == 1 and found

    found = wait_for(restarted, 30, "restarted")
    assert found["lastState"]["terminated"]["message"] == "it crashed"


@pytest.mark.parametrize("code", [0, 1])
def test_a_job_ends_as_its_pod_does(cluster, namespace, node, code):
    done = COMPLETED if code == 0 else FakeContainer(exit_code=1, message='{"result": "NotFound"}')
    node.set_behavior(lambda pod: pod["metadata"]["namespace"] == namespace, done)
    spec = {"backoffLimit": 0, "template": template(restart="Never")}
    cluster.apply({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}, namespace)

    def ended():
        found = cluster.get("batch/v1", "Job", "x", namespace)["status"].get("conditions", [])
        return [c["type"] for c in found if c["status"] == "True" and c["type"] in ("Complete", "Failed")]

    assert wait_for(ended, 30, "ended") == [["Complete"], ["Failed"]][code]


def test_claims_get_volumes(cluster, namespace, node):
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    cluster.apply(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "c"}, "spec": claim}, namespace
    )
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]
    cluster.apply(deployment(1, volumes=volumes), namespace)
    wait_for(lambda: status(cluster, namespace).get("readyReplicas") == 1, 60, "ready")
