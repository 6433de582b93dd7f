# SPDX-License-Identifier: Apache-2.0
"""The `helm` program of this machine, or a build of Helm 4 from the Go module go/helm.

Tests and developers use it to lint, render and install the chart.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from nodocker_cluster import binaries, release
from nodocker_cluster.binaries import ProgressCallback
from nodocker_cluster.go_module import MODULES, GoModule

MIN_VERSION = (3, 14)
"""Older Helm programs are not used. The options of the tests exist in Helm 3.14 and in Helm 4."""
NEEDED_BYTES = 3 * 2**30
_MODULE = GoModule(MODULES / "helm")
_HELM = "helm.sh/helm/v4"


def pinned_version() -> str:
    """Return the version that go/helm/go.mod pins."""
    return _MODULE.version(_HELM)


def find() -> Path | None:
    """Return the program on PATH if it is not too old, or the program in the cache."""
    on_path = shutil.which("helm")
    if on_path and _version(on_path) >= MIN_VERSION:
        return Path(on_path)
    return _cached() if _cached().exists() else None


def find_or_build(report_progress: ProgressCallback) -> Path:
    """Return the program that is already on this machine, or download or build it (2 minutes on two idle cores).

    Raises:
        Unavailable: no source provides it; the message contains the reason of each source.
    """
    if program := find():
        return program
    version = pinned_version()
    with tempfile.TemporaryDirectory(dir=binaries.make_cache_folder(), prefix="partial-") as temporary:
        out = Path(temporary) / "out"
        binaries.first_available(
            f"Helm {version}",
            [lambda: release.download_helm(out, version, report_progress), lambda: _build(out, report_progress)],
            report_progress,
        )
        binaries.publish_to_cache(out, _cached().parent.name)
    return _cached()


def _build(out: Path, report_progress: ProgressCallback) -> None:
    binaries.require_space(out.parent, NEEDED_BYTES, "building Helm")
    _MODULE.build(out, {f"{_HELM}/internal/version.version": pinned_version()}, report_progress)


def _cached() -> Path:
    return binaries.cache_folder() / f"helm-{pinned_version()}" / "helm"


def _version(program: str) -> tuple[int, int]:
    command = [program, "version", "--template", "{{.Version}}"]
    output = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False).stdout
    match = re.match(r"v(\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2])) if match else (0, 0)
