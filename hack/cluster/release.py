# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' programs from its official release, and etcd from its own, each checked against its published digest."""

import hashlib
import os
import platform
import shutil
import tarfile
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

from cluster import tools

KUBERNETES = os.environ.get("QUIRE_KUBERNETES_RELEASES", "https://dl.k8s.io/release")
ETCD = os.environ.get("QUIRE_ETCD_RELEASES", "https://github.com/etcd-io/etcd/releases/download")
"""Mirrors may stand in for both; the folders below them are the same."""
MINOR = "1.36"
"""What the operator is written for. Its newest patch is taken."""
ETCD_VERSION = "v3.6.5"
CONNECT_S = 5.0
"""A machine without this network loses seconds here, not minutes."""
_READ_S = 60.0
_PROGRAMS = [name for name in tools.ALL if name != "etcd"]
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def download(cache: Path, say: tools.Say) -> None:
    """Fill CACHE/vVERSION.

    Raises:
        Unavailable: the network does not reach it, or a file is not what its digest says.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise tools.Unavailable(f"official release: none for {platform.machine()}")
    say(f"asking for the official release {MINOR} ({KUBERNETES})")
    version = _read(f"{KUBERNETES}/stable-{MINOR}.txt", CONNECT_S).decode().strip()
    work = cache / f"partial-{version}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        for name in _PROGRAMS:
            url = f"{KUBERNETES}/{version}/bin/linux/{machine}/{name}"
            say(f"downloading {name} {version}")
            _save(url, work / name, _read(f"{url}.sha256").decode().split()[0])
        _etcd(work, machine, say)
        tools.keep(work, version)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _etcd(work: Path, machine: str, say: tools.Say) -> None:
    say(f"downloading etcd {ETCD_VERSION}")
    folder = f"etcd-{ETCD_VERSION}-linux-{machine}"
    sums = dict(reversed(line.split()) for line in _read(f"{ETCD}/{ETCD_VERSION}/SHA256SUMS").decode().splitlines())
    archive = work / f"{folder}.tar.gz"
    _save(f"{ETCD}/{ETCD_VERSION}/{archive.name}", archive, sums[archive.name])
    with tarfile.open(archive) as tar, (work / "etcd").open("wb") as out:
        member = tar.extractfile(f"{folder}/etcd")
        if member is None:
            raise tools.Unavailable(f"official release: no etcd in {archive.name}")
        shutil.copyfileobj(member, out)
    (work / "etcd").chmod(0o755)
    archive.unlink()


def _save(url: str, file: Path, digest: str) -> None:
    """Download a program and check it."""
    found = hashlib.sha256()
    try:
        with urllib.request.urlopen(url, timeout=_READ_S) as response, file.open("wb") as out:
            while chunk := response.read(2**20):
                found.update(chunk)
                out.write(chunk)
    except (OSError, HTTPException) as error:
        raise tools.Unavailable(f"official release: {url}: {error}") from error
    if found.hexdigest() != digest:
        raise tools.Unavailable(f"official release: {url}: its SHA-256 is {found.hexdigest()}, published is {digest}")
    file.chmod(0o755)


def _read(url: str, timeout: float = _READ_S) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            return bytes(response.read())
    except (OSError, HTTPException) as error:
        raise tools.Unavailable(f"official release: {url}: {error}") from error
