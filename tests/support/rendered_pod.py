# SPDX-License-Identifier: Apache-2.0
"""A rendered pod without a kubelet: its arguments, files and folders are laid out as a kubelet does."""

import base64
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from support.quire_serve import EXAMPLES, QuireServeProcess

Manifest = dict[str, Any]


class RenderedPod(QuireServeProcess):
    """The container `server` of a Deployment as a local process, with its volumes as folders below `folder`."""

    def __init__(
        self, manifests: Iterable[Manifest], folder: Path, ports: dict[str, int], python: str | Path = sys.executable
    ) -> None:
        """`python` is the interpreter of an environment with the release whose image the pod has."""
        manifests = list(manifests)
        self.folder, self.ports, self.seen_processes = folder, ports, set()
        self.log = folder / "pod.log"
        data = {m["metadata"]["name"]: _content(m) for m in manifests if m["kind"] in ("ConfigMap", "Secret")}
        (template,) = [m["spec"]["template"]["spec"] for m in manifests if m["kind"] == "Deployment"]
        (self.container,) = template["containers"]
        volumes = {volume["name"]: volume for volume in template["volumes"]}
        self.mounts = {}
        for mount in self.container["volumeMounts"]:
            self.mounts[mount["mountPath"]] = self._volume(volumes[mount["name"]], data)
        for name in ("engine", "catalogue"):
            for file in (folder / name).iterdir():
                file.write_text(self.local(file.read_text()))
        command = [str(python), "-m", "quire_server", *map(self.local, self.container["args"])]
        home = str(self.mounts["/var/lib/quire"])
        environment = {"PATH": os.environ["PATH"], "HOME": home, "OMP_NUM_THREADS": "1"}
        # An image has compiled kernels, too.
        environment["QUIRE_NATIVE_CACHE"] = os.environ.get(
            "QUIRE_NATIVE_CACHE", str(Path("~/.cache/quire").expanduser())
        )
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=home, start_new_session=True
            )

    def local(self, text: str) -> str:
        """Return the text with the pod's mount paths replaced by local folders."""
        for path in sorted(self.mounts, key=len, reverse=True):
            if path != "/tmp":
                text = text.replace(path, str(self.mounts[path]))
        return text

    def _volume(self, volume: Manifest, data: Mapping[str, Mapping[str, str]]) -> Path:
        if "persistentVolumeClaim" in volume:
            return EXAMPLES
        if volume["name"] == "shm":
            return Path("/dev/shm")
        path = self.folder / volume["name"]
        path.mkdir()
        source = volume.get("configMap", {}).get("name") or volume.get("secret", {}).get("secretName")
        for name, text in data.get(source, {}).items():
            (path / name).write_text(text)
        return path


def _content(manifest: Manifest) -> dict[str, str]:
    if manifest["kind"] == "Secret":
        return {name: base64.b64decode(value).decode() for name, value in manifest["data"].items()}
    return dict(manifest["data"])
