# SPDX-License-Identifier: Apache-2.0
"""Downloads of LLMServices in a namespace: how their pods end, and what was brought where, by the Jobs and claims that
were seen, and by nothing that the operator says of them.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Self

from support.cluster import Cluster
from support.kubelet import Container, Kubelet
from support.place import Place
from support.remembering import Version, Watching

from quire_operator.render import object_names
from quire_spec.documents.download_result import DownloadReason, DownloadResult

Manifest = dict[str, Any]
NUM_SOURCES = 3


def ended(result: DownloadReason, **fields: Any) -> Container:
    """The end of a download."""
    outcome = DownloadResult(result, **{"bytes": 1000, **fields})
    return Container(exit_code=0 if result is DownloadReason.DOWNLOADED else 1, message=outcome.dump())


def is_download(pod: Mapping[str, Any]) -> bool:
    """Whether a pod downloads a model."""
    return bool(pod["metadata"].get("labels", {}).get(object_names.COMPONENT) == object_names.DOWNLOAD)


def source_of(pod_spec: Mapping[str, Any]) -> Manifest:
    """What a pod downloads."""
    (text,) = [a for a in _arguments(pod_spec) if a.startswith("--source=")]
    found: Manifest = json.loads(text.partition("=")[2])
    return found


def _arguments(pod_spec: Mapping[str, Any]) -> list[str]:
    found: list[str] = pod_spec["containers"][0]["args"]
    return found


class Downloads:
    """What there is to download, and what was. A context manager."""

    def __init__(self, cluster: Cluster, namespace: str, kubelet: Kubelet) -> None:
        self.place = Place()
        self.jobs = Watching(cluster, "batch/v1", "Job", namespace)
        self.claims = Watching(cluster, "v1", "PersistentVolumeClaim", namespace)
        self.slow: set[str] = set()
        """Services whose downloads do not end by themselves."""
        self._namespace, self._kubelet = namespace, kubelet

    def __enter__(self) -> Self:
        self.jobs.__enter__()
        self.claims.__enter__()
        for which in range(NUM_SOURCES):
            self._kubelet.behave(
                lambda pod, which=which: self._is_of(pod) and source_of(pod["spec"]) == self.source(which),
                ended(DownloadReason.DOWNLOADED, bytes=self.bytes(which), revision=f"v{which}"),
            )
        self._kubelet.behave(self._is_slow, Container())
        return self

    def __exit__(self, *_: object) -> None:
        self.jobs.__exit__()
        self.claims.__exit__()
        self.place.close()

    def source(self, which: int) -> Manifest:
        """One of the sources."""
        return {"http": {"url": f"{self.place.url}/v{which}"}}

    def bytes(self, which: int) -> int:
        """How many there are of a source: no two have as many."""
        return 2**20 + which

    def end(self, pod: Manifest, result: Container) -> None:
        """A pod ends so, whatever others do."""
        uid = pod["metadata"]["uid"]
        self._kubelet.behave(lambda body: body["metadata"]["uid"] == uid, result)

    # What must hold

    def faults(self, body: Manifest, since: float) -> Iterator[str]:
        """What is wrong with what a service's status says of its model, where it was found after `since`."""
        status, source = body["status"], body["spec"]["model"]["source"]
        cached = next(c for c in status["conditions"] if c["type"] == "ModelCached")
        cache = status.get("cache", {})
        if cached["status"] != "Unknown" and (cached["status"] == "True") != (cache["state"] == "Ready"):
            yield f"{cached} beside {cache}"
        if cached["reason"] != "Downloaded":
            return
        if not self.brought(body["metadata"]["name"], source, since, int(body["metadata"]["resourceVersion"])):
            yield f"Downloaded, and nobody has brought {source} to the claim that is there"
        which = next(which for which in range(NUM_SOURCES) if self.source(which) == source)
        for key, value in {"bytes": str(self.bytes(which)), "revision": f"v{which}"}.items():
            if cache.get(key) not in (None, value):
                yield f"{key} {cache[key]}, and those of {source} are {value}"

    def brought(self, service: str, source: Manifest, since: float, number: int) -> bool:
        """Whether a Job has brought a source to a claim that was there some time after `since`, both before the version
        `number` of another object: versions are counted over all, and so know what came first."""
        return any(
            _is_complete(job.body)
            and source_of(job.body["spec"]["template"]["spec"]) == source
            and _number(job) < number
            and self._born(self.jobs, job.uid) > self._born(self.claims, uid)
            for uid in self._there(service, since, number)
            for job in list(self.jobs.seen)
            if _is_of_service(job, service)
        )

    def was_brought(self, service: str, model: str, until: float) -> bool:
        """Whether a Job was seen to have brought what a pod has in the folder `model`, to any claim of the service."""
        return not model.startswith(object_names.MODEL_DIR) or any(
            _is_complete(job.body)
            and job.at <= until
            and f"--into={model}" in _arguments(job.body["spec"]["template"]["spec"])
            for job in list(self.jobs.seen)
            if _is_of_service(job, service)
        )

    def _there(self, service: str, since: float, number: int) -> set[str]:
        """Claims of a service that were there some time after `since` and before the version `number`, by uid."""
        seen = [v for v in list(self.claims.seen) if v.body["metadata"]["name"] == object_names.model_claim(service)]
        gone = {v.uid for v in seen if v.gone and v.at < since}
        return {v.uid for v in seen if _number(v) < number} - gone

    def _born(self, watch: Watching, uid: str) -> int:
        """When an object was made: versions are counted over all objects."""
        return _number(next(v for v in list(watch.seen) if v.uid == uid))

    def _is_slow(self, pod: Mapping[str, Any]) -> bool:
        over = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        return self._is_of(pod) and not over and pod["metadata"]["labels"][object_names.INSTANCE] in self.slow

    def _is_of(self, pod: Mapping[str, Any]) -> bool:
        return pod["metadata"]["namespace"] == self._namespace and is_download(pod)


def _number(version: Version) -> int:
    return int(version.body["metadata"]["resourceVersion"])


def _is_complete(job: Mapping[str, Any]) -> bool:
    conditions = job.get("status", {}).get("conditions") or ()
    return any(c["type"] == "Complete" and c["status"] == "True" for c in conditions)


def _is_of_service(job: Version, service: str) -> bool:
    found = job.body["spec"]["template"]["metadata"]["labels"]
    return (found.get(object_names.INSTANCE), found.get(object_names.COMPONENT)) == (service, object_names.DOWNLOAD)
