# SPDX-License-Identifier: Apache-2.0
"""Starts and stops the programs of a cluster. They run in the background, and a variable in their environment
identifies them.

A file with process ids would be unreliable, because the kernel reuses ids. The variable is never ambiguous. It also
identifies programs if the process that started them was killed.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER_VARIABLE = "QUIRE_CLUSTER_FOLDER"
NAME_VARIABLE = "QUIRE_CLUSTER_PROCESS"
STOP_TIMEOUT_S = 15.0
"""After SIGTERM, a program must end in this number of seconds. If it still runs then, it is killed."""
_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: kept across exec
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Script that sets the parent-death signal and then executes the actual program. This cannot be done between fork and
exec: the process that runs the tests has threads, so code at this point would be unsafe."""
_started: dict[subprocess.Popen[bytes], tuple[Path, str]] = {}
"""Maps each child process that is not reaped yet to its folder and name."""


@dataclass(frozen=True, slots=True)
class ClusterProcess:
    """A running program of a cluster."""

    pid: int
    name: str
    """The name that was given to the program when it was started. Its child processes have the same name."""


def start(
    folder: Path, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None, die_with_parent: bool = False
) -> subprocess.Popen[bytes]:
    """Start a program that writes to FOLDER/NAME.log. With `die_with_parent`, the kernel kills the program when the
    thread that calls this function ends, for any reason."""
    environment = {**os.environ, **(env or {}), FOLDER_VARIABLE: str(folder), NAME_VARIABLE: name}
    if die_with_parent:
        argv = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *argv]
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [*argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    _started[process] = folder, name
    return process


def running_processes(folder: Path) -> Iterator[ClusterProcess]:
    """Yield the running programs of the cluster in `folder`."""
    folder_entry = f"{FOLDER_VARIABLE}={folder}"
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            is_zombie = (entry / "stat").read_bytes().rpartition(b") ")[2].startswith(b"Z")
        except OSError:
            continue  # The process has ended in the meantime, or it belongs to another user.
        if folder_entry in variables and not is_zombie:
            name = next((v.partition("=")[2] for v in variables if v.startswith(f"{NAME_VARIABLE}=")), "")
            yield ClusterProcess(int(entry.name), name)


def stop(folder: Path, name: str | None = None) -> None:
    """Stop the programs with this name, or all of them, and wait until they have ended."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    signal_number = signal.SIGTERM
    signaled: set[int] = set()
    while pids := _find_pids(folder, name):
        if time.monotonic() > deadline:
            signal_number, deadline, signaled = signal.SIGKILL, time.monotonic() + STOP_TIMEOUT_S, set()
        for pid in pids - signaled:
            _send_signal(pid, signal_number)
        signaled |= pids
        time.sleep(0.02)


def tail(folder: Path, name: str, lines: int = 15) -> str:
    """Return the end of a program's log."""
    file = folder / f"{name}.log"
    return "\n".join(file.read_text(errors="replace").splitlines()[-lines:]) if file.exists() else "(no log)"


def _find_pids(folder: Path, name: str | None) -> set[int]:
    """Return the process ids of the programs with this name, or of all programs.

    Children of this process are also found by their handles. The environment is not sufficient, because it is not
    visible during exec and shortly before a process ends.
    """
    for process in [*_started]:
        if process.poll() is not None:  # A child that has ended is a zombie until `poll` reaps it.
            del _started[process]
    ours = {
        p.pid
        for p, (process_folder, process_name) in _started.items()
        if process_folder == folder and name in (None, process_name)
    }
    return ours | {p.pid for p in running_processes(folder) if name in (None, p.name)}


def _send_signal(pid: int, signal_number: int) -> None:
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        pass
