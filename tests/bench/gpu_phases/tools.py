# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's tools over single kernels, where they are installed: hardware counters, and checks of memory and races."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from card import Card

from gpu_phases import attention, gate_cases
from gpu_phases.process import Context
from gpu_phases.store import Row
from gpu_phases.timing import Timer

METRICS = (
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
    "launch__occupancy_limit_registers",
    "launch__occupancy_limit_shared_mem",
)


def ncu_rows(context: Context) -> Iterator[Row]:
    """Counters of one decode launch and one prefill launch."""
    kernels = ["--kernel-name", "regex:_split_kv_decode|_prefill|_combine", "--launch-count", "4", "--csv"]
    command = ["ncu", "--clock-control", "none", "--metrics", ",".join(METRICS), *kernels]
    command += [sys.executable, "-m", "gpu_phases.tools", str(context.folder), str(int(context.card.is_tiny))]
    yield from _output(context, command, lambda line: line.startswith('"') and '"ID"' not in line)


def sanitizer_rows(context: Context) -> Iterator[Row]:
    """Errors of memory, and then races, in the comparisons of tier A that start no engine."""
    cases = enumerate(gate_cases.cases(context.card))
    chosen = [str(index) for index, case in cases if case.is_timed and case.op != "graphs"]
    for tool in ("memcheck", "racecheck"):
        command = ["compute-sanitizer", "--tool", tool, sys.executable, "-m", "gpu_phases.gate"]
        command += [str(context.card.device), str(int(context.card.is_tiny)), *chosen]
        yield from _output(context, command, lambda line: line.startswith("="))


def _output(context: Context, command: list[str], is_wanted: Callable[[str], bool]) -> Iterator[Row]:
    if shutil.which(command[0]) is None:
        yield {"what": f"{command[0]} is not installed", "value": "-", "unit": "", "left_out": True}
        return
    try:
        timeout = context.deadline - time.monotonic() - 5
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        lines = done.stdout.splitlines()
    except subprocess.TimeoutExpired as error:
        lines = (error.stdout or b"").decode(errors="replace").splitlines()
    for line in [line for line in lines if is_wanted(line)][-40:]:
        yield {"what": line[:300], "value": "-", "unit": ""}


def main() -> None:
    """Launch the attention kernels once, for ncu."""
    card = Card(torch.device("cuda"), sys.argv[2] == "1")
    timer = Timer(Context(card, Path(sys.argv[1]), sys.executable, time.monotonic() + 60))
    lengths = [1024] * 256 if timer.is_full else [40, 50]
    with torch.inference_mode():
        attention._decode_call(timer, lengths)()
        attention._span_call(
            timer, [(0, 8192 if timer.is_full else 40)], gate_cases.own(attention.ops.paged_attention)
        )[0]()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
