# SPDX-License-Identifier: Apache-2.0
"""Azurite, the emulator of Azure Storage, from npm. Tests read blobs from it."""

import shutil
import subprocess
import tempfile
from pathlib import Path

from nodocker_cluster import binaries
from nodocker_cluster.binaries import ProgressCallback, Unavailable

VERSION = "3.37.0"
_NEEDED_BYTES = 2**29
_INSTALL_TIMEOUT_S = 600


def folder() -> Path:
    """Return the folder in the cache that contains Azurite after it is installed."""
    return binaries.cache_folder() / f"azurite-{VERSION}"


def program() -> Path:
    """Return the path of the program azurite-blob."""
    return folder() / "node_modules/.bin/azurite-blob"


def find_or_install(report_progress: ProgressCallback) -> Path:
    """Return Azurite's folder. The first call installs it (30 s).

    Raises:
        Unavailable: npm is missing, or the download failed.
    """
    if folder().exists():
        return folder()
    npm = shutil.which("npm")
    if npm is None:
        raise Unavailable("Azurite: npm is not installed; install Node.js 20 or later")
    with tempfile.TemporaryDirectory(dir=binaries.make_cache_folder(), prefix="partial-") as temporary:
        out = Path(temporary) / "out"
        out.mkdir()
        binaries.require_space(out, _NEEDED_BYTES, "installing Azurite")
        report_progress(f"installing Azurite {VERSION} with npm")
        flags = [f"--prefix={out}", "--no-audit", "--no-fund", "--ignore-scripts"]
        command = [npm, "install", *flags, f"azurite@{VERSION}"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"Azurite: npm failed: {error.stderr.strip()[-500:]}") from error
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"Azurite: npm did not finish in {_INSTALL_TIMEOUT_S} s") from error
        binaries.publish_to_cache(out, folder().name)
    return folder()
