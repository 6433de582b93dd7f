# SPDX-License-Identifier: Apache-2.0
"""The programs of Kubernetes on this machine. `find` looks for them; `find_or_build` also downloads or builds them.

    KUBEBUILDER_ASSETS   a folder with etcd and kube-apiserver at least
    the cache            $QUIRE_CLUSTER_CACHE, by default ~/.cache/quire/cluster; one folder per version
    release.py           an official release, where it can be reached
    debian.py            a build from Debian's own source package
    crd_apiserver.py     in addition to that build, which is old: the CRD API server of a current Kubernetes

Tests on an existing cluster do not need these programs: QUIRE_TEST_KUBECONFIG names its kubeconfig.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

CONTROL_PLANE_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
NODE_PROGRAMS = ("kubelet", "kube-proxy")
ALL_PROGRAMS = (*CONTROL_PLANE_PROGRAMS, *NODE_PROGRAMS, "kubectl")
_REQUIRED_PROGRAMS = ("etcd", "kube-apiserver")

ProgressCallback = Callable[[str], None]


class Unavailable(Exception):
    """A source cannot provide the programs on this machine; the message contains the reason and the fix."""


@dataclass(frozen=True, slots=True)
class KubeBinaries:
    """The programs of one version of Kubernetes."""

    folder: Path
    version: tuple[int, int, int]
    """Version of kube-apiserver."""

    def has(self, *names: str) -> bool:
        """Return whether all these programs exist."""
        return all((self.folder / name).exists() for name in names)

    def path(self, name: str) -> str:
        """Return the path of a program. If the folder does not contain kubectl, the kubectl of this machine is used."""
        if self.has(name):
            return str(self.folder / name)
        if name == "kubectl" and (found := shutil.which(name)):
            return found
        raise Unavailable(f"{self.folder} has no {name}; run make cluster-tools without KUBEBUILDER_ASSETS")

    def __str__(self) -> str:
        missing = [name for name in ALL_PROGRAMS if not self.has(name)]
        return f"Kubernetes {'.'.join(map(str, self.version))} in {self.folder}" + (
            f" (without {', '.join(missing)})" if missing else ""
        )


def cache_folder() -> Path:
    """Return the folder that contains the programs that were downloaded or built."""
    return Path(os.environ.get("QUIRE_CLUSTER_CACHE") or Path.home() / ".cache/quire/cluster").resolve()


def find() -> KubeBinaries | None:
    """Return the programs in the folder KUBEBUILDER_ASSETS. If this variable is not set, return the newest programs in
    the cache, or None."""
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        folder = Path(assets).resolve()
        if not all((folder / name).exists() for name in _REQUIRED_PROGRAMS):
            raise Unavailable(
                f"KUBEBUILDER_ASSETS is {assets}, but this folder does not contain {' and '.join(_REQUIRED_PROGRAMS)}"
            )
        return KubeBinaries(folder, _binary_version(folder))
    cached = [
        KubeBinaries(version_folder, parse_version(version_folder.name))
        for version_folder in cache_folder().glob("v*")
        if all((version_folder / name).exists() for name in _REQUIRED_PROGRAMS)
    ]
    return max(cached, key=lambda tools: tools.version, default=None)


def find_or_build(report_progress: ProgressCallback) -> KubeBinaries:
    """Return the programs that are already on this machine. If there are none, get them from the first source that
    provides them.

    Raises:
        Unavailable: no source provides the programs; the message contains the reason of each source.
    """
    from nodocker_cluster import debian, release

    if programs := find():
        return programs
    cache_folder().mkdir(parents=True, exist_ok=True)
    reasons = []
    for source in (release.download, debian.build):
        try:
            source(cache_folder(), report_progress)
            break
        except Unavailable as error:
            reasons.append(str(error))
            report_progress(f"no: {error}")
    if programs := find():
        return programs
    raise Unavailable("\n  - ".join(["cannot get Kubernetes' programs on this machine", *reasons]))


def install_packages(programs: Mapping[str, str], report_progress: ProgressCallback) -> None:
    """Find out which programs are missing, and install their Debian packages. `programs` maps each program to its
    package.

    Raises:
        Unavailable: the packages cannot be installed on this machine; the message lists them.
    """
    missing = _packages(programs)
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Unavailable(
            f"Debian packages are missing: {', '.join(missing)}; install them, or run this command as root on Debian"
        )
    report_progress(f"installing {', '.join(missing)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "-qq", "update"], env=environment, check=False)
    command = ["apt-get", "-qq", "install", "--yes", "--no-install-recommends", *missing]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if remaining := _packages(programs):
        raise Unavailable(f"apt-get could not install {', '.join(remaining)}: {done.stderr[-500:]}")


def _packages(programs: Mapping[str, str]) -> list[str]:
    return sorted({package for program, package in programs.items() if shutil.which(program) is None})


def publish_to_cache(work: Path, name: str) -> None:
    """Move a complete folder into the cache and name it after its version. Thus, the cache never contains an incomplete
    folder."""
    target = cache_folder() / name
    shutil.rmtree(target, ignore_errors=True)
    work.rename(target)


def _binary_version(folder: Path) -> tuple[int, int, int]:
    output = subprocess.run([folder / "kube-apiserver", "--version"], capture_output=True, text=True, check=True).stdout
    return parse_version(output)


def parse_version(text: str) -> tuple[int, int, int]:
    match = re.search(r"v(\d+)\.(\d+)\.(\d+)", text)
    if not match:
        raise Unavailable(f"{text!r} does not contain a version")
    major, minor, patch = map(int, match.groups())
    return major, minor, patch
