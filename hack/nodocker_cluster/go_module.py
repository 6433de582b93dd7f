# SPDX-License-Identifier: Apache-2.0
"""Go modules whose go.mod lists programs as tools, and other projects whose files are used. Go checks what it downloads
against go.sum.

Each module is a folder in go/. Called by kubernetes_build.py, helm.py and crds.py.
"""

import collections
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nodocker_cluster.binaries import ProgressCallback, Unavailable

MODULES = Path(__file__).resolve().parent / "go"
MIN_GO = (1, 21)
"""The oldest Go that fetches the Go version that a go.mod requires, as a module (GOTOOLCHAIN=auto)."""
REPORT_INTERVAL_S = 20.0
_NUM_ERROR_LINES = 15


@dataclass(frozen=True, slots=True)
class GoModule:
    """A folder with go.mod and go.sum."""

    folder: Path

    @property
    def text(self) -> str:
        """The content of go.mod."""
        return (self.folder / "go.mod").read_text()

    def version(self, module: str) -> str:
        """Return the version of a module that go.mod requires."""
        match = re.search(rf"^(?:require)?\s*{re.escape(module)} (v\S+)", self.text, re.MULTILINE)
        assert match is not None, f"{self.folder}/go.mod does not require {module}"
        return match[1]

    def build(self, out: Path, variables: Mapping[str, str], report_progress: ProgressCallback) -> None:
        """Build the tools of go.mod into the folder `out`. A tool is named after the last part of its import path.

        `variables` maps Go variables of type string to values that the linker sets.

        Raises:
            Unavailable: Go is missing or too old, there is too little space, a download failed, or the code does not
                compile.
        """
        name = self.folder.name
        report_progress(f"downloading the source of {name}")
        num_packages = len(self.go("list", "-deps", "tool").split())
        settings = " ".join(["-s", "-w", *(f"-X {variable}={value}" for variable, value in variables.items())])
        # Debug information is not generated, because the linker would leave it out (10 % less CPU time).
        flags = ["-trimpath", "-mod=readonly", "-gcflags=all=-dwarf=false", f"-ldflags={settings}"]
        command = ["build", "-v", *flags, f"-o={out}/", "tool"]
        started = reported = time.monotonic()
        report_progress(f"compiling {name} (minutes)")
        out.mkdir(parents=True, exist_ok=True)
        for num_compiled, _ in enumerate(self._lines(command), 1):
            if time.monotonic() - reported > REPORT_INTERVAL_S:
                reported = time.monotonic()
                progress = f"{num_compiled} of at most {num_packages} packages, {reported - started:.0f} s"
                report_progress(f"compiling {name}: {progress}")
        report_progress(f"compiled {name} in {time.monotonic() - started:.0f} s")

    def source(self, module: str) -> Path:
        """Download the source of a module that go.mod requires, and return its folder in Go's module cache.

        Raises:
            Unavailable: Go is missing, or the download failed.
        """
        return Path(json.loads(self.go("mod", "download", "-json", module))["Dir"])

    def go(self, *arguments: str) -> str:
        """Run the go command in this module and return its standard output.

        Raises:
            Unavailable: Go is missing or too old, or the command failed.
        """
        done = subprocess.run(
            [go_program(), *arguments],
            cwd=self.folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise _error(arguments, (done.stderr or done.stdout).splitlines())
        return done.stdout

    def _lines(self, arguments: list[str]) -> Iterator[str]:
        """Run the go command and yield the lines of its standard error while it runs."""
        command = [go_program(), *arguments]
        last_lines = collections.deque[str](maxlen=_NUM_ERROR_LINES)
        with subprocess.Popen(
            command, cwd=self.folder, env=_environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stderr is not None
                for line in process.stderr:
                    last_lines.append(line.rstrip())
                    yield line
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise _error(arguments, [*last_lines])


def go_program() -> str:
    """Return the path of the go command.

    Raises:
        Unavailable: there is none, or it is too old.
    """
    program = shutil.which("go")
    fix = f"install Go {'.'.join(map(str, MIN_GO))} or later (https://go.dev/dl), and put its bin folder on PATH"
    if program is None:
        raise Unavailable(f"Go modules: go is not installed; {fix}")
    command = [program, "env", "GOVERSION"]
    output = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False).stdout.strip()
    version = re.match(r"go(\d+)\.(\d+)", output)
    if version is None or (int(version[1]), int(version[2])) < MIN_GO:
        raise Unavailable(f"Go modules: {program} is {output or 'of an unknown version'}; {fix}")
    return program


def _environment() -> dict[str, str]:
    # A workspace, a vendor folder or a flag of the user must not change what is built.
    pinned = {"CGO_ENABLED": "0", "GOWORK": "off", "GOFLAGS": "-buildvcs=false"}
    return {**os.environ, **pinned}


def _error(arguments: tuple[str, ...] | list[str], lines: list[str]) -> Unavailable:
    end = "\n".join(lines[-_NUM_ERROR_LINES:])
    hint = "; set GOTOOLCHAIN=auto, or install that Go version" if "GOTOOLCHAIN=local" in end else ""
    return Unavailable(f"Go modules: go {' '.join(arguments[:2])} failed{hint}:\n{end}")
