# SPDX-License-Identifier: Apache-2.0
"""Builds the programs of Kubernetes and etcd from Go modules.

The module go/kubernetes pins one version. For another version, this module writes a go.mod of its own. A build takes 6
minutes on two idle cores, and downloads 0.5 GB.
"""

import json
import re
import tempfile
from pathlib import Path

from nodocker_cluster import binaries
from nodocker_cluster.binaries import ProgressCallback
from nodocker_cluster.go_module import MODULES, GoModule

_PINNED = GoModule(MODULES / "kubernetes")
NEEDED_BYTES = 6 * 2**30
"""Space for the sources, the compiled packages and the programs."""
_KUBERNETES = "k8s.io/kubernetes"
_ETCD_EXECUTABLE = "server"
"""The name that Go gives to etcd, after its import path go.etcd.io/etcd/server/v3."""


def pinned_version() -> str:
    """Return the version that go/kubernetes/go.mod pins, with which Quire is tested."""
    return _PINNED.version(_KUBERNETES)


def build(cache: Path, version: str, report_progress: ProgressCallback) -> None:
    """Fill CACHE/vVERSION.

    Raises:
        Unavailable: Go is missing, a download failed, or there is too little space.
    """
    with tempfile.TemporaryDirectory(dir=cache, prefix="partial-") as temporary:
        work = Path(temporary)
        binaries.require_space(work, NEEDED_BYTES, "building Kubernetes")
        module = _PINNED if version == pinned_version() else _write_module(work / "kubernetes", version)
        out = work / "out"
        module.build(out, _version_variables(version), report_progress)
        (out / _ETCD_EXECUTABLE).rename(out / "etcd")
        binaries.publish_to_cache(out, version)


def _version_variables(version: str) -> dict[str, str]:
    """Return the variables with the version that the programs report. Without them, clients would read v0.0.0."""
    _, minor, _ = version.split(".")
    package = "k8s.io/component-base/version"
    return {f"{package}.gitVersion": version, f"{package}.gitMajor": "1", f"{package}.gitMinor": minor}


def _write_module(folder: Path, version: str) -> GoModule:
    """Write the module for another version.

    The published module of Kubernetes lacks its staging folder. Its go.mod replaces the libraries in k8s.io by parts of
    this folder, and they are published as modules of their own.
    """
    folder.mkdir()
    described = json.loads(_PINNED.go("mod", "download", "-json", f"{_KUBERNETES}@{version}"))
    published = Path(described["GoMod"]).read_text()
    go_line = re.search(r"^go .*$", published, re.MULTILINE)
    libraries = re.findall(r"^\s*(?:replace )?(k8s\.io/\S+) => \./staging/", published, re.MULTILINE)
    tools = re.search(r"^tool \(.*?^\)$", _PINNED.text, re.MULTILINE | re.DOTALL)
    assert go_line is not None and tools is not None, "every go.mod of Kubernetes has these lines"
    library_version = version.replace("v1.", "v0.", 1)
    lines = [f"module {folder.name}", go_line[0], f"require {_KUBERNETES} {version}", tools[0]]
    lines += [f"replace {library} => {library} {library_version}" for library in libraries]
    (folder / "go.mod").write_text("\n".join(lines) + "\n")
    module = GoModule(folder)
    module.go("mod", "tidy")
    return module
