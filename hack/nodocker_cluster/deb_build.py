# SPDX-License-Identifier: Apache-2.0
"""Builds programs from Debian packages. The packages are unpacked into a folder, but not installed."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from nodocker_cluster import binaries

DEBIAN_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


class DebBuild:
    """A build folder and its steps. Each step reports one line of progress and writes its output to the log."""

    def __init__(self, work: Path, log: Path, report_progress: binaries.ProgressCallback) -> None:
        """The constructor empties the folder `work`. The file `log` remains after `remove`."""
        self.work, self.log, self.report_progress = work, log, report_progress
        self.packages, self.root, self.out = work / "packages", work / "root", work / "out"
        shutil.rmtree(work, ignore_errors=True)
        log.unlink(missing_ok=True)
        for folder in (self.packages / "partial", self.root, self.out, work / "home"):
            folder.mkdir(parents=True)

    def configure_apt(self, suite: str) -> None:
        """Configure `apt_get` to use one suite of this machine's mirror. The other apt settings of the machine have no
        effect.

        Raises:
            Unavailable: there is no mirror, or the mirror does not respond.
        """
        apt, site = self.work / "apt", debian_mirror()
        for folder in ("etc", "state/lists/partial", "cache"):
            (apt / folder).mkdir(parents=True)
        (apt / "status").touch()
        lines = [f"{kind} [signed-by={_KEYS}] {site} {suite} main\n" for kind in ("deb", "deb-src")]
        (apt / "etc/sources.list").write_text("".join(lines))
        (apt / "conf").write_text(
            f'Dir::Etc "{apt}/etc"; Dir::State "{apt}/state"; Dir::State::status "{apt}/status";\n'
            f'Dir::Cache "{apt}/cache"; Dir::Cache::archives "{self.packages}";\n'
            f'Acquire::Languages "none"; APT::Sandbox::User "root"; Debug::NoLocking "true";\n'
            # The package lists of unstable are valid for only a week, and a mirror may have older lists.
            'Acquire::Check-Valid-Until "false";\n'
        )
        self.apt_get("reading the list of packages", "update")

    def apt_get(self, description: str, *arguments: str) -> None:
        """Run apt-get. It downloads packages to the folder `packages`."""
        self.run_step(
            description, ["apt-get", "-qq", *arguments], self.packages, {"APT_CONFIG": str(self.work / "apt/conf")}
        )

    def unpack_packages(self) -> None:
        """Unpack all downloaded packages into `root`."""
        for package in sorted(self.packages.glob("*.deb")):
            self.run_step("", ["dpkg", "-x", str(package), str(self.root)], self.packages)

    def go_environment(self, gopath: Path) -> dict[str, str]:
        """Return the environment variables for Go. `root` must contain exactly one version of Go."""
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

    def run_step(self, description: str, argv: Sequence[str], folder: Path, env: dict[str, str] | None = None) -> None:
        """Run one step in `folder`. If `description` is not empty, report it as progress.

        Raises:
            Unavailable: the step failed; the message names the log.
        """
        if description:
            self.report_progress(description)
        with self.log.open("ab") as log:
            done = subprocess.run(
                argv, cwd=folder, env={**os.environ, **(env or {})}, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        if done.returncode:
            raise binaries.Unavailable(f"build from Debian's packages: {' '.join(argv)[:80]} failed; see {self.log}")

    def remove(self) -> None:
        """Remove everything except the log. Go creates folders without write permission, so the permissions are changed
        first."""
        for path in self.work.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(self.work, ignore_errors=True)


def debian_mirror() -> str:
    """Return the Debian mirror that apt uses on this machine. If apt has no package lists and the user is root, fetch
    them first.

    Raises:
        Unavailable: this is not Debian, or apt lists no mirror.
    """
    if shutil.which("apt-get") is None or platform.machine() not in DEBIAN_ARCHITECTURES:
        raise binaries.Unavailable("build from Debian's packages: this is not Debian with apt-get on x86_64 or aarch64")
    sites = _listed_mirrors()
    if not sites and os.geteuid() == 0:  # a new machine or container image has no lists
        subprocess.run(["apt-get", "-qq", "update"], check=False)
        sites = _listed_mirrors()
    if not sites:
        raise binaries.Unavailable("build from Debian's packages: apt lists no Debian mirror; run apt-get update")
    return sites[0]


def _listed_mirrors() -> list[str]:
    command = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", "Origin: Debian"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


def check_requirements(
    folder: Path, commands: dict[str, str], num_bytes: int, report_progress: binaries.ProgressCallback
) -> None:
    """Check that there is enough disk space and that all `commands` exist. Missing commands are installed if this is
    allowed; `commands` maps each command to its package.

    Raises:
        Unavailable: a requirement is not met.
    """
    debian_mirror()
    binaries.install_packages(commands, report_progress)
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise binaries.Unavailable(
            f"build from Debian's packages: {folder} has only {free / 2**30:.1f} GiB of free space, but "
            f"the build needs {num_bytes / 2**30:.0f} GiB"
        )
