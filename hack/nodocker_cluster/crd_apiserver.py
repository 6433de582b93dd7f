# SPDX-License-Identifier: Apache-2.0
"""Builds the part of Kubernetes that serves CRDs (apiextensions-apiserver) as a separate program.

The program is from a current version of Kubernetes. It serves CRDs and their objects. It runs in addition to the API
server of an old Kubernetes (debian.py). Tests use it to check the CEL rules of the CRD, the cost limits of these rules,
the handling of unknown fields, and field ownership. Debian's unstable suite contains packages of the Go libraries that
kubectl needs. They include this part of kube-apiserver, but not the other parts. The build downloads about 400 MB,
compiles for some minutes, and needs 5 GB of space.
"""

import re
import time
from pathlib import Path

from nodocker_cluster import binaries, deb_build
from nodocker_cluster.deb_build import DebBuild

PROGRAM = "apiextensions-apiserver"
SUITE = "unstable"
NEEDED_BYTES = 6 * 2**30
MIN_CURRENT_VERSION = (1, 25, 0)
"""kube-apiserver itself supports all features of the CRD if it has at least this version."""
_COMMANDS = {"apt-get": "apt", "dpkg": "dpkg"}
_LIBRARY = "golang-k8s-apiextensions-apiserver-dev"


def find() -> Path | None:
    """Return the newest version of the program in the cache."""
    cached = [
        folder / PROGRAM for folder in binaries.cache_folder().glob("definitions-v*") if (folder / PROGRAM).exists()
    ]
    return max(cached, key=lambda program: binaries.parse_version(program.parent.name), default=None)


def find_or_build(report_progress: binaries.ProgressCallback) -> Path:
    """Return the program from the cache, or build it.

    Raises:
        Unavailable: this is not Debian, a requirement is missing, or the build failed. After a failure, the build is
            not repeated until its log is removed.
    """
    if program := find():
        return program
    cache = binaries.cache_folder()
    log = cache / "definitions.log"
    if log.exists():
        raise binaries.Unavailable(f"the last build failed; read {log}, and remove this file before you build again")
    deb_build.check_requirements(cache, _COMMANDS, NEEDED_BYTES, report_progress)
    started = time.monotonic()
    builder = DebBuild(cache / "definitions", log, report_progress)
    report_progress(f"building a current CRD API server from Debian's packages; follow it in {log}")
    try:
        builder.configure_apt(SUITE)
        arguments = ["install", "--yes", "--no-install-recommends", "--download-only", _LIBRARY, "golang-go"]
        builder.apt_get("downloading Go and libraries", *arguments)
        report_progress("unpacking")
        builder.unpack_packages()
        gopath = builder.root / "usr/share/gocode"
        env = builder.go_environment(gopath) | {"GO111MODULE": "off"}
        go = ["go", "build", "-trimpath", "-ldflags=-s -w", f"-o={builder.out / PROGRAM}", f"k8s.io/{PROGRAM}"]
        builder.run_step("compiling (minutes)", go, gopath, env)
        (package,) = builder.packages.glob(f"{_LIBRARY}_*.deb")
        minor, patch = re.search(r"_0\.(\d+)\.(\d+)", package.name).groups()  # type: ignore[union-attr]
        binaries.publish_to_cache(builder.out, f"definitions-v1.{minor}.{patch}")
        log.unlink()
        report_progress(f"built in {time.monotonic() - started:.0f} s")
    finally:
        builder.remove()
    program = find()
    assert program is not None
    return program
