# SPDX-License-Identifier: Apache-2.0
"""Download of a model: its status meanwhile, and that no pod gets a GPU before it is downloaded.

The pods of Jobs end as a test says (support/fake_kubelet.py); what their program does is in
tests/server/downloads/test_model_download.py.
"""

import asyncio
from datetime import UTC, datetime

import pytest
from support.chaos.downloads import finished_download, is_download
from support.controller_harness import ControllerHarness, llm_service
from support.engine_processes import wait_for
from support.fake_kubelet import FakeContainer
from support.fake_pods import FakePods

from quire_operator.controller import reconciler
from quire_operator.controller.status.model_cache import job_condition
from quire_operator.kube import resources
from quire_operator.kube.api_client import ApiClient
from quire_spec.documents.download_progress import DownloadProgress
from quire_spec.documents.download_result import DownloadReason

API = ("quire.dev/v1alpha1", "LLMService")
FAR = DownloadProgress(2**20, 4 * 2**20, 2**18)
COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"


@pytest.fixture(scope="module")
def kubelet(kubelet):
    with FakePods(kubelet, progress=FAR):
        yield kubelet


def downloads(kubelet, namespace, container):
    """What the download Job's pods of a namespace do from now on."""

    kubelet.set_behavior(lambda pod: is_of(pod, namespace), container)


def is_of(pod, namespace):
    return pod["metadata"]["namespace"] == namespace and is_download(pod)


def message(operator, kind):
    return operator.condition(kind)["message"]


def says(operator, kind, status, reason, seconds=120):
    def so():
        found = operator.condition(kind)
        return (found.get("status"), found.get("reason")) == (status, reason)

    try:
        wait_for(so, seconds, f"{kind}={status}/{reason}")
    except AssertionError as error:
        raise AssertionError(f"{error}: {operator.status().get('conditions')}") from error


def test_no_pod_starts_before_the_download_and_every_step_is_reported(cluster, namespace, kubelet, place):
    downloads(kubelet, namespace, FakeContainer())
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(model={"source": {"http": {"url": place.url}}}), namespace)
        says(operator, "ModelCached", "False", "Downloading")
        assert operator.condition("Ready")["reason"] == "Downloading"
        assert operator.child("Deployment")["spec"]["replicas"] == 0
        cache = operator.status()["cache"]
        assert (cache["state"], cache["progress"], cache["totalBytes"]) == ("Downloading", "25%", str(4 * 2**20))
        assert "1.0 MiB of 4.0 MiB (25%), 256.0 KiB/s, about 12 s left" in message(operator, "ModelCached")
        assert "25%" in cluster.kubectl("get", "llm", "tales", "--output=wide", namespace=namespace)
        # The token is rejected; the Job retries after 10 s, when the token is right.
        why = "http://models/config.json: HTTP 401; the source's secret is missing, wrong, or lacks access"
        downloads(kubelet, namespace, finished_download(DownloadReason.AUTH_FAILED, message=why))
        says(operator, "ModelCached", "False", "AuthFailed")
        assert message(operator, "ModelCached") == (
            f"{why}; no Secret is named; set spec.model.source.http.headersSecretRef; it is tried again"
        )
        assert operator.status()["cache"] == {"state": "Failed", "bytes": "1000"}
        downloads(kubelet, namespace, finished_download(DownloadReason.DOWNLOADED, bytes=2**20, revision=COMMIT))
        says(operator, "ModelCached", "True", "Downloaded")
        # News of the Job may be here before its pod's.
        there = {"state": "Ready", "bytes": str(2**20), "revision": COMMIT}
        wait_for(lambda: operator.status()["cache"] == there, 120, f"{there}")
        says(operator, "Ready", "True", "Ready")
        reasons = [e["reason"] for e in cluster.items("events.k8s.io/v1", "Event", namespace)]
        assert {"Downloading", "AuthFailed", "Downloaded"} <= set(reasons)
        assert reasons.count("AuthFailed") == 1


