# SPDX-License-Identifier: Apache-2.0
"""A folder in which programs are built from Debian's packages, which are unpacked there: nothing is installed."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cluster import tools

MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


class Workshop:
    """Its folders, and steps that are a line of progress each; what they print goes to the log."""

    def __init__(self, work: Path, log: Path, say: tools.Say) -> None:
        """`work` is emptied; `log` outlives it."""
        self.work, self.log, self.say = work, log, say
        self.packages, self.root, self.out = work / "packages", work / "root", work / "out"
        shutil.rmtree(work, ignore_errors=True)
        log.unlink(missing_ok=True)
        for folder in (self.packages / "partial", self.root, self.out, work / "home"):
            folder.mkdir(parents=True)

    def read_list(self, suite: str) -> None:
        """Make `apt_get` know one suite of the mirror that this machine uses anyway, and nothing of this machine.

        Raises:
            Unavailable: there is no mirror, or it does not answer.
        """
        apt, site = self.work / "apt", mirror()
        for folder in ("etc", "state/lists/partial", "cache"):
            (apt / folder).mkdir(parents=True)
        (apt / "status").touch()
        lines = [f"{kind} [signed-by={_KEYS}] {site} {suite} main\n" for kind in ("deb", "deb-src")]
        (apt / "etc/sources.list").write_text("".join(lines))
        (apt / "conf").write_text(
            f'Dir::Etc "{apt}/etc"; Dir::State "{apt}/state"; Dir::State::status "{apt}/status";\n'
            f'Dir::Cache "{apt}/cache"; Dir::Cache::archives "{self.packages}";\n'
            f'Acquire::Languages "none"; APT::Sandbox::User "root"; Debug::NoLocking "true";\n'
            # Of unstable a list is good for a week only, and mirrors may be behind.
            'Acquire::Check-Valid-Until "false";\n'
        )
        self.apt_get("reading the list of packages", "update")

    def apt_get(self, what: str, *arguments: str) -> None:
        """Packages come to `packages`."""
        self.do(what, ["apt-get", "-qq", *arguments], self.packages, {"APT_CONFIG": str(self.work / "apt/conf")})

    def unpack(self) -> None:
        """All packages, into `root`."""
        for package in sorted(self.packages.glob("*.deb")):
            self.do("", ["dpkg", "-x", str(package), str(self.root)], self.packages)

    def go(self, gopath: Path) -> dict[str, str]:
        """The environment of the only Go in `root`."""
        (go,) = (self.root / "usr/lib").glob("go-*")
        return {
            "PATH": f"{go}/bin:{self.root}/usr/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{self.root}/usr/lib/{platform.machine()}-linux-gnu",
            "GOROOT": str(go),
            "GOPATH": str(gopath),
            "GOCACHE": str(self.work / "gocache"),
            "CGO_ENABLED": "0",
            "GOFLAGS": "",
            "GOPROXY": "off",
            "GOTOOLCHAIN": "local",
            "HOME": str(self.work / "home"),
        }

    def do(self, what: str, argv: Sequence[str], folder: Path, env: dict[str, str] | None = None) -> None:
        """One step, in `folder`; `what` is said unless it is empty.

        Raises:
            Unavailable: it failed; the message names the log.
        """
        if what:
            self.say(what)
        with self.log.open("ab") as log:
            done = subprocess.run(
                argv, cwd=folder, env={**os.environ, **(env or {})}, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        if done.returncode:
            raise tools.Unavailable(f"build from Debian's packages: {' '.join(argv)[:80]} failed; see {self.log}")

    def remove(self) -> None:
        """All but the log. Go leaves folders without write permission."""
        for path in self.work.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(self.work, ignore_errors=True)


def mirror() -> str:
    """The mirror that apt uses for Debian; raises Unavailable."""
    if shutil.which("apt-get") is None or platform.machine() not in MACHINES:
        raise tools.Unavailable("build from Debian's packages: this is no Debian with apt-get on x86_64 or aarch64")
    asked = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", "Origin: Debian"]
    sites = subprocess.run(asked, capture_output=True, text=True).stdout.split()
    if not sites:
        raise tools.Unavailable("build from Debian's packages: apt lists no mirror of Debian; run apt-get update")
    return sites[0]


def check(folder: Path, commands: dict[str, str], num_bytes: int, say: tools.Say) -> None:
    """See that commands (command: its package) and space are there; what is missing is installed where that is allowed.

    Raises:
        Unavailable: something is not there.
    """
    mirror()
    tools.install(commands, say)
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise tools.Unavailable(
            f"build from Debian's packages: {free / 2**30:.1f} GiB free at {folder}, {num_bytes / 2**30:.0f} needed"
        )
