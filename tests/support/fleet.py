# SPDX-License-Identifier: Apache-2.0
"""Pods that answer: each pod of a node without a kubelet gets an admin port (admin_port.py) at its own address.

What is scripted is what a pod says of itself. As a real one it begins from the catalogue of its ConfigMap, and has
the key of its Secret.
"""

import base64
import json
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from support.admin_port import AdminPorts, ScriptedPod
from support.kubelet import Kubelet, NotMounted

from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.download_progress import DownloadProgress

Manifest = dict[str, Any]
_COMPONENT = "app.kubernetes.io/component"


@dataclass
class Member:
    """A pod and what is behind its port."""

    pod: Manifest
    script: ScriptedPod
    host: str
    port: int
    told: list[AdapterCatalog] = field(default_factory=list)


class Fleet:
    """All pods that serve on one node. A context manager."""

    def __init__(
        self,
        kubelet: Kubelet,
        script: Callable[[Manifest], Mapping[str, Any]] = lambda pod: {},
        progress: DownloadProgress | None = None,
        make: type[ScriptedPod] = ScriptedPod,
    ) -> None:
        """`script(pod)` gives what `make` is called with, for pods that start from now on; pods that download a
        model say that they are as far as `progress`, or nothing."""
        self.script, self._progress, self._make = script, progress, make
        self._kubelet = kubelet
        self._ports = AdminPorts()
        self._members: dict[str, Member] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._keys = tempfile.TemporaryDirectory(prefix="quire-fleet-")
        self._ports.__enter__()
        self._kubelet.on_start, self._kubelet.probe, self._kubelet.on_end = self._start, self._probe, self._end
        return self

    def __exit__(self, *_: object) -> None:
        self._kubelet.on_start, self._kubelet.on_end = (lambda pod, address: None), (lambda pod: None)
        self._kubelet.probe = lambda pod: True
        self._ports.__exit__()
        self._keys.cleanup()

    def of(self, namespace: str) -> list[Member]:
        """The pods of a namespace that run, by name."""
        with self._lock:
            found = [m for m in self._members.values() if m.pod["metadata"]["namespace"] == namespace]
        return sorted(found, key=lambda member: str(member.pod["metadata"]["name"]))

    def _start(self, pod: Manifest, address: str) -> None:
        meta = pod["metadata"]
        component = meta.get("labels", {}).get(_COMPONENT)
        if component == "model-download" and self._progress:
            self._ports.open_download(self._progress, address, _health_port(pod))
        if component != "server":
            return
        catalogue = self._catalogue(pod)
        with self._lock:
            known = self._members.get(meta["uid"])
        if known is not None:
            known.script.restart(catalogue)
            return
        port = _health_port(pod)
        (name,) = [a.partition("=")[2] for a in pod["spec"]["containers"][0]["args"] if a.startswith("--served-name=")]
        script = self._make(**{"served_name": name, "catalogue": catalogue, **self.script(pod)})
        self._ports.open(script, address, self._key_file(pod), port)
        with self._lock:
            self._members[meta["uid"]] = Member(pod, script, address, port)

    def _probe(self, pod: Manifest) -> bool:
        with self._lock:
            member = self._members.get(pod["metadata"]["uid"])
        return member is None or not member.script.reason_

    def _end(self, pod: Manifest) -> None:
        with self._lock:
            member = self._members.pop(pod["metadata"]["uid"], None)
        if member is not None:
            member.script.hangs = False
            self._ports.close(member.host, member.port)

    def _catalogue(self, pod: Manifest) -> AdapterCatalog:
        found = self._object(pod, "ConfigMap", f"{_instance(pod)}-adapters")
        return AdapterCatalog.from_json(json.loads(found["data"]["adapters.json"]))

    def _key_file(self, pod: Manifest) -> Path:
        secret = self._object(pod, "Secret", f"{_instance(pod)}-admin").get("data") or {}
        if "key" not in secret:
            raise NotMounted("the Secret that the pod mounts has no key")
        file = Path(self._keys.name) / str(pod["metadata"]["uid"])
        new = file.with_suffix(".new")
        new.write_bytes(base64.b64decode(secret["key"]))
        return new.replace(file)

    def _object(self, pod: Manifest, kind: str, name: str) -> Manifest:
        found = self._kubelet.cluster.get("v1", kind, name, pod["metadata"]["namespace"])
        if found is None:
            raise NotMounted(f"the pod mounts {kind} {name}, and there is none")
        return found


def _health_port(pod: Manifest) -> int:
    (port,) = [p["containerPort"] for c in pod["spec"]["containers"] for p in c["ports"] if p["name"] == "health"]
    return int(port)


def _instance(pod: Manifest) -> str:
    return str(pod["metadata"]["labels"]["app.kubernetes.io/instance"])
