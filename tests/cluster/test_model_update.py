# SPDX-License-Identifier: Apache-2.0
"""An update of the model in place: room for two revisions on the claim, and the removal of those that no pod uses.

tests/server/downloads/test_model_download.py tests the removal itself.
"""

import pytest
from support.chaos.downloads import finished_download, is_download, source_of
from support.controller_harness import ControllerHarness, llm_service
from support.engine_processes import wait_for
from support.fake_kubelet import FakeContainer

from quire_operator.render import model_storage
from quire_spec.dataclass_json import from_json
from quire_spec.documents.download_result import KEPT_FOLDERS_VARIABLE, DownloadReason
from quire_spec.documents.sources import Source

API = ("quire.dev/v1alpha1", "LLMService")
CLAIM = ("v1", "PersistentVolumeClaim")
GIB = 2**30
pytestmark = pytest.mark.usefixtures("fake_pods")


@pytest.fixture
def revisions(place):
    """Three revisions of a model."""
    return [{"http": {"url": f"{place.url}/{name}"}} for name in "abc"]


def folder_of(source):
    return model_storage.folder(from_json(Source, source, "source")).rpartition("/")[2]


def kept_folders(cluster, namespace, source):
    """The folders that the Job for a source keeps, beside its own; None while there is no such Job."""
    for job in cluster.items("batch/v1", "Job", namespace):
        pod_spec = job["spec"]["template"]["spec"]
        if source_of(pod_spec) == source:
            (value,) = [
                e.get("value", "") for e in pod_spec["containers"][0]["env"] if e["name"] == KEPT_FOLDERS_VARIABLE
            ]
            return {*value.split(",")} - {""}
    return None


def is_of(source, namespace):
    """A predicate for the pods that download a source."""
    return lambda pod: (
        is_download(pod) and pod["metadata"]["namespace"] == namespace and source_of(pod["spec"]) == source
    )


def update(cluster, namespace, source, **spec):
    cluster.merge(*API, "tales", {"spec": {"model": {"source": source}, **spec}}, namespace)


def waits_for(operator, kind, status, reason):
    def is_so():
        condition = operator.condition(kind)
        return (condition.get("status"), condition.get("reason")) == (status, reason)

    try:
        wait_for(is_so, 120, f"{kind}={status}/{reason}")
    except AssertionError as error:
        raise AssertionError(f"{error}: {operator.status().get('conditions')}") from error


def test_a_download_keeps_the_revisions_that_pods_use(cluster, namespace, kubelet, revisions):
    first, second, third = revisions
    kubelet.set_behavior(is_of(first, namespace), finished_download(DownloadReason.DOWNLOADED, bytes=GIB))
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(model={"source": first}), namespace)
        waits_for(operator, "Ready", "True", "Ready")
        assert kept_folders(cluster, namespace, first) == set()
        # The second revision fails; the pod keeps the first.
        kubelet.set_behavior(is_of(second, namespace), finished_download(DownloadReason.NO_SPACE, message="full"))
        update(cluster, namespace, second)
        waits_for(operator, "ModelCached", "False", "NoSpace")
        assert kept_folders(cluster, namespace, second) == {folder_of(first)}
        # The third replaces it: what the failed one left is not in the list.
        kubelet.set_behavior(is_of(third, namespace), FakeContainer())
        update(cluster, namespace, third)
        wait_for(lambda: kept_folders(cluster, namespace, third) == {folder_of(first)}, 120, "the Job")
        wait_for(lambda: len(cluster.items("batch/v1", "Job", namespace)) == 1, 20, "the failed Job gone")
        (job,) = cluster.items("batch/v1", "Job", namespace)
        # More pods, and passes, change nothing at a Job that runs.
        update(cluster, namespace, third, replicas=2)
        wait_for(lambda: operator.child("Deployment")["spec"]["replicas"] == 2, 20, "two pods")
        operator.requeue()
        assert [j["metadata"]["uid"] for j in cluster.items("batch/v1", "Job", namespace)] == [job["metadata"]["uid"]]
        kubelet.set_behavior(is_of(third, namespace), finished_download(DownloadReason.DOWNLOADED, bytes=GIB))
        waits_for(operator, "Ready", "True", "Ready")
        kubelet.set_behavior(is_of(second, namespace), FakeContainer())
        update(cluster, namespace, second)
        wait_for(lambda: kept_folders(cluster, namespace, second) == {folder_of(third)}, 120, "the next Job")


