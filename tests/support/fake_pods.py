# SPDX-License-Identifier: Apache-2.0
"""Fake pods: each pod of a fake node gets an admin port (fake_admin_api.py) at its own address.

Tests script the status that a pod reports. Like a real pod it starts with the catalog of its ConfigMap and the key of
its Secret.
"""

import base64
import json
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from support.fake_admin_api import FakeAdminServers, FakePod
from support.fake_kubelet import FailedMount, FakeKubelet

from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.download_progress import DownloadProgress
from quire_spec.documents.pod_config import PodConfig

Manifest = dict[str, Any]
_COMPONENT_LABEL = "app.kubernetes.io/component"


@dataclass
class RunningPod:
    """A pod and the fake behind its port."""

    pod: Manifest
    fake_pod: FakePod
    host: str
    port: int
    pushed_catalogs: list[AdapterCatalog] = field(default_factory=list)


class FakePods:
    """All serving pods of one node. A context manager."""

    def __init__(
        self,
        kubelet: FakeKubelet,
        pod_options: Callable[[Manifest], Mapping[str, Any]] = lambda pod: {},
        progress: DownloadProgress | None = None,
        pod_class: type[FakePod] = FakePod,
    ) -> None:
        """Set the script of pods that start from now on: `script(pod)` returns the arguments of the fake pod. Download
        pods report `progress`, or nothing."""
        self.pod_options, self._download_progress, self._pod_class = pod_options, progress, pod_class
        self._kubelet = kubelet
        self._ports = FakeAdminServers()
        self._running_by_uid: dict[str, RunningPod] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._keys = tempfile.TemporaryDirectory(prefix="quire-fleet-")
        self._ports.__enter__()
        self._kubelet.set_hooks(self._on_pod_start, self._probe_readiness, self._on_pod_end)
        return self

    def __exit__(self, *_: object) -> None:
        self._kubelet.set_hooks()
        self._ports.__exit__()
        self._keys.cleanup()

    def running_in(self, namespace: str) -> list[RunningPod]:
        """Return the running pods of a namespace, by name."""
        with self._lock:
            running = [
                entry for entry in self._running_by_uid.values() if entry.pod["metadata"]["namespace"] == namespace
            ]
        return sorted(running, key=lambda member: str(member.pod["metadata"]["name"]))

    def _on_pod_start(self, pod: Manifest, address: str) -> None:
        metadata = pod["metadata"]
        component = metadata.get("labels", {}).get(_COMPONENT_LABEL)
        if component == "model-download" and self._download_progress:
            self._ports.open_download(self._download_progress, address, _health_port(pod))
        if component != "server":
            return
        catalog = self._mounted_catalog(pod)
        with self._lock:
            running = self._running_by_uid.get(metadata["uid"])
        if running is not None:
            running.fake_pod.restart(catalog)
            return
        port = _health_port(pod)
        fake_pod = self._pod_class(
            **{"served_name": self._served_name(pod), "catalog": catalog, **self.pod_options(pod)}
        )
        self._ports.open(fake_pod, address, self._key_file(pod), port)
        with self._lock:
            self._running_by_uid[metadata["uid"]] = RunningPod(pod, fake_pod, address, port)

    def _probe_readiness(self, pod: Manifest) -> bool:
        with self._lock:
            running = self._running_by_uid.get(pod["metadata"]["uid"])
        return running is None or not running.fake_pod.unready_reason

    def _on_pod_end(self, pod: Manifest) -> None:
        with self._lock:
            running = self._running_by_uid.pop(pod["metadata"]["uid"], None)
        if running is not None:
            running.fake_pod.hangs = False
            self._ports.close(running.host, running.port)

    def _served_name(self, pod: Manifest) -> str:
        """Return the name that the arguments set, as before pod.json, or that pod.json sets."""
        for argument in pod["spec"]["containers"][0]["args"]:
            if argument.startswith("--served-name="):
                return str(argument.partition("=")[2])
        (name,) = [v["configMap"]["name"] for v in pod["spec"]["volumes"] if v["name"] == "engine"]
        document = self._mounted_object(pod, "ConfigMap", name)["data"]["pod.json"]
        return PodConfig.from_json(json.loads(document)).servedName

    def _mounted_catalog(self, pod: Manifest) -> AdapterCatalog:
        config_map = self._mounted_object(pod, "ConfigMap", f"{_instance(pod)}-adapters")
        return AdapterCatalog.from_json(json.loads(config_map["data"]["adapters.json"]))

    def _key_file(self, pod: Manifest) -> Path:
        secret = self._mounted_object(pod, "Secret", f"{_instance(pod)}-admin").get("data") or {}
        if "key" not in secret:
            raise FailedMount("the Secret that the pod mounts has no key")
        file = Path(self._keys.name) / str(pod["metadata"]["uid"])
        partial = file.with_suffix(".new")
        partial.write_bytes(base64.b64decode(secret["key"]))
        return partial.replace(file)

    def _mounted_object(self, pod: Manifest, kind: str, name: str) -> Manifest:
        manifest = self._kubelet.cluster.get("v1", kind, name, pod["metadata"]["namespace"])
        if manifest is None:
            raise FailedMount(f"the pod mounts {kind} {name}, and there is none")
        return manifest


def _health_port(pod: Manifest) -> int:
    (port,) = [p["containerPort"] for c in pod["spec"]["containers"] for p in c["ports"] if p["name"] == "health"]
    return int(port)


def _instance(pod: Manifest) -> str:
    return str(pod["metadata"]["labels"]["app.kubernetes.io/instance"])
