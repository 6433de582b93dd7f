# SPDX-License-Identifier: Apache-2.0
"""The API server of definitions (CRDs) and their objects of a current Kubernetes, by itself.

Where this machine's Kubernetes is an old one (debian.py), it shows what a current one makes of this project's
definition: rules in CEL and what they may cost, unknown fields, who owns a field. Debian's unstable suite has the
libraries that kubectl is built from, and with them this server, which is a part of kube-apiserver; no other server of a
current Kubernetes. About 400 MB are downloaded and compiled for some minutes; 5 GB of space.
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
"""From here on kube-apiserver itself knows what the definition needs."""
_COMMANDS = {"apt-get": "apt", "dpkg": "dpkg"}
_LIBRARY = "golang-k8s-apiextensions-apiserver-dev"


def find() -> Path | None:
    """The program in the cache, of the newest version."""
    cached = [
        folder / PROGRAM for folder in binaries.cache_folder().glob("definitions-v*") if (folder / PROGRAM).exists()
    ]
    return max(cached, key=lambda program: binaries.parse_version(program.parent.name), default=None)


def find_or_build(report_progress: binaries.ProgressCallback) -> Path:
    """The program that is there, or else a build.

    Raises:
        Unavailable: this is no Debian, something is missing, or the build failed; it is not tried again while its log
            is there.
    """
    if program := find():
        return program
    cache = binaries.cache_folder()
    log = cache / "definitions.log"
    if log.exists():
        raise binaries.Unavailable(f"the last build failed, see {log}; remove it to try again")
    deb_build.check_requirements(cache, _COMMANDS, NEEDED_BYTES, report_progress)
    started = time.monotonic()
    builder = DebBuild(cache / "definitions", log, report_progress)
    report_progress(f"building a current API server of definitions from Debian's packages; follow it in {log}")
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
