# SPDX-License-Identifier: Apache-2.0
"""Downloads programs (Kubernetes, etcd and Helm) from their official releases, and compares each file with its
published digest."""

import hashlib
import os
import platform
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

from nodocker_cluster import binaries

KUBERNETES_URL = os.environ.get("QUIRE_KUBERNETES_RELEASES", "https://dl.k8s.io/release")
ETCD_URL = os.environ.get("QUIRE_ETCD_RELEASES", "https://github.com/etcd-io/etcd/releases/download")
HELM_URL = os.environ.get("QUIRE_HELM_RELEASES", "https://get.helm.sh")
"""URLs of the releases. Environment variables can replace them by those of mirrors that have the same folders."""
ETCD_VERSION = "v3.6.8"
CONNECT_TIMEOUT_S = 5.0
"""Timeout in seconds for opening a connection. It is short, so that the download fails early on a machine without
internet access."""
_READ_TIMEOUT_S = 60.0
_PROGRAMS = [name for name in binaries.ALL_PROGRAMS if name != "etcd"]
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def download_kubernetes(cache: Path, version: str, report_progress: binaries.ProgressCallback) -> None:
    """Fill CACHE/VERSION with Kubernetes and etcd.

    Raises:
        Unavailable: the release cannot be reached, or a file does not match its digest.
    """
    machine = _machine()
    report_progress(f"downloading the official release {version} ({KUBERNETES_URL})")
    with tempfile.TemporaryDirectory(dir=cache, prefix="partial-") as temporary:
        out = Path(temporary) / "out"
        out.mkdir()
        for name in _PROGRAMS:
            url = f"{KUBERNETES_URL}/{version}/bin/linux/{machine}/{name}"
            # This timeout is short, so that the download fails early on a machine without internet access.
            digest = _fetch(f"{url}.sha256", CONNECT_TIMEOUT_S).decode().split()[0]
            report_progress(f"downloading {name} {version}")
            _download_file(url, out / name, digest)
        _download_etcd(out, machine, report_progress)
        binaries.publish_to_cache(out, version)


def download_helm(out: Path, version: str, report_progress: binaries.ProgressCallback) -> None:
    """Download Helm into the folder `out`.

    Raises:
        Unavailable: the release cannot be reached, or the file does not match its digest.
    """
    machine = _machine()
    report_progress(f"downloading Helm {version} ({HELM_URL})")
    url = f"{HELM_URL}/helm-{version}-linux-{machine}.tar.gz"
    digest = _fetch(f"{url}.sha256sum", CONNECT_TIMEOUT_S).decode().split()[0]
    _download_member(url, digest, f"linux-{machine}/helm", out)


def _machine() -> str:
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise binaries.Unavailable(f"official release: there is none for {platform.machine()}")
    return machine


def _download_etcd(out: Path, machine: str, report_progress: binaries.ProgressCallback) -> None:
    report_progress(f"downloading etcd {ETCD_VERSION}")
    folder = f"etcd-{ETCD_VERSION}-linux-{machine}"
    digests = dict(
        reversed(line.split()) for line in _fetch(f"{ETCD_URL}/{ETCD_VERSION}/SHA256SUMS").decode().splitlines()
    )
    name = f"{folder}.tar.gz"
    _download_member(f"{ETCD_URL}/{ETCD_VERSION}/{name}", digests[name], f"{folder}/etcd", out)


def _download_member(url: str, digest: str, member: str, out: Path) -> None:
    """Download an archive, and extract one program from it to the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    archive, program = out / "archive.tar.gz", out / Path(member).name
    _download_file(url, archive, digest)
    with tarfile.open(archive) as tar, program.open("wb") as file:
        content = tar.extractfile(member)
        if content is None:
            raise binaries.Unavailable(f"official release: no {member} in {url}")
        shutil.copyfileobj(content, file)
    program.chmod(0o755)
    archive.unlink()


def _download_file(url: str, file: Path, digest: str) -> None:
    """Download a program and check its digest."""
    actual = hashlib.sha256()
    try:
        with urllib.request.urlopen(url, timeout=_READ_TIMEOUT_S) as response, file.open("wb") as out:
            while chunk := response.read(2**20):
                actual.update(chunk)
                out.write(chunk)
    except (OSError, HTTPException) as error:
        raise binaries.Unavailable(f"official release: {url}: {error}") from error
    if actual.hexdigest() != digest:
        raise binaries.Unavailable(
            f"official release: {url}: its SHA-256 is {actual.hexdigest()}, but {digest} is published"
        )
    file.chmod(0o755)


def _fetch(url: str, timeout: float = _READ_TIMEOUT_S) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            return bytes(response.read())
    except (OSError, HTTPException) as error:
        raise binaries.Unavailable(f"official release: {url}: {error}") from error
