# SPDX-License-Identifier: Apache-2.0
"""The programs of Kubernetes on this machine. `find` looks for them; `find_or_build` also downloads or builds them.

    KUBEBUILDER_ASSETS   a folder with etcd and kube-apiserver at least
    the cache            $QUIRE_CLUSTER_CACHE, by default ~/.cache/quire/cluster; one folder per version
    release.py           an official release, where it can be reached
    kubernetes_build.py  a build from Go modules

The version is that in go/kubernetes/go.mod, or QUIRE_KUBERNETES if it is set (make test-cluster KUBERNETES=v1.34.4).

Tests on an existing cluster do not need these programs: QUIRE_TEST_KUBECONFIG names its kubeconfig.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

CONTROL_PLANE_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
NODE_PROGRAMS = ("kubelet", "kube-proxy")
ALL_PROGRAMS = (*CONTROL_PLANE_PROGRAMS, *NODE_PROGRAMS, "kubectl")
_REQUIRED_PROGRAMS = ("etcd", "kube-apiserver")
VERSION_VARIABLE = "QUIRE_KUBERNETES"

ProgressCallback = Callable[[str], None]


class ClusterError(Exception):
    """A command of this package failed; the message contains the reason and, if there is one, the fix."""


class Unavailable(ClusterError):
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


def make_cache_folder() -> Path:
    """Return the cache folder, and create it if it does not exist."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    return cache_folder()


def wanted_version() -> str:
    """Return the version of Kubernetes to use, such as v1.36.3.

    Raises:
        Unavailable: QUIRE_KUBERNETES is not a version.
    """
    from nodocker_cluster.kubernetes_build import pinned_version

    given = os.environ.get(VERSION_VARIABLE)
    if not given:
        return pinned_version()
    if not re.fullmatch(r"v?\d+\.\d+\.\d+", given):
        raise Unavailable(f"{VERSION_VARIABLE} is {given!r}; use a version such as {pinned_version()}")
    return f"v{given.removeprefix('v')}"


def find() -> KubeBinaries | None:
    """Return the programs in the folder KUBEBUILDER_ASSETS. If this variable is not set, return the programs of the
    wanted version in the cache, or None."""
    version = wanted_version()
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        folder = Path(assets).resolve()
        if not all((folder / name).exists() for name in _REQUIRED_PROGRAMS):
            raise Unavailable(
                f"KUBEBUILDER_ASSETS is {assets}, but this folder does not contain {' and '.join(_REQUIRED_PROGRAMS)}"
            )
        found = KubeBinaries(folder, _binary_version(folder))
        if os.environ.get(VERSION_VARIABLE) and found.version != parse_version(version):
            raise Unavailable(f"{VERSION_VARIABLE} is {version}, but KUBEBUILDER_ASSETS has {found}; unset one of them")
        return found
    folder = cache_folder() / version
    if all((folder / name).exists() for name in _REQUIRED_PROGRAMS):
        return KubeBinaries(folder, parse_version(version))
    return None


def find_or_build(report_progress: ProgressCallback) -> KubeBinaries:
    """Return the programs that are already on this machine. If there are none, get them from the first source that
    provides them.

    Raises:
        Unavailable: no source provides the programs; the message contains the reason of each source.
    """
    from nodocker_cluster import kubernetes_build, release

    if programs := find():
        return programs
    version = wanted_version()
    first_available(
        f"Kubernetes {version}",
        [
            lambda: release.download_kubernetes(make_cache_folder(), version, report_progress),
            lambda: kubernetes_build.build(make_cache_folder(), version, report_progress),
        ],
        report_progress,
    )
    programs = find()
    assert programs is not None, "the sources fill the cache"
    return programs


def first_available(purpose: str, sources: Sequence[Callable[[], object]], report_progress: ProgressCallback) -> None:
    """Call the sources of a program in order, until one of them provides it.

    Raises:
        Unavailable: none does; the message contains the reason of each source.
    """
    reasons = []
    for source in sources:
        try:
            source()
            return
        except Unavailable as error:
            reasons.append(str(error))
            report_progress(f"no: {error}")
    raise Unavailable("\n  - ".join([f"cannot get {purpose} on this machine", *reasons]))


def require_space(folder: Path, num_bytes: int, purpose: str) -> None:
    """Check the free space before a long command. What `folder` contains already counts as free, because the command
    uses it or replaces it.

    Raises:
        Unavailable: there is less space than `num_bytes`.
    """
    owned = sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
    free = shutil.disk_usage(folder).free + owned
    if free < num_bytes:
        raise Unavailable(
            f"{folder}: {free / 2**30:.1f} GiB can be used there, but {purpose} needs {num_bytes / 2**30:.0f} GiB; "
            "free some space, or set QUIRE_CLUSTER_CACHE to a folder on another disk"
        )


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
