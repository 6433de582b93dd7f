# SPDX-License-Identifier: Apache-2.0
"""Measure everything about speed on one GPU, in one command, on a machine with only PyTorch, Triton and psutil.

Each phase is a process with its own time limit. A phase that crashes, hangs, or breaks its device loses no other
phase's result: its rows are kept, and it is retried with less of what may be wrong (QUIRE_EARLY_LAUNCH=0, the
reference of the named operation, QUIRE_GRAPHS=0). The table names the environment of each result. Correctness comes
first: what is timed is compared with its reference, and a kernel that differs is replaced by its reference and named.

The run continues in a session of its own when this command ends. --resume follows it, or continues after a kill.
Weights are random, in the shape of Llama-3.1-8B, and made on the device.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parents[1]
sys.path[:0] = [str(BENCH)]

from gpu_phases.plan import PHASES, describe  # noqa: E402

EXIT_RUNNING = 75
EXAMPLES = """\
exit codes: 0 all phases are complete, 1 some are not, 75 the run continues after --wait-s.

examples:
  python3 tests/bench/gpu.py                              everything, about 35 minutes
  python3 tests/bench/gpu.py --wait-s 560                 start, and return within 10 minutes
  python3 tests/bench/gpu.py --resume --wait-s 560        follow the same run, or continue it after a kill
  python3 tests/bench/gpu.py --phase engine,start         only these phases (and the gate)
  python3 tests/bench/gpu.py --cpu-rehearsal              everything with tiny shapes on a CPU
"""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="gpu.py", description=f"{__doc__}\n{describe()}", epilog=EXAMPLES, formatter_class=form
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="DIR", default=ROOT / ".gpu-results", help="default: %(default)s")
    add("--phase", metavar="A,B", help="only these, in this order, after facts and gate (default: all)")
    add("--resume", action="store_true", help="follow or continue the run in DIR; without it, DIR is emptied first")
    add("--wait-s", type=float, default=float("inf"), metavar="S", help="return after S seconds; the run continues")
    add("--cpu-rehearsal", action="store_true", help="tiny shapes on a CPU, kernels interpreted; times mean nothing")
    add("--vllm-python", metavar="FILE", default=sys.executable, help="interpreter that has vLLM (default: this one)")
    # For rehearsals: tiny shapes on the CUDA device, PHASE=SECONDS or all=SECONDS, and PHASE=FAULT of a first attempt.
    add("--tiny", action="store_true", help=argparse.SUPPRESS)
    add("--limits-s", default="", help=argparse.SUPPRESS)
    add("--faults", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.phases = list(dict.fromkeys(("facts", "gate", *args.phase.split(",")))) if args.phase else list(PHASES)
    if unknown := set(args.phases) - set(PHASES):
        parser.error(f"--phase: unknown {', '.join(sorted(unknown))}; use {', '.join(PHASES)}")
    is_run = (args.output / "settings.json").is_file()
    if not args.resume and not is_run and args.output.is_dir() and any(args.output.iterdir()):
        parser.error(f"-o: {args.output} contains other files; give a new folder")
    if args.resume and not is_run:
        parser.error(f"--resume: {args.output} contains no run; leave out --resume")
    if not args.resume and not args.cpu_rehearsal:
        import torch  # here, so that the help needs no torch

        if not torch.cuda.is_available():
            parser.error("PyTorch finds no CUDA device; --cpu-rehearsal runs the code without one")
    return args


def main() -> int:
    """Start or find the supervisor, print its progress, and print the table."""
    args = arguments()
    folder: Path = args.output.resolve()
    if not args.resume:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _write_settings(args, folder)
    log = folder / "progress.log"
    with log.open("ab") as output:
        seen = output.tell() if args.resume else 0
        path = os.pathsep.join([str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "gpu_phases.supervisor", str(folder)]
        env = os.environ | {"PYTHONPATH": path}
        supervisor = subprocess.Popen(command, stdout=output, stderr=output, env=env, start_new_session=True)
    with contextlib.suppress(KeyboardInterrupt):
        _follow(folder, log, seen, supervisor, time.monotonic() + args.wait_s)
    table = folder / "table.md"
    print(table.read_text() if table.exists() else "Nothing was measured yet.", flush=True)
    print(f"{table} and {folder / 'results.json'} contain all of it.")
    if _is_running(folder):
        print("The run continues; --resume follows it.")
        return EXIT_RUNNING
    results = json.loads((folder / "results.json").read_text())
    outcomes = [results["phases"].get(name, {}).get("outcome") for name in results["settings"]["phases"]]
    return 0 if set(outcomes) == {"complete"} else 1


def _write_settings(args: argparse.Namespace, folder: Path) -> None:
    settings = {
        "command": " ".join(sys.argv),
        "commit": _commit(),
        "phases": args.phases,
        "device": "cpu" if args.cpu_rehearsal else "cuda",
        "tiny": args.cpu_rehearsal or args.tiny,
        "vllm_python": args.vllm_python,
        "limits_s": {name: float(value) for name, value in _pairs(args.limits_s)},
        "faults": dict(_pairs(args.faults)),
    }
    (folder / "settings.json").write_text(json.dumps(settings, indent=1))


def _pairs(text: str) -> list[list[str]]:
    return [item.split("=") for item in filter(None, text.split(","))]


def _follow(folder: Path, log: Path, seen: int, supervisor: "subprocess.Popen[bytes]", deadline: float) -> None:
    """Print what the supervisor writes until the run ends or the time is over."""
    with log.open() as lines:
        lines.seek(seen)
        while True:
            # Reaps it: the first one that has the folder continues, and another one ends at once.
            has_ended = supervisor.poll() is not None and not _is_running(folder)
            sys.stdout.write(lines.read())
            sys.stdout.flush()
            if has_ended or time.monotonic() > deadline:
                return
            time.sleep(0.3)


def _is_running(folder: Path) -> bool:
    from gpu_phases.supervisor import lock

    if (descriptor := lock(folder)) is None:
        return True
    os.close(descriptor)
    return False


def _commit() -> str:
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() or "unknown"
    return "unknown"


if __name__ == "__main__":
    sys.exit(main())
