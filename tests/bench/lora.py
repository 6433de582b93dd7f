# SPDX-License-Identifier: Apache-2.0
"""What adapters cost: a batch of many against the same engine's base, and against vLLM with the same adapters.

Every round runs each row, one engine at a time, the others stopped, in another order each time, after a short run that
wakes it; ratios are of the same round. This engine's rows run several times a round, and their median counts. No speed
is reported unless the adapters' outputs are right: in float32 token for token peft's, unmerged, and as measured within
the rounding of peft's logits. residency.py measures what loading adapters costs.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import adapters
import checkpoint
import report
from child import Child, ChildFailed
from measure import MAX_GAP, WrongOutput, measure, spread
from serving import circumstances
from tqdm import tqdm
from workload import Request, Workload

BEGIN, END = "<!-- results of tests/bench/lora.py: begin -->", "<!-- results of tests/bench/lora.py: end -->"
NUM_CHECKED = 4
NUM_CHECKED_TOKENS = 16
NUM_WAKING_TOKENS = 4
WARM_UP = -1

EXAMPLES = """\
examples:
  python tests/bench/lora.py --shape 135m                                          against this engine's own base
  python tests/bench/lora.py --shape 135m --vllm-python ~/vllm/bin/python --markdown docs/benchmarks.md
  python tests/bench/lora.py --model examples/models/tiny --runs 1 --requests 8 --adapters 4    does everything work?
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that is measured."""

    name: str
    engine: str
    adapted: bool
    """Each request with an adapter; False: all with the base model."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a ratio of two rows' tokens/s has to be."""

    of: str
    to: str
    bar: float
    aim: float


ROWS = (
    Row("base, LoRA disabled", "plain", adapted=False),
    Row("base, LoRA enabled", "lora", adapted=False),
    Row("adapters", "lora", adapted=True),
    Row("vLLM, base, LoRA enabled", "vllm", adapted=False),
    Row("vLLM, adapters", "vllm", adapted=True),
)
BARS = (
    Bar("adapters", "base, LoRA disabled", 0.75, 0.9),
    Bar("base, LoRA enabled", "base, LoRA disabled", 0.98, 1.0),
    Bar("adapters", "vLLM, adapters", 8.0, 12.0),
)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start everything, check, measure; the results document.

    Raises:
        WrongOutput: an engine generates something wrong.
        ChildFailed: a process failed.
    """
    model = (args.model or checkpoint.cached(args.shape)).resolve()
    made = adapters.make(model, model.parent / f"{model.name}-adapters", args.adapters, args.rank)
    folders = [str(folder) for folder in made]
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    work = Workload(args.requests, args.prompt_tokens, args.output_tokens, vocab_size, args.seed)
    results = {**circumstances(), "adapters": args.adapters, "rank": args.rank}
    settings = ("requests", "prompt_tokens", "output_tokens", "runs", "repeats", "seed")
    results["workload"] = {name: getattr(args, name) for name in settings}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-")))
        say("checking this engine's adapters against peft, both in float32")
        own = {"model": str(model), "dtype": "float32", "batch": 1, "adapters": folders[:NUM_CHECKED]}
        with Child("peft", "static_batches.py", own, folder) as oracle:
            _check_float32(model, args, folders, work, oracle, folder)
            say("loading")
            running = {
                name: stack.enter_context(Child(name, *rest)) for name, rest in _children(model, args, folder).items()
            }
            rows = [row for row in ROWS if row.engine in running]
            say("warming up, and checking what each generates")
            results["gap"] = max(_warm_up(row, running, folders, work, oracle) for row in rows)
        results["runs"] = _rounds(rows, running, folders, work, args)
    results["machine"]["load"].append(os.getloadavg()[0])
    return results


def _children(model: Path, args: argparse.Namespace, folder: Path) -> dict[str, tuple[Any, ...]]:
    """Arguments of each engine's process."""
    plain = {"model": str(model), "dtype": args.dtype, "max_num_seqs": args.requests}
    plain |= {"max_num_batched_tokens": 2048, "max_model_len": 1024}
    lora = plain | {"enable_lora": True, "max_loras": args.adapters, "max_lora_rank": args.rank}
    found: dict[str, tuple[Any, ...]] = {
        "plain": ("quire_offline.py", plain, folder),
        "lora": ("quire_offline.py", lora, folder),
    }
    if args.vllm_python:
        found["vllm"] = ("vllm_offline.py", lora, folder, args.vllm_python)
    return found


