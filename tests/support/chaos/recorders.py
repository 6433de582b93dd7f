# SPDX-License-Identifier: Apache-2.0
"""Recorders of a chaos test, independent of the operator: a watch records every version of an object, and fake pods
record when they started and with which configuration. invariants.py compares them.
"""

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Self, cast

import orjson
from kubernetes import watch
from kubernetes.client import ApiException
from support.cluster import Cluster
from support.fake_admin_api import FakePod
from support.fake_kubelet import FailedMount, FakeKubelet
from support.fake_pods import FakePods

from quire_operator.render import object_names
from quire_spec.dataclass_json import drop_nulls, to_json
from quire_spec.documents.adapter_catalog import AdapterSpec
from quire_spec.documents.pod_status import AdapterState, AdapterStatus, PodStatus

Manifest = dict[str, Any]
_WATCH_S = 2


@dataclass(frozen=True)
class ObjectVersion:
    """One version of an object."""

    seen_at: float
    deleted: bool
    body: Manifest

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])


class WatchRecorder:
    """Every version of the objects of a kind in a namespace. A context manager."""

    def __init__(self, cluster: Cluster, api_version: str, kind: str, namespace: str) -> None:
        self.versions: list[ObjectVersion] = []
        self.error: Exception | None = None
        self._cluster, self.path = cluster, cluster.path(api_version, kind, namespace)
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(20)

    def _run(self) -> None:
        resource_version = None
        watcher = watch.Watch()
        try:
            while not self._stop.is_set():
                try:
                    for event in watcher.stream(
                        self._list, resource_version=resource_version, timeout_seconds=_WATCH_S, serialize=False
                    ):
                        body = event["raw_object"]
                        self.versions.append(ObjectVersion(time.monotonic(), event["type"] == "DELETED", body))
                except ApiException as error:
                    # The watch cache of 1.36 can be older than the last event. client-go tries again, too.
                    if error.status != HTTPStatus.GATEWAY_TIMEOUT:
                        raise
                    time.sleep(0.2)
                resource_version = watcher.resource_version
        except Exception as error:
            self.error = error

    def _list(self, **options: Any) -> Any:
        """List or watch the objects; the watch of the official client calls it."""
        return self._cluster.dynamic.request("GET", self.path, **options)


@dataclass
class ChaosPod(FakePod):
    """A fake pod that reports another digest for each source of an adapter."""

    def current_status(self) -> PodStatus | None:
        """Return its current response; None if it does not respond."""
        return None if self.hangs or self.status_fails else self.status()

    def _adapter_status(self, adapter: AdapterSpec) -> AdapterStatus:
        status = super()._adapter_status(adapter)
        if status.state is not AdapterState.READY:
            return status
        return replace(status, digest=source_digest(drop_nulls(to_json(adapter.source))))


def source_digest(source: Mapping[str, Any]) -> str:
    """Return the digest of an adapter; each source has another one."""
    return f"sha256:{hashlib.sha256(orjson.dumps(source, option=orjson.OPT_SORT_KEYS)).hexdigest()}"


@dataclass(frozen=True)
class StartedPod:
    """A pod as it was started."""

    fake_pod: ChaosPod
    engine_config: Manifest
    """The engine's part of the pod.json that it mounts."""
    claim_names: frozenset[str]
    """Claims that it mounts."""

    def matches_spec(self, spec: Mapping[str, Any]) -> bool:
        """Whether it was started for a spec."""
        max_model_len = spec.get("engine", {}).get("maxModelLen")
        sources = [spec["model"]["source"], *(adapter["source"] for adapter in spec.get("adapters") or ())]
        required_claims = {source["pvc"]["claimName"] for source in sources if "pvc" in source}
        return (
            required_claims <= self.claim_names
            and max_model_len in (None, self.engine_config["max_model_len"])
            and self.engine_config["model"] == _model_folder(spec["model"]["source"])
        )


def _model_folder(source: Mapping[str, Any]) -> str:
    """Return the folder of a model in pods."""
    if "pvc" in source:
        return f"/mnt/claims/{source['pvc']['claimName']}/{source['pvc']['path']}"
    return f"/mnt/model/{hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()[:7]}"


def is_ready(pod: Manifest) -> bool:
    """Whether a pod is ready by the kubelet, running, and not being deleted."""
    status = pod.get("status", {})
    conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
    is_running = "deletionTimestamp" not in pod["metadata"] and status.get("phase") == "Running"
    return is_running and conditions.get("Ready") == "True"


def is_serving_pod_of(pod: Manifest, service: str) -> bool:
    """Whether a pod is a server pod of a service."""
    labels = pod["metadata"].get("labels", {})
    return (labels.get(object_names.INSTANCE), labels.get(object_names.COMPONENT)) == (service, object_names.SERVER)


class RecordingFakePods(FakePods):
    """Fake pods that record how they were started."""

    def __init__(self, kubelet: FakeKubelet) -> None:
        super().__init__(kubelet, pod_class=ChaosPod)
        self.kubelet = kubelet
        self.started_pods: dict[str, StartedPod] = {}
        """All pods that ever ran, by uid."""
        self.unready_uids: set[str] = set()
        """Uids of pods whose readiness probe fails."""

    def refresh_secrets(self) -> None:
        """Update the mounted Secrets of running pods."""
        with self._lock:
            entries = list(self._running_by_uid.values())
        for entry in entries:
            with suppress(FailedMount):
                self._key_file(entry.pod)

    def _on_pod_start(self, pod: Manifest, address: str) -> None:
        if pod["metadata"].get("labels", {}).get(object_names.COMPONENT) != object_names.SERVER:
            return
        volumes = pod["spec"]["volumes"]
        (engine_config_name,) = [
            v["configMap"]["name"] for v in volumes if "-engine-" in v.get("configMap", {}).get("name", "")
        ]
        config = orjson.loads(self._mounted_object(pod, "ConfigMap", engine_config_name)["data"]["pod.json"])["engine"]
        claims = frozenset(v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v)
        super()._on_pod_start(pod, address)
        uid = pod["metadata"]["uid"]
        with self._lock:
            self.started_pods[uid] = StartedPod(cast(ChaosPod, self._running_by_uid[uid].fake_pod), config, claims)

    def _probe_readiness(self, pod: Manifest) -> bool:
        return super()._probe_readiness(pod) and pod["metadata"]["uid"] not in self.unready_uids