def test_a_failed_download_is_tried_again(cluster, namespace, kubelet, place, monkeypatch):
    downloads(kubelet, namespace, FakeContainer())
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(model={"source": {"http": {"url": place.url}}}), namespace)
        says(operator, "ModelCached", "False", "Downloading")
        (job,) = cluster.items("batch/v1", "Job", namespace)
        # As the controller says it after six tries, which take ten minutes.
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        failed = {"status": "True", "reason": "BackoffLimitExceeded", "lastTransitionTime": now}
        # Kubernetes 1.31 and later reject Failed without FailureTarget, and with active or ready pods.
        conditions = [{"type": kind, **failed} for kind in ("FailureTarget", "Failed")]
        status = {"conditions": conditions, "active": 0, "ready": 0}
        name = job["metadata"]["name"]
        cluster.merge("batch/v1", "Job", name, {"status": status}, namespace, subresource="status")
        says(operator, "ModelCached", "False", "DownloadFailed")
        for pod in cluster.items("v1", "Pod", namespace, labelSelector=f"job-name={name}"):
            # Pods that are asked how they are would bring about a pass.
            cluster.delete("v1", "Pod", pod["metadata"]["name"], namespace, gracePeriodSeconds=0)
        operator.wait_settled()
        operator.requeue()
        uid = job["metadata"]["uid"]
        assert cluster.get("batch/v1", "Job", name, namespace)["metadata"]["uid"] == uid, "not at once"
        # It is due some seconds after the pass, without an event.
        since = datetime.now(UTC) - datetime.fromisoformat(now)
        monkeypatch.setattr(reconciler, "_FAILED_DOWNLOAD_RETRY_S", since.total_seconds() + 3)
        operator.requeue()

        def another():
            found = cluster.get("batch/v1", "Job", name, namespace)
            return found is not None and found["metadata"]["uid"] != uid

        wait_for(another, 20, "another Job")


def test_a_rejected_credential_is_reported_before_planning(cluster, namespace, kubelet, place):
    place.required_key = "s3cr3t-of-the-place"
    with ControllerHarness(cluster, namespace, {"secret_ttl_s": 0.1}) as operator:
        http = {"url": place.url, "headersSecretRef": {"name": "models"}}
        cluster.apply(llm_service(model={"source": {"http": http}}), namespace)
        says(operator, "ModelCached", "False", "AuthFailed")
        assert "Secret 'models': does not exist in namespace" in message(operator, "ModelCached")
        assert operator.condition("Ready")["reason"] == "AuthFailed"
        for value, words in (("wrong", "HTTP 401"), ("s3cr3t-of-the-place", "")):
            secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "models"}}
            cluster.apply(secret | {"stringData": {"X-Key": value}}, namespace)
            if words:
                wait_for(lambda w=words: w in message(operator, "ModelCached"), 120, words)
                assert "check Secret 'models'" in message(operator, "ModelCached")
        says(operator, "Planned", "True", "Fits", 60)
        text = cluster.kubectl("get", "llm,events", "-o", "yaml", namespace=namespace)
        assert place.required_key not in text and "wrong, or lacks" not in operator.condition("Ready")["message"]
    place.required_key = ""


def test_the_download_of_one_source_is_not_reported_for_another(cluster, namespace, kubelet, place):
    """Also where nothing is applied for the other, and by an operator that has not seen the first."""
    downloads(kubelet, namespace, finished_download(DownloadReason.DOWNLOADED, bytes=2**20, revision=COMMIT))
    source, other = ({"http": {"url": f"{place.url}{end}"}} for end in ("", "/."))
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(model={"source": source}), namespace)
        says(operator, "Ready", "True", "Ready")
        cluster.merge(*API, "tales", {"spec": {"model": {"source": other}, "runtime": {"memory": "64Mi"}}}, namespace)
        says(operator, "Planned", "False", "DoesNotFit")
        assert operator.condition("ModelCached")["reason"] == "DownloadPending"
        assert operator.status()["cache"] == {"state": "Pending"}
        paused = {"model": {"source": source}, "runtime": {"memory": None}, "paused": True}
        cluster.merge(*API, "tales", {"spec": paused}, namespace)
        says(operator, "ModelCached", "True", "Downloaded")
        cluster.merge(*API, "tales", {"spec": {"model": {"source": other}}}, namespace)
        says(operator, "ModelCached", "False", "DownloadPending")
        cluster.merge(*API, "tales", {"spec": {"model": {"source": source}}}, namespace)
        says(operator, "ModelCached", "True", "Downloaded")
        there = operator.status()["conditions"]
    with ControllerHarness(cluster, namespace) as operator:
        operator.requeue()
        assert operator.status()["conditions"] == there


class SlowJobWrites(ApiClient):
    """A client whose second write of a download Job reaches the API server after the Job has ended."""

    num_waits = 0

    async def apply(self, resource, manifest):
        if resource is resources.JOB:
            name = (manifest["metadata"]["namespace"], manifest["metadata"]["name"])
            job = await self.get_or_none(resource, *name)
            while job is not None and not job_condition(job, "Complete"):
                SlowJobWrites.num_waits += 1
                await asyncio.sleep(0.1)
                job = await self.get_or_none(resource, *name)
        return await super().apply(resource, manifest)


