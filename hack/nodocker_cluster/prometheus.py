# SPDX-License-Identifier: Apache-2.0
"""Prometheus from its Debian package, which is unpacked into the cache. So no service starts."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from nodocker_cluster import binaries
from nodocker_cluster.binaries import ProgressCallback, Unavailable

_NAME = "prometheus-debian"


def find() -> Path | None:
    """Return the program if it was unpacked before."""
    program = binaries.cache_folder() / _NAME / "usr/bin/prometheus"
    return program if program.exists() else None


def find_or_unpack(report_progress: ProgressCallback) -> Path:
    """Return the program. The first call downloads 19 MB.

    Raises:
        Unavailable: this is not Debian, or the download failed.
    """
    if program := find():
        return program
    if shutil.which("apt-get") is None:
        raise Unavailable("Prometheus: this is not Debian with apt-get")
    report_progress("downloading Prometheus")
    if os.geteuid() == 0:
        subprocess.run(["apt-get", "-qq", "update"], check=False)
    with tempfile.TemporaryDirectory(dir=binaries.make_cache_folder(), prefix="partial-") as temporary:
        command = ["apt-get", "-qq", "download", "prometheus"]
        done = subprocess.run(command, cwd=temporary, capture_output=True, text=True, check=False)
        packages = [*Path(temporary).glob("prometheus_*.deb")]
        if not packages:
            raise Unavailable(f"Prometheus: apt-get cannot download it: {done.stderr.strip()[-500:]}")
        out = Path(temporary) / "out"
        subprocess.run(["dpkg-deb", "--extract", packages[0], out], check=True)
        binaries.publish_to_cache(out, _NAME)
    program = find()
    assert program is not None, "it was published"
    return program
