# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' programs built from Debian bookworm's own source package, with bookworm's own Go: version 1.20.2.

Old, but a real one, and all of it comes from the mirror that apt uses anyway. The packages are unpacked into a work
folder, which goes afterwards; nothing is installed on the machine. About 5 minutes on two idle cores, 3.4 GB of space.

Three traps. The package's Makefile needs rsync and generates code (no plain `go build`). And the reflect2 1.0.1 of its
vendor tree, built with Go 1.18 or later, kills the API server at the first custom resource ("fatal error: fault" in
mapiternext): Debian's 1.0.2 takes its place. And its validator takes an empty text for null when built with Go 1.18 or
later (both then point to the same zero bytes, which reflect.DeepEqual compares): CRDs with `default: ""` are refused.
"""

import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

from cluster import tools

SUITE = "bookworm"
NAME = "v1.20.2-debian"
NEEDED_BYTES = 4 * 2**30
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
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
    site = mirror()
    _check(cache, say)
    work, log = cache / "build", cache / "build.log"
    shutil.rmtree(work, ignore_errors=True)
    log.unlink(missing_ok=True)
    started = time.monotonic()
    try:
        _Build(work, log, say).run(site)
        tools.keep(work / "out", NAME)
        log.unlink()
        say(f"built in {time.monotonic() - started:.0f} s")
    finally:
        _remove(work)


class _Build:
    """The steps, each a line of progress; what they print goes to the log."""

    def __init__(self, work: Path, log: Path, say: tools.Say) -> None:
        self.work, self.log, self.say = work, log, say
        self.root, self.source, self.out = work / "root", work / "source", work / "out"
        for folder in (self.root, self.source, self.out, work / "packages", work / "home"):
            folder.mkdir(parents=True)

    def run(self, mirror: str) -> None:
        """All of it."""
        self.say(f"building Kubernetes from Debian's source package; follow it in {self.log}")
        self._download(mirror)
        self._unpack()
        self._compile()

    def _download(self, mirror: str) -> None:
        apt = self.work / "apt"
        for folder in ("etc", "state/lists/partial", "cache/archives/partial"):
            (apt / folder).mkdir(parents=True)
        (apt / "status").touch()
        signed = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
        lines = [f"{kind} {signed} {mirror} {SUITE} main\n" for kind in ("deb", "deb-src")]
        (apt / "etc/sources.list").write_text("".join(lines))
        (apt / "conf").write_text(
            f'Dir::Etc "{apt}/etc"; Dir::State "{apt}/state"; Dir::State::status "{apt}/status";\n'
            f'Dir::Cache "{apt}/cache"; Acquire::Languages "none"; APT::Sandbox::User "root";\n'
        )
        env = {"APT_CONFIG": str(apt / "conf")}
        packages = self.work / "packages"
        self._do("reading the list of packages", ["apt-get", "-qq", "update"], packages, env)
        self._do("downloading Go and etcd", ["apt-get", "-qq", "download", *_PACKAGES], packages, env)
        source = ["apt-get", "-qq", "source", "--download-only", "kubernetes"]
        self._do("downloading the source", source, packages, env)

    def _unpack(self) -> None:
        packages = self.work / "packages"
        for package in sorted(packages.glob("*.deb")):
            self._do("", ["dpkg", "-x", str(package), str(self.root)], packages)
        (original,) = packages.glob("kubernetes_*.orig.tar.*")
        (patches,) = packages.glob("kubernetes_*.debian.tar.*")
        self._do("unpacking", ["tar", "xf", str(original), "--strip-components=1"], self.source)
        self._do("", ["tar", "xf", str(patches)], self.source)
        series = (self.source / "debian/patches/series").read_text().split()
        for patch in series:
            self._do("", ["patch", "-p1", "-s", "-i", f"debian/patches/{patch}"], self.source)
        self._replace_reflect2()
        self._let_empty_texts_be()
        (self.source / ".go/src/k8s.io").mkdir(parents=True)
        (self.source / ".go/src/k8s.io/kubernetes").symlink_to("../../..")

    def _replace_reflect2(self) -> None:
        vendored = self.source / "vendor/github.com/modern-go/reflect2"
        for old in [*vendored.glob("*.go"), *vendored.glob("*.s")]:
            old.unlink()
        packaged = self.root / "usr/share/gocode/src/github.com/modern-go/reflect2"
        for new in [*packaged.glob("*.go"), *packaged.glob("*.s")]:
            if not new.name.endswith("_test.go"):
                shutil.copy(new, vendored)

    def _let_empty_texts_be(self) -> None:
        wrong = "data == nil || reflect.DeepEqual(reflect.Zero(reflect.TypeOf(data)), reflect.ValueOf(data))"
        for module in ("k8s.io/kube-openapi/pkg/validation", "github.com/go-openapi"):
            file = self.source / "vendor" / module / "validate/type.go"
            file.write_text(file.read_text().replace(wrong, "data == nil"))

    def _compile(self) -> None:
        go = self.root / "usr/lib/go-1.19"
        env = {
            "PATH": f"{go}/bin:{self.root}/usr/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{self.root}/usr/lib/{platform.machine()}-linux-gnu",
            "GOROOT": str(go),
            "GOPATH": str(self.source / ".go"),
            "GOCACHE": str(self.work / "gocache"),
            "CGO_ENABLED": "0",
            "GOFLAGS": "",
            "GOPROXY": "off",
            "HOME": str(self.work / "home"),
            "FORCE_HOST_GO": "y",
        }
        wanted = " ".join(f"cmd/{name}" for name in _PROGRAMS)
        self._do("compiling (minutes)", ["make", f"WHAT={wanted}", "GOLDFLAGS=-s -w"], self.source, env)
        made = self.source / f"_output/local/bin/linux/{_MACHINES[platform.machine()]}"
        for program in (*(made / name for name in _PROGRAMS), self.root / "usr/bin/etcd"):
            shutil.copy(program, self.out)

    def _do(self, what: str, argv: list[str], folder: Path, env: dict[str, str] | None = None) -> None:
        if what:
            self.say(what)
        with self.log.open("ab") as log:
            done = subprocess.run(
                argv, cwd=folder, env={**os.environ, **(env or {})}, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        if done.returncode:
            raise tools.Unavailable(f"build from Debian's source: {' '.join(argv)[:80]} failed; see {self.log}")


def mirror() -> str:
    """The mirror that apt uses for Debian; raises Unavailable."""
    if shutil.which("apt-get") is None or platform.machine() not in _MACHINES:
        raise tools.Unavailable("build from Debian's source: this is no Debian with apt-get on x86_64 or aarch64")
    asked = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", "Origin: Debian"]
    sites = subprocess.run(asked, capture_output=True, text=True).stdout.split()
    if not sites:
        raise tools.Unavailable("build from Debian's source: apt lists no mirror of Debian; run apt-get update")
    return sites[0]


def _check(cache: Path, say: tools.Say) -> None:
    """Programs and space; what is missing is installed where that is allowed."""
    tools.install(_COMMANDS, say)
    free = shutil.disk_usage(cache).free
    if free < NEEDED_BYTES:
        raise tools.Unavailable(
            f"build from Debian's source: {free / 2**30:.1f} GiB free at {cache}, {NEEDED_BYTES / 2**30:.0f} needed"
        )


def _remove(folder: Path) -> None:
    """Go leaves folders without write permission."""
    for path in folder.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    shutil.rmtree(folder, ignore_errors=True)
