# SPDX-License-Identifier: Apache-2.0
"""The programs of Kubernetes 1.20.2. They are built from the source package in Debian bookworm, with the Go compiler of
bookworm.

The version is old, but the build needs only the mirror that apt uses. The packages are unpacked into a work folder and
not installed. The folder is removed afterwards. A build takes about 5 minutes on two idle cores and 3.4 GB of space.

This module solves three problems. First, the package's Makefile generates code, so `go build` is not sufficient; the
Makefile also needs rsync. Second, the source contains reflect2 1.0.1. If it is built with Go 1.18 or later, it crashes
the API server at the first custom resource ("fatal error: fault" in mapiternext). Therefore, Debian's reflect2 1.0.2
replaces it. Third, if the validator is built with Go 1.18 or later, it treats an empty string as null and rejects CRDs
with `default: ""`. The cause is that an empty string and null point to the same zero bytes, which reflect.DeepEqual
compares.
"""

import platform
import shutil
import time
from pathlib import Path

from nodocker_cluster import binaries, deb_build
from nodocker_cluster.deb_build import DebBuild

SUITE = "bookworm"
NAME = "v1.20.2-debian"
NEEDED_BYTES = 4 * 2**30
_COMMANDS = {"apt-get": "apt", "dpkg": "dpkg", "make": "make", "patch": "patch", "xz": "xz-utils", "bash": "bash"}
"""Debian package by program."""
_PACKAGES = (
    "golang-1.19-go", "golang-1.19-src", "golang-github-modern-go-reflect2-dev", "rsync", "libpopt0", "libxxhash0",
    "etcd-server",
)  # fmt: skip
_PROGRAMS = [name for name in binaries.ALL_PROGRAMS if name != "etcd"]


def build(cache: Path, report_progress: binaries.ProgressCallback) -> None:
    """Fill CACHE/v1.20.2-debian.

    Raises:
        Unavailable: this is not Debian, a requirement is missing, or the build failed; the message names the log of the
            build.
    """
    deb_build.check_requirements(cache, _COMMANDS, NEEDED_BYTES, report_progress)
    started = time.monotonic()
    builder = DebBuild(cache / "build", cache / "build.log", report_progress)
    report_progress(f"building Kubernetes from Debian's source package; follow it in {builder.log}")
    try:
        builder.configure_apt(SUITE)
        builder.apt_get("downloading Go and etcd", "download", *_PACKAGES)
        builder.apt_get("downloading the source", "source", "--download-only", "kubernetes")
        source = _unpack(builder)
        _compile(builder, source)
        binaries.publish_to_cache(builder.out, NAME)
        builder.log.unlink()
        report_progress(f"built in {time.monotonic() - started:.0f} s")
    finally:
        builder.remove()


def _unpack(builder: DebBuild) -> Path:
    """Unpack the source, apply the patches, and return the folder."""
    builder.report_progress("unpacking")
    builder.unpack_packages()
    source = builder.work / "source"
    source.mkdir()
    (original,) = builder.packages.glob("kubernetes_*.orig.tar.*")
    (patches,) = builder.packages.glob("kubernetes_*.debian.tar.*")
    builder.run_step("", ["tar", "xf", str(original), "--strip-components=1"], source)
    builder.run_step("", ["tar", "xf", str(patches)], source)
    for patch in (source / "debian/patches/series").read_text().split():
        builder.run_step("", ["patch", "-p1", "-s", "-i", f"debian/patches/{patch}"], source)
    _replace_reflect2(source, builder.root / "usr/share/gocode/src/github.com/modern-go/reflect2")
    _patch_empty_string_validation(source)
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


def _patch_empty_string_validation(source: Path) -> None:
    faulty = "data == nil || reflect.DeepEqual(reflect.Zero(reflect.TypeOf(data)), reflect.ValueOf(data))"
    for module in ("k8s.io/kube-openapi/pkg/validation", "github.com/go-openapi"):
        file = source / "vendor" / module / "validate/type.go"
        file.write_text(file.read_text().replace(faulty, "data == nil"))


def _compile(builder: DebBuild, source: Path) -> None:
    env = builder.go_environment(source / ".go") | {"FORCE_HOST_GO": "y"}
    targets = " ".join(f"cmd/{name}" for name in _PROGRAMS)
    builder.run_step("compiling (minutes)", ["make", f"WHAT={targets}", "GOLDFLAGS=-s -w"], source, env)
    built_folder = source / f"_output/local/bin/linux/{deb_build.DEBIAN_ARCHITECTURES[platform.machine()]}"
    for program in (*(built_folder / name for name in _PROGRAMS), builder.root / "usr/bin/etcd"):
        shutil.copy(program, builder.out)
