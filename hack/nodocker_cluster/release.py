# SPDX-License-Identifier: Apache-2.0
"""Downloads Kubernetes' programs and etcd from their official releases, and compares each file with its published
digest."""

import hashlib
import os
import platform
import shutil
import tarfile
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

from nodocker_cluster import binaries

KUBERNETES_URL = os.environ.get("QUIRE_KUBERNETES_RELEASES", "https://dl.k8s.io/release")
ETCD_URL = os.environ.get("QUIRE_ETCD_RELEASES", "https://github.com/etcd-io/etcd/releases/download")
"""URLs of the releases of Kubernetes and etcd. Environment variables can replace both URLs by those of mirrors that
have the same folders."""
MINOR_VERSION = "1.36"
"""The Kubernetes version for which the operator is written. Its newest patch release is downloaded."""
ETCD_VERSION = "v3.6.5"
CONNECT_TIMEOUT_S = 5.0
"""Timeout in seconds for opening a connection. It is short, so that the download fails early on a machine without
internet access."""
_READ_TIMEOUT_S = 60.0
_PROGRAMS = [name for name in binaries.ALL_PROGRAMS if name != "etcd"]
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def download(cache: Path, report_progress: binaries.ProgressCallback) -> None:
    """Fill CACHE/vVERSION.

    Raises:
        Unavailable: the release cannot be reached, or a file does not match its digest.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise binaries.Unavailable(f"official release: there is none for {platform.machine()}")
    report_progress(f"asking for the official release {MINOR_VERSION} ({KUBERNETES_URL})")
    version = _fetch(f"{KUBERNETES_URL}/stable-{MINOR_VERSION}.txt", CONNECT_TIMEOUT_S).decode().strip()
    work = cache / f"partial-{version}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        for name in _PROGRAMS:
            url = f"{KUBERNETES_URL}/{version}/bin/linux/{machine}/{name}"
            report_progress(f"downloading {name} {version}")
            _download_file(url, work / name, _fetch(f"{url}.sha256").decode().split()[0])
        _download_etcd(work, machine, report_progress)
        binaries.publish_to_cache(work, version)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download_etcd(work: Path, machine: str, report_progress: binaries.ProgressCallback) -> None:
    report_progress(f"downloading etcd {ETCD_VERSION}")
    folder = f"etcd-{ETCD_VERSION}-linux-{machine}"
    digests = dict(
        reversed(line.split()) for line in _fetch(f"{ETCD_URL}/{ETCD_VERSION}/SHA256SUMS").decode().splitlines()
    )
    archive = work / f"{folder}.tar.gz"
    _download_file(f"{ETCD_URL}/{ETCD_VERSION}/{archive.name}", archive, digests[archive.name])
    with tarfile.open(archive) as tar, (work / "etcd").open("wb") as out:
        member = tar.extractfile(f"{folder}/etcd")
        if member is None:
            raise binaries.Unavailable(f"official release: no etcd in {archive.name}")
        shutil.copyfileobj(member, out)
    (work / "etcd").chmod(0o755)
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
