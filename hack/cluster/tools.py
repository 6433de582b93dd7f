# SPDX-License-Identifier: Apache-2.0
"""Where the programs of Kubernetes are on this machine, and how they get there. `find` looks, `make` makes.

    KUBEBUILDER_ASSETS   a folder with etcd and kube-apiserver at least
    the cache            $QUIRE_CLUSTER_CACHE, by default ~/.cache/quire/cluster; one folder a version
    release.py           an official release, where it can be reached
    debian.py            a build from Debian's own source package
    definitions.py       beside that one, which is old: a current Kubernetes' API server of definitions

A cluster that exists already needs none of them: QUIRE_TEST_KUBECONFIG names its kubeconfig for the tests.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
NODE = ("kubelet", "kube-proxy")
ALL = (*CONTROL_PLANE, *NODE, "kubectl")
_LEAST = ("etcd", "kube-apiserver")

Say = Callable[[str], None]


class Unavailable(Exception):
    """A source cannot give the programs here; the message says why and what would help."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The programs of one version of Kubernetes."""

    folder: Path
    version: tuple[int, int, int]
    """Of kube-apiserver."""

    def has(self, *names: str) -> bool:
        """Whether these programs are there."""
        return all((self.folder / name).exists() for name in names)

    def path(self, name: str) -> str:
        """The program; kubectl may be the machine's own."""
        if self.has(name):
            return str(self.folder / name)
        if name == "kubectl" and (found := shutil.which(name)):
            return found
        raise Unavailable(f"{self.folder} has no {name}; run make cluster-tools without KUBEBUILDER_ASSETS")

    def __str__(self) -> str:
        lacking = [name for name in ALL if not self.has(name)]
        return f"Kubernetes {'.'.join(map(str, self.version))} in {self.folder}" + (
            f" (without {', '.join(lacking)})" if lacking else ""
        )


def cache() -> Path:
    """Folder of what was downloaded or built."""
    return Path(os.environ.get("QUIRE_CLUSTER_CACHE") or Path.home() / ".cache/quire/cluster").resolve()


def find() -> Tools | None:
    """The programs that are there already: those of KUBEBUILDER_ASSETS, or the newest in the cache."""
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        folder = Path(assets).resolve()
        if not all((folder / name).exists() for name in _LEAST):
            raise Unavailable(f"KUBEBUILDER_ASSETS is {assets}, and {' or '.join(_LEAST)} is not in it")
        return Tools(folder, _asked_version(folder))
    kept = [Tools(f, version(f.name)) for f in cache().glob("v*") if all((f / name).exists() for name in _LEAST)]
    return max(kept, key=lambda tools: tools.version, default=None)


def make(say: Say) -> Tools:
    """The programs that are there, or else the first that a source gives.

    Raises:
        Unavailable: no source can; the message has each one's reason.
    """
    from cluster import debian, release

    if found := find():
        return found
    cache().mkdir(parents=True, exist_ok=True)
    reasons = []
    for source in (release.download, debian.build):
        try:
            source(cache(), say)
            break
        except Unavailable as error:
            reasons.append(str(error))
            say(f"no: {error}")
    if found := find():
        return found
    raise Unavailable("\n  - ".join(["there is no way here to get Kubernetes' programs", *reasons]))


def install(programs: Mapping[str, str], say: Say) -> None:
    """Install the Debian packages of those programs (program: package) that are not there.

    Raises:
        Unavailable: they cannot be installed here; the message names them.
    """
    missing = _packages(programs)
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Unavailable(f"missing: {', '.join(missing)}; install these packages of Debian, or run this as root there")
    say(f"installing {', '.join(missing)}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "-qq", "update"], env=quiet, check=False)
    command = ["apt-get", "-qq", "install", "--yes", "--no-install-recommends", *missing]
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
    if left := _packages(programs):
        raise Unavailable(f"apt-get could not install {', '.join(left)}: {done.stderr[-500:]}")


def _packages(programs: Mapping[str, str]) -> list[str]:
    return sorted({package for program, package in programs.items() if shutil.which(program) is None})


def keep(work: Path, name: str) -> None:
    """Move a finished folder into the cache under its version; a half-made one is never seen there."""
    target = cache() / name
    shutil.rmtree(target, ignore_errors=True)
    work.rename(target)


def _asked_version(folder: Path) -> tuple[int, int, int]:
    said = subprocess.run([folder / "kube-apiserver", "--version"], capture_output=True, text=True, check=True).stdout
    return version(said)


def version(text: str) -> tuple[int, int, int]:
    match = re.search(r"v(\d+)\.(\d+)\.(\d+)", text)
    if not match:
        raise Unavailable(f"{text!r} names no version")
    major, minor, patch = map(int, match.groups())
    return major, minor, patch