def test_pods_that_are_ending_count_as_users(cluster, namespace, kubelet, revisions):
    first, second, third = revisions
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(model={"source": first}, replicas=2), namespace)
        waits_for(operator, "Ready", "True", "Ready")
        pods = lambda: cluster.items("v1", "Pod", namespace, labelSelector="app.kubernetes.io/component=server")  # noqa: E731
        before = {pod["metadata"]["uid"] for pod in pods()}
        # Pods of the second revision do not become ready, so that one of the first stays.
        kubelet.set_behavior(
            lambda pod: pod["metadata"]["namespace"] == namespace and pod["metadata"]["uid"] not in before,
            FakeContainer(ready=False),
        )
        kubelet.set_behavior(is_of(second, namespace), finished_download(DownloadReason.DOWNLOADED))
        update(cluster, namespace, second)
        wait_for(lambda: {pod["metadata"]["uid"] for pod in pods()} - before, 120, "a pod of the second revision")
        kubelet.set_behavior(is_of(third, namespace), FakeContainer())
        update(cluster, namespace, third)
        wait_for(
            lambda: kept_folders(cluster, namespace, third) == {folder_of(first), folder_of(second)},
            30,
            "both are kept",
        )


def small_claim(size, **spec):
    """A claim that an earlier service of the same name left."""
    labels = {
        "app.kubernetes.io/managed-by": "quire-operator",
        "app.kubernetes.io/instance": "tales",
        "app.kubernetes.io/name": "quire",
        "app.kubernetes.io/component": "model-download",
    }
    storage = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}, **spec}
    return {
        "apiVersion": "v1",
        "kind": CLAIM[1],
        "metadata": {"name": "tales-models", "labels": labels},
        "spec": storage,
    }


@pytest.mark.parametrize("can_grow", [True, False])
def test_a_claim_that_is_too_small_grows_before_a_download(cluster, namespace, kubelet, revisions, can_grow):
    storage_class = {
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": f"grows-{namespace}"},
        "provisioner": "example.com/none", "allowVolumeExpansion": can_grow,
    }  # fmt: skip
    cluster.apply(storage_class)
    cluster.apply(small_claim("1Gi", storageClassName=f"grows-{namespace}"), namespace)
    wait_for(
        lambda: cluster.get(*CLAIM, "tales-models", namespace).get("status", {}).get("phase") == "Bound", 20, "bound"
    )
    first, second, _ = revisions
    is_full = finished_download(DownloadReason.NO_SPACE, message="the volume is full")
    kubelet.set_behavior(is_of(first, namespace), is_full)
    size = lambda: cluster.get(*CLAIM, "tales-models", namespace)["spec"]["resources"]["requests"]["storage"]  # noqa: E731
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(model={"source": first}), namespace)
        waits_for(operator, "ModelCached", "False", "NoSpace")
        if can_grow:
            assert size() == "10Gi"
            assert operator.condition("ModelCached")["message"] == "the volume is full; it is tried again"
        else:
            assert size() == "1Gi"
            message = operator.condition("ModelCached")["message"]
            assert "claim tales-models has 1Gi and cannot grow (" in message and "must support resize" in message
            assert message.endswith("but the previous and the next revision of the model need 10240Mi")
            assert operator.condition("ConfigValid")["status"] == "True"
        # The claim does not stand in the way of a download that fits.
        kubelet.set_behavior(is_of(second, namespace), finished_download(DownloadReason.DOWNLOADED))
        update(cluster, namespace, second)
        waits_for(operator, "Ready", "True", "Ready")
        assert operator.condition("ModelCached")["reason"] == "Downloaded"
    cluster.delete("storage.k8s.io/v1", "StorageClass", f"grows-{namespace}")
