# SPDX-License-Identifier: Apache-2.0
"""Downloads of LLMServices in a namespace: the sources, and how their pods end."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Self

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
    (text,) = [a for a in pod_spec["containers"][0]["args"] if a.startswith("--source=")]
    source: Manifest = json.loads(text.partition("=")[2])
    return source


class ChaosDownloads:
    """Sources, and the pods that download them. A context manager."""

    def __init__(self, namespace: str, kubelet: FakeKubelet) -> None:
        self.model_server = FakeModelServer()
        self.slow_services: set[str] = set()
        """Services whose downloads do not end by themselves."""
        self._namespace, self._kubelet = namespace, kubelet

    def __enter__(self) -> Self:
        for index in range(NUM_SOURCES):
            self._kubelet.set_behavior(
                lambda pod, which=index: self._is_tracked(pod) and source_of(pod["spec"]) == self.source(which),
                finished_download(DownloadReason.DOWNLOADED, bytes=self._num_bytes(index), revision=f"v{index}"),
            )
        self._kubelet.set_behavior(self._is_slow, FakeContainer())
        return self

    def __exit__(self, *_: object) -> None:
        self.model_server.close()

    def source(self, index: int) -> Manifest:
        """One of the sources."""
        return {"http": {"url": f"{self.model_server.url}/v{index}"}}

    def end_pod(self, pod: Manifest, container: FakeContainer) -> None:
        """Set how the download of one pod ends."""
        uid = pod["metadata"]["uid"]
        self._kubelet.set_behavior(lambda body: body["metadata"]["uid"] == uid, container)

    def violations(self, body: Manifest) -> Iterator[str]:
        """Yield contradictions between the download of a service and its status."""
        status, source = body["status"], body["spec"]["model"]["source"]
        cached = next(c for c in status["conditions"] if c["type"] == "ModelCached")
        cache = status.get("cache", {})
        if cached["status"] != "Unknown" and (cached["status"] == "True") != (cache["state"] == "Ready"):
            yield f"{cached} beside {cache}"
        if cached["reason"] == "Downloaded":
            index = next(which for which in range(NUM_SOURCES) if self.source(which) == source)
            for key, value in {"bytes": str(self._num_bytes(index)), "revision": f"v{index}"}.items():
                if cache.get(key) not in (None, value):
                    yield f"{key} is {cache[key]}, but it is {value} for {source}"

    def _num_bytes(self, index: int) -> int:
        """Return the bytes of a source; no two sources have the same number."""
        return 2**20 + index

    def _is_slow(self, pod: Mapping[str, Any]) -> bool:
        is_terminated = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        is_of_slow_service = pod["metadata"].get("labels", {}).get(object_names.INSTANCE) in self.slow_services
        return self._is_tracked(pod) and not is_terminated and is_of_slow_service

    def _is_tracked(self, pod: Mapping[str, Any]) -> bool:
        return pod["metadata"]["namespace"] == self._namespace and is_download(pod)
