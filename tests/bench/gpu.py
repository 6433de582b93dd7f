# SPDX-License-Identifier: Apache-2.0
"""Everything about speed on one GPU, in one command, on a machine with nothing but PyTorch and Triton.

Correctness comes first: nothing is timed unless every form equals its reference in float32, float16 and bfloat16, and
no phase of the engine unless it makes the same greedy tokens with and without graphs. Weights are random, in the shape
of Llama-3.1-8B, and made on the device. The engine's phases need what the engine imports (tqdm, safetensors,
huggingface_hub) besides, peers what they are. Packages of Quire are taken from the folder that this file is in.

Results are written as they come, so that a run that is cut short, also by SIGTERM, keeps what it has. After a phase
that fails the next ones run all the same, and the exit code is 1; behind a red gate nothing runs.
"""

import argparse
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OVERTIME_S = 15.0
"""After the budget: what goes on is told on stderr, line by line."""
sys.path[:0] = [str(ROOT / "backend"), str(ROOT / "kernels"), str(Path(__file__).parent)]

from gpu_phases import EXAMPLES, PHASES, QUICK, ordered, table  # noqa: E402


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; needs no torch."""
    form = argparse.RawDescriptionHelpFormatter
    about = f"{__doc__}\n{table()}"
    parser = argparse.ArgumentParser(prog="gpu.py", description=about, epilog=EXAMPLES, formatter_class=form)
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="FILE", help="every number, as JSON")
    add("--markdown", type=Path, metavar="FILE", help="tables for docs/benchmarks.md")
    add("--phases", metavar="A,B", help="in this order, behind the gate (default: all)")
    add("--quick", action="store_true", help="few shapes and one load; without --phases, the first ones only")
    add(
        "--budget-s",
        type=float,
        metavar="S",
        help="no phase, and no row of tune, starts so many seconds after the start",
    )
    gated = (
        "results of an earlier run: its gates count, if they were green, and of the same code, card, versions and forms"
    )
    add("--gated", type=Path, metavar="FILE", help=gated)
    add("--cpu-rehearsal", action="store_true", help="tiny shapes on a CPU, kernels interpreted; times mean nothing")
    other = "interpreter of an environment that has vllm (default: this one)"
    add("--vllm-python", metavar="FILE", default=sys.executable, help=other)
    add("--gate-share", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.phases = ordered(args.phases.split(",") if args.phases else QUICK if args.quick else PHASES)
    if unknown := set(args.phases) - set(PHASES):
        parser.error(f"--phases: {', '.join(sorted(unknown))}: there are {', '.join(PHASES)}")
    if args.budget_s is not None and args.budget_s <= 0:
        parser.error(f"--budget-s: {args.budget_s:g} is no time; give seconds")
    if args.gated and not args.gated.is_file():
        parser.error(f"--gated: {args.gated} is no file; give what an earlier run wrote with -o")
    if args.cpu_rehearsal:
        # The kernel language reads it when it is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch  # here, so that the help is there at once

    if not args.cpu_rehearsal and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --cpu-rehearsal runs the code without one")
    return args


def main() -> int:
    """Exit code 1 behind a red gate, or where a phase failed."""
    args = arguments()
    import torch
    from card import Card

    # Whatever the environment says: what is compared in float32 is computed in it.
    torch.set_float32_matmul_precision("highest")
    card = Card(torch.device("cpu" if args.cpu_rehearsal else "cuda"))
    if args.gate_share:
        return _check_share(args.gate_share, card)
    from gpu_bench import Bench, Options
    from gpu_report import markdown

    # Ends by an exception, so that what was started is ended and what was measured is written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.budget_s is not None:
        # Where it hangs, if it does: whoever ends it then learns nothing else.
        faulthandler.dump_traceback_later(args.budget_s + OVERTIME_S)
    bench = Bench(card, Options(args.quick, args.output, args.vllm_python, args.budget_s, args.gated))
    try:
        with torch.inference_mode():
            return bench.run(args.phases)
    finally:
        bench.write()
        text = markdown(bench.results)
        if args.markdown:
            args.markdown.write_text(text)
        print(text, flush=True)


def _check_share(text: str, card: "Card") -> int:  # noqa: F821  torch is not imported for the help
    """What each of the gate's processes does."""
    import gpu_gate
    import gpu_verdict
    import torch

    gpu_verdict.tell_where_it_hangs()
    with torch.inference_mode():
        findings = list(gpu_gate.check_all(card, gpu_gate.Share(*map(int, text.split("/")))))
    print(json.dumps([asdict(finding) for finding in findings]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
