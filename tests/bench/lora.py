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

import command_line
import random_adapters
import random_checkpoint
import report
from child import ChildFailed, ChildProcess
from measure import MAX_GAP, WrongOutput, measure, summarize_spread
from serving import environment_info
from tqdm import tqdm
from workload import Request, Workload

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
    adapters: str | None = None
    """Each request with an adapter of this kind: lora or dora. None: all with the base model."""


@dataclass(frozen=True, slots=True)
class SpeedTarget:
    """Required ratio of two rows' tokens/s."""

    numerator: str
    denominator: str
    minimum: float
    goal: float
    quantized: tuple[float, float] | None = None
    """The minimum and the goal with --quantization; None: the same."""


SCENARIOS = (
    Scenario("base, LoRA disabled", "plain"),
    Scenario("base, LoRA enabled", "lora"),
    Scenario("adapters", "lora", "lora"),
    Scenario("DoRA adapters", "lora", "dora"),
    Scenario("vLLM, base, LoRA enabled", "vllm"),
    Scenario("vLLM, adapters", "vllm", "lora"),
)
SPEED_TARGETS = (
    SpeedTarget("adapters", "base, LoRA disabled", 0.92, 0.97, quantized=(0.88, 0.95)),
    SpeedTarget("DoRA adapters", "adapters", 0.95, 0.99),
    SpeedTarget("base, LoRA enabled", "base, LoRA disabled", 0.98, 1.0),
    SpeedTarget("adapters", "vLLM, adapters", 10.0, 14.0),
)


def run_benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Start everything, check, measure; the results document.

    Raises:
        WrongOutput: an engine generates something wrong.
        ChildFailed: a process failed.
    """
    model = (args.model or random_checkpoint.cached_checkpoint(args.shape)).resolve()
    adapters_folder = model.parent / f"{model.name}-adapters"
    folders = {
        kind: [
            str(folder)
            for folder in random_adapters.make_adapters(
                model, adapters_folder, args.adapters, args.rank, use_dora=kind == "dora"
            )
        ]
        for kind in ("lora", "dora")
    }
    checked = [folder for of_kind in folders.values() for folder in of_kind[:NUM_CHECKED]]
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    workload = Workload(args.requests, args.prompt_tokens, args.output_tokens, vocab_size, args.seed)
    results = {**environment_info(), "adapters": args.adapters, "rank": args.rank, "quantization": args.quantization}
    settings = ("requests", "prompt_tokens", "output_tokens", "runs", "repeats", "seed")
    results["workload"] = {name: getattr(args, name) for name in settings}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-")))
        log("checking this engine's adapters against peft, both in float32")
        oracle_settings = {"model": str(model), "dtype": "float32", "batch": 1, "adapters": checked}
        with ChildProcess("peft", "static_batches.py", oracle_settings, folder) as oracle:
            for of_kind in folders.values():
                _check_float32(model, args, of_kind, workload, oracle, folder)
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
    plain |= {"quantization": args.quantization} if args.quantization else {}
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
    scenario: Scenario,
    children: dict[str, ChildProcess],
    folders: dict[str, list[str]],
    requests: Sequence[Request],
) -> dict[str, Any]:
    adapters_of_requests = _adapters_of(folders[scenario.adapters], requests) if scenario.adapters else None
    reply = children[scenario.engine].call("run", requests=requests, offsets=None, adapters=adapters_of_requests)
    return measure(requests, None, reply) | {"row": scenario.name, "token_ids": reply["token_ids"]}


def _warm_up(
    scenario: Scenario,
    children: dict[str, ChildProcess],
    folders: dict[str, list[str]],
    workload: Workload,
    oracle: ChildProcess,
) -> float:
    """A run that does not count; the worst gap of its first outputs to peft's logits in float32."""
    requests = [Request(p, NUM_CHECKED_TOKENS) for p, _ in workload.requests(WARM_UP)]
    token_ids = _run_scenario(scenario, children, folders, requests)["token_ids"]
    if not scenario.adapters:
        return 0.0
    checked = zip(requests[:NUM_CHECKED], token_ids, _adapters_of(folders[scenario.adapters], requests), strict=False)
    gap = max(oracle.call("worst_gap", prompt=r.prompt_token_ids, output=ids, adapter=a) for r, ids, a in checked)
    if gap > MAX_GAP:
        raise WrongOutput(f"{scenario.name}: a token is {gap:.2f} deviations below peft's likeliest; {MAX_GAP} at most")
    return float(gap)


def _run_rounds(
    scenarios: Sequence[Scenario],
    children: dict[str, ChildProcess],
    folders: dict[str, list[str]],
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
    workload = results["workload"]
    tokens_per_s: dict[str, list[float]] = {}
    for result in results["runs"]:
        tokens_per_s.setdefault(result["row"], []).append(_tokens_per_s(result))
    rows = [[name, f"{statistics.median(v):.1f}", f"{min(v):.1f}-{max(v):.1f}"] for name, v in tokens_per_s.items()]
    ratios = []
    for bar in SPEED_TARGETS:
        if bar.numerator in tokens_per_s and bar.denominator in tokens_per_s:
            pairs = zip(tokens_per_s[bar.numerator], tokens_per_s[bar.denominator], strict=True)
            spread = summarize_spread([a / b for a, b in pairs])
            minimum, goal = (results["quantization"] and bar.quantized) or (bar.minimum, bar.goal)
            outcome = "met" if spread["median"] >= minimum else "missed"
            cells = [f"{spread['median']:.2f}", f"{spread['min']:.2f}-{spread['max']:.2f}"]
            cells += [f"{minimum:g}", f"{goal:g}", outcome]
            ratios.append([f"{bar.numerator} / {bar.denominator}", *cells])
    heading = (
        f"{report.environment_line(results)}"
        f"{'Weights of the base: ' + results['quantization'] + '. ' if results['quantization'] else ''}"
        f"{results['adapters']} adapters of rank {results['rank']} on all linear layers; {workload['requests']} "
        f"requests, {report.lengths(workload)}, all at once. Each value is the median of {workload['runs']} "
        f"alternating\nrounds. In each round, Quire runs {workload['repeats']} times, and the median of these runs "
        "counts.\n"
        f"Checked: in float32, the outputs of {NUM_CHECKED} adapters equal those of peft. In the measured dtype, the "
        f"logit of each checked token is at most {results['gap']:.2f} standard\ndeviations below the highest logit "
        "of peft in float32."
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
    parser = command_line.new_parser("lora.py", __doc__, EXAMPLES)
    command_line.add_engine_options(parser)
    parser.set_defaults(prompt_tokens="32-64", output_tokens="32-64", runs=5)
    add = parser.add_argument
    add("--adapters", type=int, default=16, metavar="N", help="different adapters in a batch (default 16)")
    add("--rank", type=int, default=16, metavar="R", help="LoRA rank of each adapter (default 16)")
    add("--repeats", type=int, default=3, metavar="N", help="runs of Quire per row and round; their median is used")
    add("--dtype", default="bfloat16", help="bfloat16 (default), float32 or float16")
    add("--quantization", metavar="NAME", help="int8, int4 or fp8: quantize the base's weights; not with vLLM")
    return command_line.parse_engine_options(parser, argv, ("repeats", "adapters", "rank"))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report; every process that was started has ended afterwards."""
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        results = run_benchmark(args)
    except (WrongOutput, ChildFailed) as error:
        raise SystemExit(f"lora: no speed is reported: {error}") from error
    command_line.publish("lora.py", args, results, format_report(results))


if __name__ == "__main__":
    main()
