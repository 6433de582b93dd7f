# SPDX-License-Identifier: Apache-2.0
"""The gate's verdict: from several processes at once, or from an earlier run of the same code on the same card."""

import contextlib
import faulthandler
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_gate
from card import Card

ROOT = Path(__file__).resolve().parents[2]
JUDGED = ("backend/quire_spec", "backend/quire_engine", "kernels/quire_kernels", "tests/bench/gpu_gate.py")
SAME = ("card", "torch", "triton", "cuda", "code", "forms")
"""What an earlier run must have been of."""
CHECKED = {"engine": "base", "peers": "base", "lora": "adapters", "itl": "adapters"}
"""Phases behind the engine's own gate, and what that is of."""
MAX_PROCESSES = 12
TIMEOUT_S = 240.0
"""For all comparisons, which should take 60 s: a kernel that never ends must not take the card's whole time."""
GRACE_S = 1.0


def findings(card: Card) -> tuple[list[gpu_gate.Finding], bool]:
    """Every comparison, from several processes on a GPU, where one would compile for minutes; and whether all of them
    ended well: stderr says what became of one that did not."""
    if not card.is_gpu:
        return list(gpu_gate.check_all(card, gpu_gate.Share())), True
    num = max(1, min(MAX_PROCESSES, (os.cpu_count() or 1) - 2))
    command = [sys.executable, str(Path(__file__).with_name("gpu.py")), "--gate-share"]
    found, whole = [], True
    with contextlib.ExitStack() as stack:
        running = [subprocess.Popen([*command, f"{i}/{num}"], stdout=subprocess.PIPE, text=True) for i in range(num)]
        for process in running:
            stack.enter_context(process)
            stack.callback(process.kill)
        deadline = time.monotonic() + TIMEOUT_S
        for i, process in enumerate(running):
            try:
                # Of those that ended meanwhile, in any case.
                out, _ = process.communicate(timeout=max(GRACE_S, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                why = f"--gate-share {i}/{num} has not ended after {TIMEOUT_S:g} s"
                print(f"gpu.py: {why}", file=sys.stderr, flush=True)
                whole = False
                continue
            if process.returncode:
                print(f"gpu.py: --gate-share {i}/{num}: exit code {process.returncode}", file=sys.stderr, flush=True)
                whole = False
                continue
            found += [gpu_gate.Finding(**each) for each in json.loads(out.splitlines()[-1])]
    return found, whole


def tell_where_it_hangs() -> None:
    """Have this process, one of those that compare, end with where it is before its time is over."""
    faulthandler.dump_traceback_later(max(TIMEOUT_S - GRACE_S * MAX_PROCESSES, 1.0), exit=True)


def forms() -> str:
    """What the environment asks of forms and graphs: what is judged depends on it."""
    asked = ("QUIRE_KERNELS", "QUIRE_GRAPHS", "QUIRE_EARLY_LAUNCH")
    return " ".join(f"{name}={os.environ[name]}" for name in asked if name in os.environ) or "preferred"


def of_earlier(path: Path, about: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The gate of the run with these results, if it says what one now would, and why it does or does not."""
    earlier = json.loads(path.read_text())
    gate = earlier.get("gate") or {}
    if other := [name for name in SAME if earlier["about"].get(name) != about.get(name)]:
        return None, f"does not count: another {other[0]}"
    if gate.get("bad") != []:
        return None, "does not count: its gate was not green"
    return gate | {"of": earlier["about"]["command"]}, "has a green gate of the same code on the same card"


def checks_of_earlier(path: Path) -> dict[str, dict[str, int]]:
    """What the engine's own gate found in the run with these results, where it was green; by what it is of."""
    earlier, found = json.loads(path.read_text()), {}
    for phase, of in CHECKED.items():
        check = (earlier.get(phase) or {}).get("check")
        if check and not check["other_tokens"]:
            found[of] = check
    return found


def code() -> str:
    """A digest of what is judged, for machines without git."""
    sha = hashlib.sha256()
    for root in JUDGED:
        path = ROOT / root
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.suffix in (".py", ".cpp", ".h"):
                sha.update(f"{file.relative_to(ROOT)} {file.stat().st_size} ".encode() + file.read_bytes())
    return sha.hexdigest()[:12]