def _each(folders: Sequence[str], requests: Sequence[Request]) -> list[str]:
    """The adapter of each request, in turn."""
    return [folders[i % len(folders)] for i in range(len(requests))]


def _check_float32(
    model: Path, args: argparse.Namespace, folders: Sequence[str], work: Workload, oracle: Child, folder: Path
) -> None:
    requests = [Request(p, NUM_CHECKED_TOKENS) for p, _ in work.requests(WARM_UP)[:NUM_CHECKED]]
    each = _each(folders[:NUM_CHECKED], requests)
    settings = {"model": str(model), "dtype": "float32", "enable_lora": True, "max_loras": NUM_CHECKED}
    settings |= {"max_lora_rank": args.rank, "max_model_len": 1024}
    with Child("float32", "quire_offline.py", settings, folder) as ours:
        found = ours.call("run", requests=requests, offsets=None, adapters=each)["token_ids"]
        base = ours.call("run", requests=requests, offsets=None)["token_ids"]
    wanted = oracle.call("adapted", requests=requests, adapters=each)
    if found != wanted:
        raise WrongOutput(f"in float32, with adapters: this engine generates {found}, peft {wanted}")
    if any(a == b for a, b in zip(found, base, strict=True)):
        raise WrongOutput("an adapter changes nothing of what is generated; it would not be missed")


def _run(row: Row, running: dict[str, Child], folders: Sequence[str], requests: Sequence[Request]) -> dict[str, Any]:
    each = _each(folders, requests) if row.adapted else None
    reply = running[row.engine].call("run", requests=requests, offsets=None, adapters=each)
    return measure(requests, None, reply) | {"row": row.name, "token_ids": reply["token_ids"]}


def _warm_up(row: Row, running: dict[str, Child], folders: Sequence[str], work: Workload, oracle: Child) -> float:
    """A run that does not count; the worst gap of its first outputs to peft's logits in float32."""
    requests = [Request(p, NUM_CHECKED_TOKENS) for p, _ in work.requests(WARM_UP)]
    token_ids = _run(row, running, folders, requests)["token_ids"]
    if not row.adapted:
        return 0.0
    checked = zip(requests[:NUM_CHECKED], token_ids, _each(folders, requests), strict=False)
    gap = max(oracle.call("worst_gap", prompt=r.prompt_token_ids, output=ids, adapter=a) for r, ids, a in checked)
    if gap > MAX_GAP:
        raise WrongOutput(f"{row.name}: a token is {gap:.2f} deviations below peft's likeliest; {MAX_GAP} at most")
    return float(gap)


