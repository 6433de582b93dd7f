# SPDX-License-Identifier: Apache-2.0
"""Debian packages and the mirror that apt uses on this machine. Called by node.py and images.py."""

import os
import shutil
import subprocess
from collections.abc import Mapping

from nodocker_cluster.binaries import ProgressCallback, Unavailable

SUITE = "bookworm"
"""The suite of the base image. Its Python is that of the Dockerfiles' base image."""


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


def mirror() -> str:
    """Return the Debian mirror that apt uses on this machine. If apt has no package lists and the user is root, fetch
    them first.

    Raises:
        Unavailable: this is not Debian, or apt lists no mirror.
    """
    if shutil.which("apt-get") is None:
        raise Unavailable("this is not Debian with apt-get; on another machine with Docker, use hack/kind.sh")
    sites = _listed_mirrors()
    if not sites and os.geteuid() == 0:  # a new machine or container image has no lists
        subprocess.run(["apt-get", "-qq", "update"], check=False)
        sites = _listed_mirrors()
    if not sites:
        raise Unavailable("apt lists no Debian mirror; run apt-get update")
    return sites[0]


def _listed_mirrors() -> list[str]:
    command = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", "Origin: Debian"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
