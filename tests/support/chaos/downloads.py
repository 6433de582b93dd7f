# SPDX-License-Identifier: Apache-2.0
"""Downloads of LLMServices in a namespace: how their pods end, and what was brought where, by the Jobs and claims that
were seen, and by nothing that the operator says of them.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Self

from support.chaos.recorders import ObjectVersion, WatchRecorder
from support.cluster import Cluster
from support.fake_kubelet import FakeContainer, FakeKubelet
from support.fake_model_server import FakeModelServer

from quire_operator.render import object_names
from quire_spec.documents.download_result import DownloadReason, DownloadResult

Manifest = dict[str, Any]
NUM_SOURCES = 3


def finished_download(result: DownloadReason, **fields: Any) -> FakeContainer:
    """A finished download container."""
    download_result = DownloadResult(result, **{"bytes": 1000, **fields})
    return FakeContainer(exit_code=0 if result is DownloadReason.DOWNLOADED else 1, message=download_result.dump())


def is_download(pod: Mapping[str, Any]) -> bool:
    """Whether a pod downloads a model."""
    return bool(pod["metadata"].get("labels", {}).get(object_names.COMPONENT) == object_names.DOWNLOAD)


def source_of(pod_spec: Mapping[str, Any]) -> Manifest:
    """Return the source that a pod downloads."""
    (text,) = [a for a in _arguments(pod_spec) if a.startswith("--source=")]
    source: Manifest = json.loads(text.partition("=")[2])
    return source


def _arguments(pod_spec: Mapping[str, Any]) -> list[str]:
    arguments: list[str] = pod_spec["containers"][0]["args"]
    return arguments


class DownloadTracker:
    """Sources and completed downloads. A context manager."""

    def __init__(self, cluster: Cluster, namespace: str, kubelet: FakeKubelet) -> None:
        self.model_server = FakeModelServer()
        self.jobs = WatchRecorder(cluster, "batch/v1", "Job", namespace)
        self.claims = WatchRecorder(cluster, "v1", "PersistentVolumeClaim", namespace)
        self.slow_services: set[str] = set()
        """Services whose downloads do not end by themselves."""
        self._namespace, self._kubelet = namespace, kubelet

    def __enter__(self) -> Self:
        self.jobs.__enter__()
        self.claims.__enter__()
        for index in range(NUM_SOURCES):
            self._kubelet.set_behavior(
                lambda pod, which=index: self._is_tracked(pod) and source_of(pod["spec"]) == self.source(which),
                finished_download(DownloadReason.DOWNLOADED, bytes=self.num_source_bytes(index), revision=f"v{index}"),
            )
        self._kubelet.set_behavior(self._is_slow, FakeContainer())
        return self

    def __exit__(self, *_: object) -> None:
        self.jobs.__exit__()
        self.claims.__exit__()
        self.model_server.close()

    def source(self, index: int) -> Manifest:
        """One of the sources."""
        return {"http": {"url": f"{self.model_server.url}/v{index}"}}

    def num_source_bytes(self, index: int) -> int:
        """Return the bytes of a source; no two sources have the same number."""
        return 2**20 + index

    def end_pod(self, pod: Manifest, container: FakeContainer) -> None:
        """Set how the download of one pod ends."""
        uid = pod["metadata"]["uid"]
        self._kubelet.set_behavior(lambda body: body["metadata"]["uid"] == uid, container)

    # What must hold

    def violations(self, body: Manifest, since: float) -> Iterator[str]:
        """What is wrong with what a service's status says of its model, where it was found after `since`."""
        status, source = body["status"], body["spec"]["model"]["source"]
        cached = next(c for c in status["conditions"] if c["type"] == "ModelCached")
        cache = status.get("cache", {})
        if cached["status"] != "Unknown" and (cached["status"] == "True") != (cache["state"] == "Ready"):
            yield f"{cached} beside {cache}"
        if cached["reason"] != "Downloaded":
            return
        if not self.is_downloaded_to_claim(
            body["metadata"]["name"], source, since, int(body["metadata"]["resourceVersion"])
        ):
            yield f"Downloaded, and no Job has downloaded {source} to the existing claim"
        index = next(which for which in range(NUM_SOURCES) if self.source(which) == source)
        for key, value in {"bytes": str(self.num_source_bytes(index)), "revision": f"v{index}"}.items():
            if cache.get(key) not in (None, value):
                yield f"{key} {cache[key]}, and those of {source} are {value}"

    def is_downloaded_to_claim(self, service: str, source: Manifest, since: float, resource_version: int) -> bool:
        """Whether a Job has brought a source to a claim that was there some time after `since`, both before the version
        `number` of another object: versions are counted over all, and so know what came first."""
        return any(
            _is_complete(job.body)
            and source_of(job.body["spec"]["template"]["spec"]) == source
            and _resource_version(job) < resource_version
            and self._created_version(self.jobs, job.uid) > self._created_version(self.claims, uid)
            for uid in self._existing_claims(service, since, resource_version)
            for job in list(self.jobs.versions)
            if _is_of_service(job, service)
        )

    def was_downloaded(self, service: str, model: str, until: float) -> bool:
        """Whether a Job was seen to have brought what a pod has in the folder `model`, to any claim of the service."""
        return not model.startswith(object_names.MODEL_DIR) or any(
            _is_complete(job.body)
            and job.seen_at <= until
            and f"--into={model}" in _arguments(job.body["spec"]["template"]["spec"])
            for job in list(self.jobs.versions)
            if _is_of_service(job, service)
        )

    def _existing_claims(self, service: str, since: float, resource_version: int) -> set[str]:
        """Claims of a service that were there some time after `since` and before the version `number`, by uid."""
        versions = [
            v for v in list(self.claims.versions) if v.body["metadata"]["name"] == object_names.model_claim(service)
        ]
        deleted = {v.uid for v in versions if v.deleted and v.seen_at < since}
        return {v.uid for v in versions if _resource_version(v) < resource_version} - deleted

    def _created_version(self, watch: WatchRecorder, uid: str) -> int:
        """Return the resourceVersion of an object's creation, which orders all objects."""
        return _resource_version(next(v for v in list(watch.versions) if v.uid == uid))

    def _is_slow(self, pod: Mapping[str, Any]) -> bool:
        is_terminated = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        return (
            self._is_tracked(pod)
            and not is_terminated
            and pod["metadata"]["labels"][object_names.INSTANCE] in self.slow_services
        )

    def _is_tracked(self, pod: Mapping[str, Any]) -> bool:
        return pod["metadata"]["namespace"] == self._namespace and is_download(pod)


def _resource_version(version: ObjectVersion) -> int:
    return int(version.body["metadata"]["resourceVersion"])


def _is_complete(job: Mapping[str, Any]) -> bool:
    conditions = job.get("status", {}).get("conditions") or ()
    return any(c["type"] == "Complete" and c["status"] == "True" for c in conditions)


def _is_of_service(job: ObjectVersion, service: str) -> bool:
    labels = job.body["spec"]["template"]["metadata"]["labels"]
    return (labels.get(object_names.INSTANCE), labels.get(object_names.COMPONENT)) == (service, object_names.DOWNLOAD)