def _rounds(
    rows: Sequence[Row], running: dict[str, Child], folders: Sequence[str], work: Workload, args: argparse.Namespace
) -> list[dict[str, Any]]:
    runs = []
    for round in tqdm(range(args.runs), unit="round", dynamic_ncols=True):
        # Each comes first in its turn, and none begins cold: its process was stopped while the others ran.
        turn = round % len(rows)
        found: dict[str, list[dict[str, Any]]] = {row.name: [] for row in rows}
        for repeat in range(args.repeats):
            for row in (*rows[turn:], *rows[:turn]):
                if row.engine == "vllm" and repeat:
                    continue
                waking = [Request(p, NUM_WAKING_TOKENS) for p, _ in work.requests(WARM_UP - 1 - round, repeat)]
                _run(row, running, folders, waking)
                one = _run(row, running, folders, work.requests(round, repeat))
                del one["token_ids"]
                found[row.name].append(one | {"round": round})
        for ones in found.values():
            runs.append(sorted(ones, key=_speed)[len(ones) // 2])
    return runs


def _speed(one: dict[str, Any]) -> float:
    return float(one["output_tokens_per_s"])


def text(results: dict[str, Any]) -> str:
    """The tables, and what a reader needs to judge them."""
    machine, work = results["machine"], results["workload"]
    speeds: dict[str, list[float]] = {}
    for one in results["runs"]:
        speeds.setdefault(one["row"], []).append(_speed(one))
    rows = [[name, f"{statistics.median(v):.1f}", f"{min(v):.1f}-{max(v):.1f}"] for name, v in speeds.items()]
    ratios = []
    for bar in BARS:
        if bar.of in speeds and bar.to in speeds:
            s = spread([a / b for a, b in zip(speeds[bar.of], speeds[bar.to], strict=True)])
            cells = [f"{s['median']:.2f}", f"{s['min']:.2f}-{s['max']:.2f}", f"{bar.bar:g}", f"{bar.aim:g}"]
            ratios.append([f"{bar.of} / {bar.to}", *cells, "met" if s["median"] >= bar.bar else "missed"])
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    heading = (
        f"{machine['cpu']}, {machine['num_cpus']} CPUs ({', '.join(machine['flags'])}), load {machine['load'][0]:.1f} "
        f"before and {machine['load'][1]:.1f} after; {versions}; {results['when']};\ncommit {results['commit']}.\n"
        f"{results['adapters']} adapters of rank {results['rank']} on all linears; {work['requests']} requests, "
        f"prompts of {'-'.join(map(str, work['prompt_tokens']))} and outputs of "
        f"{'-'.join(map(str, work['output_tokens']))} "
        f"tokens, greedy, all at once; medians of {work['runs']} alternating rounds, in each of\n"
        f"them of {work['repeats']} runs of this engine.\nChecked: in float32, outputs of "
        f"{NUM_CHECKED} adapters equal peft's; those measured are within {results['gap']:.2f} deviations of its logits."
    )
    head = ["output tokens/s in the same round", "ratio", "least-most", "bar", "aim", ""]
    return "\n\n".join(
        [heading, report.table(["what", "output tokens/s", "least-most"], rows), report.table(head, ratios)]
    )


def say(what: str) -> None:
    """Progress, on stderr."""
    print(f"lora: {what}", file=sys.stderr, flush=True)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="lora.py", description=__doc__, epilog=EXAMPLES, formatter_class=form)
    model, add = parser.add_mutually_exclusive_group(required=True), parser.add_argument
    model.add_argument("--model", type=Path, metavar="DIR", help="a Llama checkpoint in Hugging Face format")
    model.add_argument("--shape", choices=checkpoint.SHAPES, help="random weights of a shape, made once and kept")
    add("--vllm-python", metavar="FILE", help="interpreter of an environment that has vllm; adds vllm")
    add("--adapters", type=int, default=16, metavar="N", help="different ones in a batch (default 16)")
    add("--rank", type=int, default=16, metavar="R", help="of every adapter (default 16)")
    add("--requests", type=int, default=64, metavar="N", help="of a run, all at once (default 64)")
    add("--prompt-tokens", type=_bounds, default="32-64", metavar="A-B", help="of a prompt (default 32-64)")
    add("--output-tokens", type=_bounds, default="32-64", metavar="A-B", help="of an output (default 32-64)")
    add("--runs", type=int, default=5, metavar="N", help="rounds; in each, every row runs once (default 5)")
    add("--repeats", type=int, default=3, metavar="N", help="runs of each of our rows in a round; their median counts")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and lengths (default 0)")
    add("--dtype", default="bfloat16", help="bfloat16 (default), float32 or float16")
    add("-o", "--output", type=Path, metavar="FILE", help="write everything as JSON")
    add("--markdown", type=Path, metavar="FILE", help="put the tables between the marks of this document")
    args = parser.parse_args(argv)
    if args.vllm_python and not os.access(args.vllm_python, os.X_OK):
        parser.error(f"--vllm-python: {args.vllm_python!r} is no program; give the python of an environment with vllm")
    if args.model and not (args.model / "config.json").is_file():
        parser.error(f"--model: {args.model} holds no config.json; give the folder of a checkpoint")
    if min(args.requests, args.runs, args.repeats, args.adapters, args.rank) <= 0:
        parser.error("--requests, --runs, --repeats, --adapters and --rank must be positive")
    return args


def _bounds(value: str) -> tuple[int, int]:
    low, _, high = value.partition("-")
    if not (value.replace("-", "", 1).isdigit() and 1 <= int(low) <= int(high or low)):
        raise argparse.ArgumentTypeError(f"{value!r} is not A-B with 1 <= A <= B, for example 32-64")
    return int(low), int(high or low)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report; every process that was started has ended afterwards."""
    args = arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        results = run(args)
    except (WrongOutput, ChildFailed) as error:
        raise SystemExit(f"lora: no speed is reported: {error}") from error
    print(text(results))
    if args.output:
        args.output.write_text(json.dumps(results, indent=1))
    if args.markdown:
        report.put(args.markdown, BEGIN, END, f"```\n{results['command']}\n```\n\n{text(results)}")


if __name__ == "__main__":
    main()
