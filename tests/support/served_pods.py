# SPDX-License-Identifier: Apache-2.0
"""Real servers on a node without a kubelet: each server pod of a service is a `quire serve` at the pod's address."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from support.controller_harness import COMPONENT_LABEL
from support.fake_kubelet import FailedMount, FakeKubelet
from support.quire_serve import EXAMPLES, QuireServeProcess

Manifest = dict[str, Any]


class ServedPods:
    """The server pods of one service. A context manager."""

    def __init__(self, kubelet: FakeKubelet, document: Manifest, folder: Path, claim: Path = EXAMPLES) -> None:
        """`document` is the service. Its claim `models` is the folder `claim`."""
        self._kubelet, self._document, self._folder, self._claim = kubelet, document, folder, claim
        self._servers: dict[str, QuireServeProcess] = {}
        """By address."""

    def __enter__(self) -> Self:
        self._kubelet.set_hooks(self._start, self._is_ready, self._end)
        return self

    def __exit__(self, *_: object) -> None:
        self._kubelet.set_hooks()
        for server in self._servers.values():
            if server.process.poll() is None:
                server.child_processes()
                server.process.terminate()
        for server in self._servers.values():
            server.stop()

    @property
    def running(self) -> Mapping[str, QuireServeProcess]:
        """The running servers by address, in the order in which they were started."""
        return {address: server for address, server in self._servers.items() if server.process.poll() is None}

    def pid(self, server: QuireServeProcess, name: str) -> int:
        """Return the process id of a core or of the text process of a pod."""
        return server.pid(name, (server.folder / "admin.key").read_text())

    def _start(self, pod: Manifest, address: str) -> None:
        if not self._is_server(pod) or address in self.running:
            return
        meta = pod["metadata"]
        secret = self._kubelet.cluster.get(
            "v1", "Secret", f"{self._document['metadata']['name']}-admin", meta["namespace"]
        )
        if "key" not in ((secret or {}).get("data") or {}):
            raise FailedMount("the Secret that the pod mounts has no key")
        folder = self._folder / meta["name"]
        folder.mkdir(exist_ok=True)
        key = folder / "admin.key"
        key.write_bytes(base64.b64decode(secret["data"]["key"]))
        key.chmod(0o600)
        ports = {p["name"]: p["containerPort"] for c in pod["spec"]["containers"] for p in c["ports"]}
        flags = f"--admin-key-file={key}", f"--volume=models={self._claim}"
        self._servers[address] = QuireServeProcess(self._document, folder, *flags, host=address, ports=ports)

    def _is_ready(self, pod: Manifest) -> bool:
        server = self._servers.get(pod.get("status", {}).get("podIP", ""))
        return not self._is_server(pod) or (
            server is not None and server.request("health", "/health/ready", timeout=1).status == 200
        )

    def _end(self, pod: Manifest) -> None:
        if (server := self._servers.get(pod["status"].get("podIP", ""))) is not None:
            server.child_processes()
            server.process.terminate()

    def _is_server(self, pod: Manifest) -> bool:
        labels = pod["metadata"].get("labels", {})
        return (labels.get("app.kubernetes.io/instance"), labels.get(COMPONENT_LABEL)) == (
            self._document["metadata"]["name"],
            "server",
        )