def test_pods_start_if_the_download_ends_while_its_job_is_written(cluster, namespace, kubelet, place):
    """The response says that the Job has ended, but the pass had read the Job before that."""
    downloads(kubelet, namespace, finished_download(DownloadReason.DOWNLOADED))
    with ControllerHarness(cluster, namespace, make_client=SlowJobWrites) as operator:
        cluster.apply(llm_service(model={"source": {"http": {"url": place.url}}}), namespace)
        says(operator, "Ready", "True", "Ready")
    assert SlowJobWrites.num_waits, "the Job ended before its second write"


def test_a_deleted_claim_is_created_and_filled_again_when_no_pod_uses_it(cluster, namespace, kubelet, place):
    downloads(kubelet, namespace, finished_download(DownloadReason.DOWNLOADED))
    claim = ("v1", "PersistentVolumeClaim", "tales-models")
    tales = llm_service(model={"source": {"http": {"url": place.url}}})
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(tales, namespace)
        says(operator, "Ready", "True", "Ready")
        before = cluster.get(*claim, namespace)["metadata"]["uid"]
        cluster.delete(*claim, namespace)
        says(operator, "ModelCached", "False", "DownloadPending")
        assert "claim tales-models is being deleted, but it exists until the last pod" in message(
            operator, "ModelCached"
        )
        assert operator.condition("Available")["status"] == "True"
        # The Job's pod held it too, although it had ended.
        wait_for(lambda: not any(is_of(p, namespace) for p in cluster.items("v1", "Pod", namespace)), 20, "it is gone")
        downloads(kubelet, namespace, FakeContainer())
        # Changes that need no new pod are applied; the existing pod is kept.
        (pod,) = cluster.items("v1", "Pod", namespace)
        clients = [{"podSelector": {"matchLabels": {"app": "chat"}}}]
        tales["spec"] |= {"engine": {"maxModelLen": 512}, "networking": {"networkPolicy": {"ingressFrom": clients}}}
        cluster.apply(tales, namespace)
        policy = lambda: operator.child("NetworkPolicy")["spec"]["ingress"][0]["from"]  # noqa: E731
        wait_for(lambda: policy() == clients, 20, "the new policy")
        assert cluster.get(*claim, namespace)["metadata"]["uid"] == before
        assert [p["metadata"]["uid"] for p in cluster.items("v1", "Pod", namespace)] == [pod["metadata"]["uid"]]
        tales["spec"]["replicas"] = 0
        cluster.apply(tales, namespace)
        says(operator, "ModelCached", "False", "Downloading")
        assert cluster.get(*claim, namespace)["metadata"]["uid"] != before
        tales["spec"]["replicas"] = 1
        cluster.apply(tales, namespace)
        says(operator, "ModelCached", "False", "Downloading")
        assert operator.child("Deployment")["spec"]["replicas"] == 0
        downloads(kubelet, namespace, finished_download(DownloadReason.DOWNLOADED))
        says(operator, "Ready", "True", "Ready")


def test_a_claim_that_was_replaced_while_no_operator_ran_is_filled_again(cluster, namespace, kubelet, place):
    downloads(kubelet, namespace, finished_download(DownloadReason.DOWNLOADED))
    claim, job = ("v1", "PersistentVolumeClaim", "tales-models"), ("batch/v1", "Job")
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(model={"source": {"http": {"url": place.url}}}, replicas=0), namespace)
        says(operator, "ModelCached", "True", "Downloaded")
        (before,), (pod,) = cluster.items(*job, namespace), cluster.items("v1", "Pod", namespace)
        made = cluster.get(*claim, namespace)
    # Times of objects are whole seconds.
    wait_for(lambda: datetime.now(UTC).strftime("%FT%TZ") > before["metadata"]["creationTimestamp"], 5, "later")
    cluster.delete(*claim, namespace)
    cluster.delete("v1", "Pod", pod["metadata"]["name"], namespace)
    wait_for(lambda: not cluster.get(*claim, namespace), 20, "it is gone")
    again = {key: value for key, value in made["metadata"].items() if key in ("name", "labels", "ownerReferences")}
    storage = {key: made["spec"][key] for key in ("accessModes", "resources")}
    cluster.apply({"apiVersion": "v1", "kind": claim[1], "metadata": again, "spec": storage}, namespace)
    downloads(kubelet, namespace, FakeContainer())
    with ControllerHarness(cluster, namespace) as operator:
        says(operator, "ModelCached", "False", "Downloading")
        (after,) = cluster.items(*job, namespace)
        assert after["metadata"]["uid"] != before["metadata"]["uid"]
        downloads(kubelet, namespace, finished_download(DownloadReason.DOWNLOADED))
        says(operator, "ModelCached", "True", "Downloaded")
