# SPDX-License-Identifier: Apache-2.0
"""Runs the phases of a folder, each in a process with its own time limit, and retries failed ones down the ladder.

It is a process in a session of its own: `python -m gpu_phases.supervisor FOLDER`. A phase cannot take another one's
time or results: the supervisor kills it with all its descendants at its limit, and keeps the rows that it wrote. After
any kill of the supervisor, the next one continues with the attempt that was interrupted.
"""

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from gpu_phases import ladder, store, table
from gpu_phases.plan import PHASES, Phase
from gpu_phases.store import RUNNING, Attempt

BENCH = Path(__file__).resolve().parents[1]
ROOT = BENCH.parents[1]
EXIT_WRONG = 3
"""Exit code of a phase that found wrong results; its rows name the operations."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Supervisor:
    """One run of the phases that have no complete attempt yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._settings: dict[str, Any] = json.loads((folder / "settings.json").read_text())
        self._base: ladder.Env = {}
        self._began = time.monotonic()

    def run(self) -> bool:
        """Run all phases; return whether each has a complete attempt."""
        pending = deque(PHASES[name] for name in self._settings["phases"])
        while pending:
            phase = pending.popleft()
            attempts = store.load(self._folder, phase.name)
            env = self._next_env(phase, attempts)
            if env is not None:
                attempt = self._attempt(phase, env, attempts)
                attempts = store.load(self._folder, phase.name)
                if not attempt.is_complete and self._next_env(phase, attempts) is not None:
                    self._queue_again(pending, phase, attempt)
            if phase.is_gate and (passed := [each for each in attempts if each.is_complete]):
                self._base = passed[-1].env
            table.write(self._folder)
        return all(any(each.is_complete for each in store.load(self._folder, n)) for n in self._settings["phases"])

    def _next_env(self, phase: Phase, attempts: list[Attempt]) -> ladder.Env | None:
        """Return the environment of the next attempt; None: the phase is complete, was tried in all, or is blocked."""
        if any(each.is_complete for each in attempts):
            return None
        if attempts and attempts[-1].outcome == RUNNING:
            return attempts[-1].env
        is_replaced = phase.needs_own_kernels and "QUIRE_KERNELS" in self._base
        if is_replaced or (phase.needs_gate and not self._gate_passed()):
            self._say(phase, "not started: the gate found wrong kernels")
            return None
        base = self._base if phase.needs_gate else {}
        wrong = {row["op"] for each in attempts for row in each.rows if row.get("wrong")}
        for each in attempts:
            wrong |= ladder.ops_in_traceback(
                store.log_path(self._folder, phase.name, each.number).read_text("utf-8", "replace")
            )
        tried = [each.env for each in attempts]
        return ladder.next_rung(base, tried, wrong)

    def _gate_passed(self) -> bool:
        gates = [name for name in self._settings["phases"] if PHASES[name].is_gate]
        return all(any(each.is_complete for each in store.load(self._folder, name)) for name in gates)

    def _queue_again(self, pending: deque[Phase], phase: Phase, attempt: Attempt) -> None:
        """A gate is retried at once, a phase of a bar behind the last of those, and all others at the end."""
        if phase.is_gate:
            pending.appendleft(phase)
        elif phase.has_bars and not (attempt.rows and "limit" in attempt.outcome):
            last = max((i for i, each in enumerate(pending) if each.has_bars), default=-1)
            pending.insert(last + 1, phase)
        else:
            pending.append(phase)

    def _attempt(self, phase: Phase, env: ladder.Env, attempts: list[Attempt]) -> Attempt:
        interrupted = bool(attempts) and attempts[-1].outcome == RUNNING
        number = attempts[-1].number if interrupted else len(attempts)
        attempt = Attempt(phase.name, number, ladder.name_of(env), env)
        store.save(self._folder, attempt)
        limits_s = self._settings["limits_s"]
        limit_s = limits_s.get(phase.name, limits_s.get("all", phase.limit_s))
        self._say(phase, f"started, limit {limit_s:.0f} s, {attempt.rung}")
        began = time.monotonic()
        attempt.outcome = self._run_process(phase, attempt, limit_s)
        attempt.seconds = time.monotonic() - began
        store.save(self._folder, attempt)
        [attempt] = [each for each in store.load(self._folder, phase.name) if each.number == number]
        self._say(
            phase,
            f"{attempt.outcome}, {attempt.seconds:.0f} of {limit_s:.0f} s, {len(attempt.rows)} rows, {attempt.rung}",
        )
        return attempt

    def _run_process(self, phase: Phase, attempt: Attempt, limit_s: float) -> str:
        command = [
            sys.executable,
            "-m",
            "gpu_phases.process",
            str(self._folder),
            phase.name,
            str(attempt.number),
            str(limit_s),
        ]
        paths = [str(ROOT / "backend"), str(ROOT / "kernels"), str(BENCH), str(ROOT / "tests")]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        defaults = {"TRITON_CACHE_DIR": str(self._folder / "compiled"), "PYTHONUNBUFFERED": "1"}
        env = defaults | os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | attempt.env
        log = store.log_path(self._folder, phase.name, attempt.number)
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"ended at its limit of {limit_s:.0f} s"
        finally:
            _kill_descendants()
            process.wait()
        if code == 0:
            return store.COMPLETE
        lines = log.read_text("utf-8", "replace").strip().splitlines() or [""]
        why = (
            f"signal {signal.Signals(-code).name}" if code < 0 else "wrong results" if code == EXIT_WRONG else lines[-1]
        )
        return f"failed: {why[:300]}"

    def _say(self, phase: Phase, what: str) -> None:
        elapsed = time.monotonic() - self._began
        print(f"[{elapsed // 60:02.0f}:{elapsed % 60:02.0f}] {phase.name:<14} {what}", flush=True)


def _kill_descendants() -> None:
    """Kill all descendants, also those in other sessions or without a parent: the device must be free."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=5)


def die_with_parent() -> None:
    """End this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def lock(folder: Path) -> int | None:
    """Take the folder for this process until it ends; None: another supervisor has it."""
    descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def main() -> int:
    """Run the phases of the folder in the first argument."""
    folder = Path(sys.argv[1])
    if lock(folder) is None:
        return 0
    # Descendants whose parent ended become children of this process, so that none escapes.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return 0 if Supervisor(folder).run() else 1


if __name__ == "__main__":
    sys.exit(main())
