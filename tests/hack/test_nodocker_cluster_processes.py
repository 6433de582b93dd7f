# SPDX-License-Identifier: Apache-2.0
"""Programs of a cluster are found and stopped, also after their starter was killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

from nodocker_cluster import processes
from support.engine_processes import wait_for

HACK = Path(__file__).resolve().parents[2] / "hack"
STARTER = """
import sys, time
from pathlib import Path
from nodocker_cluster import processes
for name in ("one", "two"):
    processes.start(Path(sys.argv[1]), name, ["sleep", "600"], die_with_parent=sys.argv[2] == "dies")
time.sleep(600)
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


def names(folder):
    return sorted(p.name for p in processes.running_processes(folder))


def killed_starter(folder, how):
    """Start two programs from a process, and kill that process when both run."""
    argv = [sys.executable, "-c", STARTER, str(folder), how]
    with subprocess.Popen(argv, env=os.environ | {"PYTHONPATH": str(HACK)}) as starter:
        try:
            wait_for(lambda: names(folder) == ["one", "two"], 30, "both programs")
            # Before exec they run the wrapper that sets the parent-death signal.
            wait_for(lambda: all(_command(p.pid) == "sleep" for p in processes.running_processes(folder)), 30, "sleep")
        finally:
            starter.kill()


def _command(pid):
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_programs_die_with_a_killed_starter(tmp_path):
    killed_starter(tmp_path, "dies")
    wait_for(lambda: names(tmp_path) == [], 10, "their end")


def test_programs_of_a_killed_starter_are_found_and_stopped(tmp_path):
    killed_starter(tmp_path, "stays")
    time.sleep(0.1)
    assert names(tmp_path) == ["one", "two"]
    processes.stop(tmp_path, "one")
    assert names(tmp_path) == ["two"]
    processes.stop(tmp_path)
    assert names(tmp_path) == []


def test_program_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 0.2)
    processes.start(tmp_path, "deaf", [sys.executable, "-c", DEAF])
    wait_for(lambda: "deaf" in processes.tail(tmp_path, "deaf"), 60, "its first line")
    processes.stop(tmp_path)
    assert names(tmp_path) == []


def test_process_names_that_are_not_utf8(tmp_path):
    """For example words in another alphabet, of which the kernel keeps fifteen bytes."""
    named = ["sh", "-c", "printf ') \\377' > /proc/$$/comm; echo; read -r _"]
    with subprocess.Popen(named, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        processes.start(tmp_path, "sleep", ["sleep", "600"])
        wait_for(lambda: names(tmp_path) == ["sleep"], 60, "it is found")
        processes.stop(tmp_path)
        other.communicate(b"\n")


def test_programs_of_another_cluster_keep_running(tmp_path):
    (ours := tmp_path / "ours").mkdir()
    (theirs := tmp_path / "theirs").mkdir()
    started = [processes.start(folder, "sleep", ["sleep", "600"], die_with_parent=True) for folder in (ours, theirs)]
    # After exec its environment remains visible.
    wait_for(lambda: _command(started[1].pid) == "sleep" and names(theirs), 60, "sleep")
    processes.stop(ours)
    assert (names(ours), names(theirs)) == ([], ["sleep"])
    processes.stop(theirs)


def test_stops_own_child_without_visible_environment(tmp_path):
    """A program has no visible environment for an instant during exec."""
    bare = processes.start(tmp_path, "bare", ["env", "-i", "sleep", "600"])
    wait_for(lambda: _command(bare.pid) == "sleep", 10, "sleep")
    assert names(tmp_path) == []
    processes.stop(tmp_path)
    assert bare.returncode is not None
