# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' programs built from Debian bookworm's own source package, with bookworm's own Go: version 1.20.2.

Old, but a real one, and all of it comes from the mirror that apt uses anyway. The packages are unpacked into a work
folder, which goes afterwards; nothing is installed on the machine. About 5 minutes on two idle cores, 3.4 GB of space.

Three traps. The package's Makefile needs rsync and generates code (no plain `go build`). And the reflect2 1.0.1 of its
vendor tree, built with Go 1.18 or later, kills the API server at the first custom resource ("fatal error: fault" in
mapiternext): Debian's 1.0.2 takes its place. And its validator takes an empty text for null when built with Go 1.18 or
later (both then point to the same zero bytes, which reflect.DeepEqual compares): CRDs with `default: ""` are refused.
"""

import platform
import shutil
import time
from pathlib import Path

from cluster import tools, workshop
from cluster.workshop import Workshop

SUITE = "bookworm"
NAME = "v1.20.2-debian"
NEEDED_BYTES = 4 * 2**30
_COMMANDS = {"apt-get": "apt", "dpkg": "dpkg", "make": "make", "patch": "patch", "xz": "xz-utils", "bash": "bash"}
"""Each with its Debian package."""
_PACKAGES = (
    "golang-1.19-go", "golang-1.19-src", "golang-github-modern-go-reflect2-dev", "rsync", "libpopt0", "libxxhash0",
    "etcd-server",
)  # fmt: skip
_PROGRAMS = [name for name in tools.ALL if name != "etcd"]


def build(cache: Path, say: tools.Say) -> None:
    """Fill CACHE/v1.20.2-debian.

    Raises:
        Unavailable: this is no Debian, something is missing, or the build failed; its log is kept and named.
    """
    workshop.check(cache, _COMMANDS, NEEDED_BYTES, say)
    started = time.monotonic()
    shop = Workshop(cache / "build", cache / "build.log", say)
    say(f"building Kubernetes from Debian's source package; follow it in {shop.log}")
    try:
        shop.read_list(SUITE)
        shop.apt_get("downloading Go and etcd", "download", *_PACKAGES)
        shop.apt_get("downloading the source", "source", "--download-only", "kubernetes")
        source = _unpack(shop)
        _compile(shop, source)
        tools.keep(shop.out, NAME)
        shop.log.unlink()
        say(f"built in {time.monotonic() - started:.0f} s")
    finally:
        shop.remove()


def _unpack(shop: Workshop) -> Path:
    """The folder of the source, patched."""
    shop.say("unpacking")
    shop.unpack()
    source = shop.work / "source"
    source.mkdir()
    (original,) = shop.packages.glob("kubernetes_*.orig.tar.*")
    (patches,) = shop.packages.glob("kubernetes_*.debian.tar.*")
    shop.do("", ["tar", "xf", str(original), "--strip-components=1"], source)
    shop.do("", ["tar", "xf", str(patches)], source)
    for patch in (source / "debian/patches/series").read_text().split():
        shop.do("", ["patch", "-p1", "-s", "-i", f"debian/patches/{patch}"], source)
    _replace_reflect2(source, shop.root / "usr/share/gocode/src/github.com/modern-go/reflect2")
    _let_empty_texts_be(source)
    (source / ".go/src/k8s.io").mkdir(parents=True)
    (source / ".go/src/k8s.io/kubernetes").symlink_to("../../..")
    return source


def _replace_reflect2(source: Path, packaged: Path) -> None:
    vendored = source / "vendor/github.com/modern-go/reflect2"
    for old in [*vendored.glob("*.go"), *vendored.glob("*.s")]:
        old.unlink()
    for new in [*packaged.glob("*.go"), *packaged.glob("*.s")]:
        if not new.name.endswith("_test.go"):
            shutil.copy(new, vendored)


def _let_empty_texts_be(source: Path) -> None:
    wrong = "data == nil || reflect.DeepEqual(reflect.Zero(reflect.TypeOf(data)), reflect.ValueOf(data))"
    for module in ("k8s.io/kube-openapi/pkg/validation", "github.com/go-openapi"):
        file = source / "vendor" / module / "validate/type.go"
        file.write_text(file.read_text().replace(wrong, "data == nil"))


def _compile(shop: Workshop, source: Path) -> None:
    env = shop.go(source / ".go") | {"FORCE_HOST_GO": "y"}
    wanted = " ".join(f"cmd/{name}" for name in _PROGRAMS)
    shop.do("compiling (minutes)", ["make", f"WHAT={wanted}", "GOLDFLAGS=-s -w"], source, env)
    made = source / f"_output/local/bin/linux/{workshop.MACHINES[platform.machine()]}"
    for program in (*(made / name for name in _PROGRAMS), shop.root / "usr/bin/etcd"):
        shutil.copy(program, shop.out)
