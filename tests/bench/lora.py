# SPDX-License-Identifier: Apache-2.0
"""Cost of adapters: a batch with many adapters against the same engine's base, and against vLLM with the same adapters.

Every round runs each row, one engine at a time while the others are stopped, in a different order, after a short
warm-up run; ratios are of the same round. This engine's rows run several times a round, and their median counts. No
speed is reported unless the adapters' outputs are correct: in float32 equal to unmerged peft token by token, and in the
measured dtype within the rounding of peft's logits. residency.py measures the cost of loading adapters.
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

import random_adapters
import random_checkpoint
import report
from child import ChildFailed, ChildProcess
from measure import MAX_GAP, WrongOutput, measure, summarize_spread
from serving import environment_info
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
class Scenario:
    """One measured configuration."""

    name: str
    engine: str
    uses_adapters: bool
    """Each request with an adapter; False: all with the base model."""


@dataclass(frozen=True, slots=True)
class SpeedTarget:
    """Required ratio of two rows' tokens/s."""

    numerator: str
    denominator: str
    minimum: float
    goal: float


SCENARIOS = (
    Scenario("base, LoRA disabled", "plain", uses_adapters=False),
    Scenario("base, LoRA enabled", "lora", uses_adapters=False),
    Scenario("adapters", "lora", uses_adapters=True),
    Scenario("vLLM, base, LoRA enabled", "vllm", uses_adapters=False),
    Scenario("vLLM, adapters", "vllm", uses_adapters=True),
)
SPEED_TARGETS = (
    SpeedTarget("adapters", "base, LoRA disabled", 0.75, 0.9),
    SpeedTarget("base, LoRA enabled", "base, LoRA disabled", 0.98, 1.0),
    SpeedTarget("adapters", "vLLM, adapters", 8.0, 12.0),
)


def run_benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Start everything, check, measure; the results document.

    Raises:
        WrongOutput: an engine generates something wrong.
        ChildFailed: a process failed.
    """
    model = (args.model or random_checkpoint.cached_checkpoint(args.shape)).resolve()
    adapter_folders = random_adapters.make_adapters(
        model, model.parent / f"{model.name}-adapters", args.adapters, args.rank
    )
    folders = [str(folder) for folder in adapter_folders]
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    workload = Workload(args.requests, args.prompt_tokens, args.output_tokens, vocab_size, args.seed)
    results = {**environment_info(), "adapters": args.adapters, "rank": args.rank}
    settings = ("requests", "prompt_tokens", "output_tokens", "runs", "repeats", "seed")
    results["workload"] = {name: getattr(args, name) for name in settings}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-")))
        log("checking this engine's adapters against peft, both in float32")
        oracle_settings = {"model": str(model), "dtype": "float32", "batch": 1, "adapters": folders[:NUM_CHECKED]}
        with ChildProcess("peft", "static_batches.py", oracle_settings, folder) as oracle:
            _check_float32(model, args, folders, workload, oracle, folder)
            log("loading")
            children = {
                name: stack.enter_context(ChildProcess(name, *available))
                for name, available in _children(model, args, folder).items()
            }
            scenarios = [scenario for scenario in SCENARIOS if scenario.engine in children]
            log("warming up, and checking what each generates")
            results["gap"] = max(_warm_up(row, children, folders, workload, oracle) for row in scenarios)
        results["runs"] = _run_rounds(scenarios, children, folders, workload, args)
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


def _adapters_of(folders: Sequence[str], requests: Sequence[Request]) -> list[str]:
    """The adapter of each request, in turn."""
    return [folders[i % len(folders)] for i in range(len(requests))]


def _check_float32(
    model: Path,
    args: argparse.Namespace,
    folders: Sequence[str],
    workload: Workload,
    oracle: ChildProcess,
    folder: Path,
) -> None:
    requests = [Request(p, NUM_CHECKED_TOKENS) for p, _ in workload.requests(WARM_UP)[:NUM_CHECKED]]
    adapters_of_requests = _adapters_of(folders[:NUM_CHECKED], requests)
    settings = {"model": str(model), "dtype": "float32", "enable_lora": True, "max_loras": NUM_CHECKED}
    settings |= {"max_lora_rank": args.rank, "max_model_len": 1024}
    with ChildProcess("float32", "quire_offline.py", settings, folder) as child:
        outputs = child.call("run", requests=requests, offsets=None, adapters=adapters_of_requests)["token_ids"]
        base_outputs = child.call("run", requests=requests, offsets=None)["token_ids"]
    expected = oracle.call("adapted", requests=requests, adapters=adapters_of_requests)
    if outputs != expected:
        raise WrongOutput(f"in float32, with adapters: this engine generates {outputs}, peft {expected}")
    if any(a == b for a, b in zip(outputs, base_outputs, strict=True)):
        raise WrongOutput("an adapter changes nothing of what is generated; it would not be missed")


def _run_scenario(
    scenario: Scenario, children: dict[str, ChildProcess], folders: Sequence[str], requests: Sequence[Request]
) -> dict[str, Any]:
    adapters_of_requests = _adapters_of(folders, requests) if scenario.uses_adapters else None
    reply = children[scenario.engine].call("run", requests=requests, offsets=None, adapters=adapters_of_requests)
    return measure(requests, None, reply) | {"row": scenario.name, "token_ids": reply["token_ids"]}


def _warm_up(
    scenario: Scenario,
    children: dict[str, ChildProcess],
    folders: Sequence[str],
    workload: Workload,
    oracle: ChildProcess,
) -> float:
    """A run that does not count; the worst gap of its first outputs to peft's logits in float32."""
    requests = [Request(p, NUM_CHECKED_TOKENS) for p, _ in workload.requests(WARM_UP)]
    token_ids = _run_scenario(scenario, children, folders, requests)["token_ids"]
    if not scenario.uses_adapters:
        return 0.0
    checked = zip(requests[:NUM_CHECKED], token_ids, _adapters_of(folders, requests), strict=False)
    gap = max(oracle.call("worst_gap", prompt=r.prompt_token_ids, output=ids, adapter=a) for r, ids, a in checked)
    if gap > MAX_GAP:
        raise WrongOutput(f"{scenario.name}: a token is {gap:.2f} deviations below peft's likeliest; {MAX_GAP} at most")
    return float(gap)


