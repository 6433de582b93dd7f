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

from cluster import tools, workshop
from cluster.workshop import Workshop

PROGRAM = "apiextensions-apiserver"
SUITE = "unstable"
NEEDED_BYTES = 6 * 2**30
CURRENT = (1, 25, 0)
"""From here on kube-apiserver itself knows what the definition needs."""
_COMMANDS = {"apt-get": "apt", "dpkg": "dpkg"}
_LIBRARY = "golang-k8s-apiextensions-apiserver-dev"


def find() -> Path | None:
    """The program in the cache, of the newest version."""
    kept = [folder / PROGRAM for folder in tools.cache().glob("definitions-v*") if (folder / PROGRAM).exists()]
    return max(kept, key=lambda program: tools.version(program.parent.name), default=None)


def make(say: tools.Say) -> Path:
    """The program that is there, or else a build.

    Raises:
        Unavailable: this is no Debian, something is missing, or the build failed; it is not tried again while its log
            is there.
    """
    if found := find():
        return found
    cache = tools.cache()
    log = cache / "definitions.log"
    if log.exists():
        raise tools.Unavailable(f"the last build failed, see {log}; remove it to try again")
    workshop.check(cache, _COMMANDS, NEEDED_BYTES, say)
    started = time.monotonic()
    shop = Workshop(cache / "definitions", log, say)
    say(f"building a current API server of definitions from Debian's packages; follow it in {log}")
    try:
        shop.read_list(SUITE)
        wanted = ["install", "--yes", "--no-install-recommends", "--download-only", _LIBRARY, "golang-go"]
        shop.apt_get("downloading Go and libraries", *wanted)
        say("unpacking")
        shop.unpack()
        gopath = shop.root / "usr/share/gocode"
        env = shop.go(gopath) | {"GO111MODULE": "off"}
        go = ["go", "build", "-trimpath", "-ldflags=-s -w", f"-o={shop.out / PROGRAM}", f"k8s.io/{PROGRAM}"]
        shop.do("compiling (minutes)", go, gopath, env)
        (package,) = shop.packages.glob(f"{_LIBRARY}_*.deb")
        minor, patch = re.search(r"_0\.(\d+)\.(\d+)", package.name).groups()  # type: ignore[union-attr]
        tools.keep(shop.out, f"definitions-v1.{minor}.{patch}")
        log.unlink()
        say(f"built in {time.monotonic() - started:.0f} s")
    finally:
        shop.remove()
    found = find()
    assert found is not None
    return found
