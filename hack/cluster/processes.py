# SPDX-License-Identifier: Apache-2.0
"""Programs of a cluster, started in the background and found again by a mark in their environment.

The mark and not a file of process ids: a recycled id cannot wear it, and what a killed starter left behind is found all
the same.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = "QUIRE_CLUSTER_FOLDER"
NAME = "QUIRE_CLUSTER_PROCESS"
STOP_S = 15.0
"""For a program to end by itself; then it is killed."""
_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: kept across exec
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Runs before the program itself, and not between fork and exec: the tests' process has threads."""
_started: dict[subprocess.Popen[bytes], tuple[Path, str]] = {}
"""By this process, and not waited for yet; with folder and name."""


@dataclass(frozen=True, slots=True)
class Process:
    """A running program of a cluster."""

    pid: int
    name: str
    """As it was started with; what it starts itself has the same."""


def start(
    folder: Path, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None, dies_with_us: bool = False
) -> subprocess.Popen[bytes]:
    """Start a program that writes to FOLDER/NAME.log; with `dies_with_us` the kernel ends it when this thread ends,
    however it ends."""
    marked = {**os.environ, **(env or {}), FOLDER: str(folder), NAME: name}
    if dies_with_us:
        argv = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *argv]
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [*argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=marked,
            start_new_session=True,
        )
    _started[process] = folder, name
    return process


def running(folder: Path) -> Iterator[Process]:
    """What runs of the cluster in `folder`."""
    wanted = f"{FOLDER}={folder}"
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            dead = (entry / "stat").read_bytes().rpartition(b") ")[2].startswith(b"Z")
        except OSError:
            continue  # gone since, or somebody else's
        if wanted in variables and not dead:
            name = next((v.partition("=")[2] for v in variables if v.startswith(f"{NAME}=")), "")
            yield Process(int(entry.name), name)


def stop(folder: Path, name: str | None = None) -> None:
    """End what runs under `name`, or everything; returns when it is gone."""
    deadline = time.monotonic() + STOP_S
    number = signal.SIGTERM
    told: set[int] = set()
    while found := _found(folder, name):
        if time.monotonic() > deadline:
            number, deadline, told = signal.SIGKILL, time.monotonic() + STOP_S, set()
        for pid in found - told:
            _signal(pid, number)
        told |= found
        time.sleep(0.02)


def tail(folder: Path, name: str, lines: int = 15) -> str:
    """The end of a program's log."""
    file = folder / f"{name}.log"
    return "\n".join(file.read_text(errors="replace").splitlines()[-lines:]) if file.exists() else "(no log)"


def _found(folder: Path, name: str | None) -> set[int]:
    """Ids of what runs under `name`, or of everything. Ours also by their handles: between two programs, at its exec, a
    process shows no environment, and it loses its own some time before it can be waited for."""
    for process in [*_started]:
        if process.poll() is not None:  # waited for with that: a child of ours stays a zombie until it is
            del _started[process]
    ours = {p.pid for p, (where, started) in _started.items() if where == folder and name in (None, started)}
    return ours | {p.pid for p in running(folder) if name in (None, p.name)}


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
