# SPDX-License-Identifier: Apache-2.0
"""Both gates: the comparisons of gate_cases.py in several processes, because most of the time is compiling.

A process announces each case before it begins, and prints each finding on one line. If it crashes, hangs, or its device
fails, the case that it announced is wrong, and another process continues with its next one.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import Empty, Queue
from typing import Any

import torch
from card import Card

from gpu_phases import gate_cases
from gpu_phases.process import Context
from gpu_phases.store import Row
from gpu_phases.supervisor import die_with_parent

MAX_PROCESSES = 12
CASE_LIMIT_S, REHEARSED_CASE_LIMIT_S = 60.0, 240.0
"""Time limits of one case, which compiles several kernels, and of one that the interpreter runs."""


def tier_a(context: Context) -> Iterator[Row]:
    """What is timed; a row that is `wrong` blocks the phases behind the gate, or makes them use another kernel."""
    yield from _rows(context, True, "wrong")


def tier_b(context: Context) -> Iterator[Row]:
    """Everything else; a row that `differs` is reported."""
    yield from _rows(context, False, "differs")


def _rows(context: Context, is_timed: bool, mark: str) -> Iterator[Row]:
    all_cases = list(gate_cases.cases(context.card))
    chosen = [index for index, case in enumerate(all_cases) if case.is_timed == is_timed]
    # Cases that start an engine come first, because they take longest.
    chosen.sort(key=lambda index: all_cases[index].op != "graphs")
    num = max(1, min(MAX_PROCESSES, (os.cpu_count() or 1) - 2, len(chosen))) if context.card.is_full else 1
    found: Queue[Row | None] = Queue()
    shares = [chosen[i::num] for i in range(num)]
    threads = [threading.Thread(target=_check, args=(context, share, found), daemon=True) for share in shares]
    for thread in threads:
        thread.start()
    for _ in threads:
        while (row := found.get()) is not None:
            case = all_cases[row["case"]]
            is_good = row["value"] <= row["limit"]
            row |= {"what": f"{case.op} {case.what}: {row['what']}", "op": case.op.partition("=")[0], "unit": "error"}
            yield row if is_good else row | {mark: True, "unit": f"WRONG, at most {row['limit']:.0e}"}


def _check(context: Context, share: Sequence[int], found: Queue[Row | None]) -> None:
    """Put the findings of a share's cases into the queue, then None."""
    remaining = list(share)
    limit_s = CASE_LIMIT_S if context.card.is_full else REHEARSED_CASE_LIMIT_S
    while remaining:
        command = [sys.executable, "-m", "gpu_phases.gate", str(context.card.device), str(int(context.card.is_tiny))]
        command += map(str, remaining)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            why = _read(process, remaining, found, limit_s)
            process.kill()
        if remaining and why:
            found.put({"case": remaining.pop(0), "what": why, "value": float("inf"), "limit": 0.0})
    found.put(None)


def _read(process: "subprocess.Popen[str]", remaining: list[int], found: Queue[Row | None], limit_s: float) -> str:
    """Remove each case that the process completes; return why it ended."""
    lines: Queue[str | None] = Queue()

    def pump() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=pump, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=limit_s)
        except Empty:
            return f"no answer in {limit_s:.0f} s"
        if line is None:
            return f"exit code {process.wait()}"
        with suppress(json.JSONDecodeError):
            said: dict[str, Any] = json.loads(line)
            if "done" in said:
                remaining.remove(said["done"])
            elif "what" in said:
                found.put(said)


def main() -> None:
    """Compare the cases whose numbers are arguments; end at the first error of the device."""
    die_with_parent()
    card = Card(torch.device(sys.argv[1]), sys.argv[2] == "1")
    all_cases = list(gate_cases.cases(card))
    torch.set_float32_matmul_precision("highest")
    with torch.inference_mode():
        for index in map(int, sys.argv[3:]):
            print(json.dumps({"begins": index, "at": time.monotonic()}), flush=True)
            for what, error, limit in gate_cases.run(all_cases[index]):
                print(json.dumps({"case": index, "what": what, "value": error, "limit": limit}), flush=True)
            print(json.dumps({"done": index}), flush=True)


if __name__ == "__main__":
    main()
