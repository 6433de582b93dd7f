# SPDX-License-Identifier: Apache-2.0
"""Recorders of a chaos test, independent of each other: watches record every version of an object;
pods, what they answered; and the operators' client, when a pass began and what it came to say. witness.py holds them
against each other.
"""

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self, cast

import httpx
import orjson
from support.cluster import Cluster
from support.fake_admin_api import FakePod
from support.fake_kubelet import FailedMount, FakeKubelet
from support.fake_pods import FakePods

from quire_operator.kube.api_client import ApiClient
from quire_operator.render import object_names
from quire_spec.dataclass_json import drop_nulls, to_json
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
        self._cluster, self.path = cluster, cluster.path(api_version, kind, namespace)
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._run, daemon=True)
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(20)

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            self.error = error

    def _latest_resource_version(self) -> str:
        return str(self._cluster.request("GET", self.path)["metadata"]["resourceVersion"])

    def _watch(self) -> None:
        access = self._cluster.access
        resource_version = self._latest_resource_version()
        options: dict[str, Any] = {"verify": access.ssl_context(), "headers": access.headers(), "trust_env": False}
        with httpx.Client(base_url=access.server, timeout=30, **options) as http:
            while not self._stop.is_set():
                params = {"watch": "true", "resourceVersion": resource_version, "timeoutSeconds": str(_WATCH_S)}
                with http.stream("GET", self.path, params=params) as response:
                    for line in response.iter_lines():
                        watch_event = orjson.loads(line)
                        if watch_event["object"].get("code") == 410 and not self.versions:
                            # The API server's memory of a kind that has just come begins later than the list.
                            resource_version = self._latest_resource_version()
                            break
                        assert watch_event["type"] in ("ADDED", "MODIFIED", "DELETED"), watch_event
                        resource_version = watch_event["object"]["metadata"]["resourceVersion"]
                        self.versions.append(
                            ObjectVersion(time.monotonic(), watch_event["type"] == "DELETED", watch_event["object"])
                        )


@dataclass
class RecordingPod(FakePod):
    """A fake pod that records its responses."""

    responses: list[tuple[float, PodStatus]] = field(default_factory=list)
    hang_toggles: list[float] = field(default_factory=list)
    """Times at which it began and stopped to hang, alternating."""

    def set_hanging(self, hangs: bool) -> None:
        """Start or stop hanging."""
        if hangs != self.hangs:
            self.hang_toggles.append(time.monotonic())
            self.hangs = hangs

    def was_hanging(self, since: float, until: float) -> bool:
        """Whether it hung at any moment of a period: a client may have got no response then."""
        return sum(at <= since for at in self.hang_toggles) % 2 == 1 or any(
            since < at < until for at in self.hang_toggles
        )

    def status(self) -> PodStatus:
        status = super().status()
        self.responses.append((time.monotonic(), status))
        return status

    def current_status(self) -> PodStatus | None:
        """Return its current response; None: none."""
        return None if self.hangs or self.status_fails else super().status()

    def _adapter_status(self, name: str) -> AdapterStatus:
        status = super()._adapter_status(name)
        if status.state is not AdapterState.READY:
            return status
        (adapter,) = [a for a in self.catalog.adapters if a.name == name]
        return AdapterStatus(name, status.state, status.since, source_digest(drop_nulls(to_json(adapter.source))), name)


def source_digest(source: Mapping[str, Any]) -> str:
    """Return the digest of an adapter; each source has another one."""
    return f"sha256:{hashlib.sha256(orjson.dumps(source, option=orjson.OPT_SORT_KEYS)).hexdigest()}"


@dataclass(frozen=True)
class RecordedStatus:
    """A status that an operator was about to write."""

    pass_started_at: float
    """When the pass began."""
    written_at: float
    uid: str
    status: Manifest


class OperatorKilled(BaseException):
    """The operator's process is gone."""


def recording_client(recorded: list[RecordedStatus], operator_state: Mapping[str, Any]) -> type[ApiClient]:
    """Return a client class that records statuses and can end the operator at a write.

    `operator_state["queue"]` is the operator's work queue.
    """

    class RecordingClient(ApiClient):
        remaining_writes: int | None = None
        """Writes before the operator is killed; None: never."""
        send_last_write = False

        async def set_status(self, resource: Any, manifest: Mapping[str, Any]) -> Manifest:
            meta, now = manifest["metadata"], time.monotonic()
            pass_started_at = operator_state["queue"]._running.get((meta["namespace"], meta["name"]), now)
            recorded.append(
                RecordedStatus(pass_started_at, now, meta["uid"], orjson.loads(orjson.dumps(manifest["status"])))
            )
            return await super().set_status(resource, manifest)

        async def request(self, method: str, path: str, body: Any = None, **options: Any) -> Manifest:
            if method == "GET" or self.remaining_writes is None:
                return await super().request(method, path, body, **options)
            self.remaining_writes -= 1
            if self.remaining_writes > 0:
                return await super().request(method, path, body, **options)
            if self.remaining_writes == 0 and self.send_last_write:
                await super().request(method, path, body, **options)
            raise OperatorKilled

    return RecordingClient


@dataclass(frozen=True)
class StartedPod:
    """A pod as it was started."""

    fake_pod: RecordingPod
    engine_config: Manifest
    """engine.json that it mounts."""
    claim_names: frozenset[str]
    """Those that it mounts."""

    def matches_spec(self, spec: Mapping[str, Any]) -> bool:
        """Whether it was started for a spec."""
        max_model_len = spec.get("engine", {}).get("maxModelLen")
        sources = [spec["model"]["source"], *(adapter["source"] for adapter in spec.get("adapters") or ())]
        required_claims = {source["pvc"]["claimName"] for source in sources if "pvc" in source}
        is_mounted = required_claims <= self.claim_names and max_model_len in (
            None,
            self.engine_config["max_model_len"],
        )
        return is_mounted and self.engine_config["model"] == _model_folder(spec["model"]["source"])


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
    """Whether a pod is one of a service's that serve."""
    labels = pod["metadata"].get("labels", {})
    return (labels.get(object_names.INSTANCE), labels.get(object_names.COMPONENT)) == (service, object_names.SERVER)


class RecordingFakePods(FakePods):
    """Fake pods that record when they started and what they returned."""

    def __init__(self, kubelet: FakeKubelet) -> None:
        super().__init__(kubelet, pod_class=RecordingPod)
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
        config = orjson.loads(self._mounted_object(pod, "ConfigMap", engine_config_name)["data"]["engine.json"])
        claims = frozenset(v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v)
        super()._on_pod_start(pod, address)
        uid = pod["metadata"]["uid"]
        with self._lock:
            self.started_pods[uid] = StartedPod(cast(RecordingPod, self._running_by_uid[uid].fake_pod), config, claims)

    def _probe_readiness(self, pod: Manifest) -> bool:
        return super()._probe_readiness(pod) and pod["metadata"]["uid"] not in self.unready_uids