def _run_rounds(
    scenarios: Sequence[Scenario],
    children: dict[str, ChildProcess],
    folders: Sequence[str],
    workload: Workload,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    runs = []
    for round in tqdm(range(args.runs), unit="round", dynamic_ncols=True):
        # Each row is first in one round, and is warmed up: its process was stopped while the others ran.
        turn = round % len(scenarios)
        results: dict[str, list[dict[str, Any]]] = {scenario.name: [] for scenario in scenarios}
        for repeat in range(args.repeats):
            for row in (*scenarios[turn:], *scenarios[:turn]):
                if row.engine == "vllm" and repeat:
                    continue
                waking = [Request(p, NUM_WAKING_TOKENS) for p, _ in workload.requests(WARM_UP - 1 - round, repeat)]
                _run_scenario(row, children, folders, waking)
                one = _run_scenario(row, children, folders, workload.requests(round, repeat))
                del one["token_ids"]
                results[row.name].append(one | {"round": round})
        for ones in results.values():
            runs.append(sorted(ones, key=_tokens_per_s)[len(ones) // 2])
    return runs


def _tokens_per_s(result: dict[str, Any]) -> float:
    return float(result["output_tokens_per_s"])


def format_report(results: dict[str, Any]) -> str:
    """The tables, and what a reader needs to judge them."""
    machine, workload = results["machine"], results["workload"]
    tokens_per_s: dict[str, list[float]] = {}
    for result in results["runs"]:
        tokens_per_s.setdefault(result["row"], []).append(_tokens_per_s(result))
    rows = [[name, f"{statistics.median(v):.1f}", f"{min(v):.1f}-{max(v):.1f}"] for name, v in tokens_per_s.items()]
    ratios = []
    for bar in SPEED_TARGETS:
        if bar.numerator in tokens_per_s and bar.denominator in tokens_per_s:
            scenario_spread = summarize_spread(
                [a / b for a, b in zip(tokens_per_s[bar.numerator], tokens_per_s[bar.denominator], strict=True)]
            )
            cells = [
                f"{scenario_spread['median']:.2f}",
                f"{scenario_spread['min']:.2f}-{scenario_spread['max']:.2f}",
                f"{bar.minimum:g}",
                f"{bar.goal:g}",
            ]
            ratios.append(
                [
                    f"{bar.numerator} / {bar.denominator}",
                    *cells,
                    "met" if scenario_spread["median"] >= bar.minimum else "missed",
                ]
            )
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    heading = (
        f"{machine['cpu']}, {machine['num_cpus']} CPUs ({', '.join(machine['flags'])}), load {machine['load'][0]:.1f} "
        f"before and {machine['load'][1]:.1f} after; {versions}; {results['when']};\ncommit {results['commit']}.\n"
        f"{results['adapters']} adapters of rank {results['rank']} on all linears; {workload['requests']} requests, "
        f"prompts of {'-'.join(map(str, workload['prompt_tokens']))} and outputs of "
        f"{'-'.join(map(str, workload['output_tokens']))} "
        f"tokens, greedy, all at once; medians of {workload['runs']} alternating rounds, in each of\n"
        f"them of {workload['repeats']} runs of this engine.\nChecked: in float32, outputs of "
        f"{NUM_CHECKED} adapters equal peft's; those measured are within {results['gap']:.2f} deviations of its logits."
    )
    head = ["output tokens/s in the same round", "ratio", "least-most", "bar", "aim", ""]
    return "\n\n".join(
        [
            heading,
            report.format_table(["what", "output tokens/s", "least-most"], rows),
            report.format_table(head, ratios),
        ]
    )


def log(what: str) -> None:
    """Progress, on stderr."""
    print(f"lora: {what}", file=sys.stderr, flush=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="lora.py", description=__doc__, epilog=EXAMPLES, formatter_class=formatter)
    model, add = parser.add_mutually_exclusive_group(required=True), parser.add_argument
    model.add_argument("--model", type=Path, metavar="DIR", help="a Llama checkpoint in Hugging Face format")
    model.add_argument(
        "--shape", choices=random_checkpoint.SHAPES, help="random weights of a shape, made once and kept"
    )
    add("--vllm-python", metavar="FILE", help="interpreter of an environment that has vllm; adds vllm")
    add("--adapters", type=int, default=16, metavar="N", help="different ones in a batch (default 16)")
    add("--rank", type=int, default=16, metavar="R", help="of every adapter (default 16)")
    add("--requests", type=int, default=64, metavar="N", help="of a run, all at once (default 64)")
    add("--prompt-tokens", type=_parse_bounds, default="32-64", metavar="A-B", help="of a prompt (default 32-64)")
    add("--output-tokens", type=_parse_bounds, default="32-64", metavar="A-B", help="of an output (default 32-64)")
    add("--runs", type=int, default=5, metavar="N", help="rounds; in each, every row runs once (default 5)")
    add("--repeats", type=int, default=3, metavar="N", help="runs of each of our rows in a round; their median counts")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and lengths (default 0)")
    add("--dtype", default="bfloat16", help="bfloat16 (default), float32 or float16")
    add("-o", "--output", type=Path, metavar="FILE", help="write everything as JSON")
    add("--markdown", type=Path, metavar="FILE", help="put the tables between the marks of this document")
    args = parser.parse_args(argv)
    if args.vllm_python and not os.access(args.vllm_python, os.X_OK):
        parser.error(
            f"--vllm-python: {args.vllm_python!r} is not an executable; give the python of an environment with vllm"
        )
    if args.model and not (args.model / "config.json").is_file():
        parser.error(f"--model: {args.model} contains no config.json; give the folder of a checkpoint")
    if min(args.requests, args.runs, args.repeats, args.adapters, args.rank) <= 0:
        parser.error("--requests, --runs, --repeats, --adapters and --rank must be positive")
    return args


def _parse_bounds(value: str) -> tuple[int, int]:
    low, _, high = value.partition("-")
    if not (value.replace("-", "", 1).isdigit() and 1 <= int(low) <= int(high or low)):
        raise argparse.ArgumentTypeError(f"{value!r} is not A-B with 1 <= A <= B, for example 32-64")
    return int(low), int(high or low)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report; every process that was started has ended afterwards."""
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        results = run_benchmark(args)
    except (WrongOutput, ChildFailed) as error:
        raise SystemExit(f"lora: no speed is reported: {error}") from error
    print(format_report(results))
    if args.output:
        args.output.write_text(json.dumps(results, indent=1))
    if args.markdown:
        report.replace_between(args.markdown, BEGIN, END, f"```\n{results['command']}\n```\n\n{format_report(results)}")


if __name__ == "__main__":
    main()
