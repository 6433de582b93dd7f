# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark: one trace, one set of weights, several engines in alternating runs.

Engines: Quire offline and through the real server (HTTP, gRPC, OpenAI), transformers.generate in static batches, and
vLLM offline and as `vllm serve`, and OpenVINO GenAI, if environments have them. No speed is reported unless outputs are
correct. See docs/benchmarks.md.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import command_line
import random_checkpoint
import report
from child import ChildFailed, ChildProcess
from engines import (
    ENGINE_NAMES,
    ENGINES_WITH_RATES,
    PEERS,
    PROTOCOLS,
    ROOT,
    BenchmarkEngine,
    check_float32,
    check_gap,
    running_engines,
)
from measure import MAX_GAP, MAX_QUANTIZED_GAP, WrongOutput, kv_usage, measure
from tqdm import tqdm
from workload import Request, Workload

FORMAT = 1
"""Of results.json; raise it with any change of meaning."""
NUM_CHECKED = 4
MAX_WARM_UP_TOKENS = 32
"""Of an output."""
WARM_UP = -1
"""The round that does not count; its outputs are checked."""

EXAMPLES = """\
examples:
  python tests/bench/serving.py --model examples/models/tiny --requests 8 --runs 1      does everything work?
  python tests/bench/serving.py --shape 135m -o results.json
  python tests/bench/serving.py --shape 135m --rates 1,2,4 --engines offline,http
  python tests/bench/serving.py --shape 135m --vllm-python ~/vllm/bin/python --markdown docs/benchmarks.md
  python tests/bench/serving.py --shape 135m --engines offline,openvino --openvino-python ~/openvino/bin/python

Run it on a machine that does nothing else: the load before and after is part of the report.
"""


def run_benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Start everything, check, measure; the results document.

    Raises:
        WrongOutput: an engine generates something wrong.
        ChildFailed: a process failed.
    """
    settings = {name: getattr(args, name) for name in ("dtype", "max_num_seqs", "max_num_batched_tokens")}
    settings |= {
        "model": str((args.model or random_checkpoint.cached_checkpoint(args.shape)).resolve()),
        "block_size": 16,
    }
    settings |= {"quantization": args.quantization} if args.quantization else {}
    pythons = {name: getattr(args, f"{name}_python") for name in {*PEERS.values()}}
    vocab_size = json.loads(Path(settings["model"], "config.json").read_text())["vocab_size"]
    workload = Workload(args.requests, args.prompt_tokens, args.output_tokens, vocab_size, args.seed)
    names = args.engines or [name for name in ENGINE_NAMES if name not in PEERS or pythons[PEERS[name]]]
    results = {"format": FORMAT, **environment_info(), "settings": settings}
    workload_fields = ("requests", "prompt_tokens", "output_tokens", "rates", "runs", "prefix_tokens", "seed")
    results["workload"] = {name: getattr(args, name) for name in workload_fields}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-")))
        oracle_settings = {"model": settings["model"], "dtype": "float32", "batch": 1}
        with ChildProcess("oracle", "static_batches.py", oracle_settings, folder) as oracle:
            # All load at the same time: reading weights and importing torch keeps one core busy for each.
            log(f"loading {', '.join(names)}")
            children = stack.enter_context(running_engines(names, settings, pythons, folder))
            checked_requests = warm_up_requests(workload)[:NUM_CHECKED] if {"offline", *PROTOCOLS} & set(names) else []
            if checked_requests:
                log("checking this engine against transformers, both in float32")
                check_float32(settings["model"], checked_requests, oracle, folder)
            results["about"] = {name: engine.about() for name, engine in children.items()}
            log("warming up, and checking what each generates")
            max_gap = MAX_QUANTIZED_GAP if args.quantization else MAX_GAP
            if args.quantization == "int4":
                oracle.call("round_to_int4")
            gaps: dict[str, float] = {}
            for name, engine in children.items():
                requests, token_ids = _warm_up(engine, workload)
                # OpenVINO rounds to other 4 bits than the oracle. With random weights, that alone changes its tokens.
                if (name, args.quantization) != ("openvino", "int4"):
                    gaps[name] = check_gap(name, requests, token_ids, oracle, max_gap)
        results["check"] = {"requests": len(checked_requests), "max_gap": max_gap, "gaps": gaps}
        results["runs"], results["kv"] = _run_rounds(children, workload, args)
        results["prefix"] = _measure_prefix(children, workload, args) if args.prefix_tokens else []
        memory_report = children["offline"].child.call("memory") if "offline" in children else None
        pss = {name: engine.pss_bytes() for name, engine in children.items()}
        results["memory"] = {"pss": pss, "offline": memory_report}
    results["machine"]["load"].append(os.getloadavg()[0])
    return results | report.summarize(results["runs"])


def warm_up_requests(workload: Workload) -> list[Request]:
    """The requests of the run that does not count."""
    return [Request(prompt, min(num_tokens, MAX_WARM_UP_TOKENS)) for prompt, num_tokens in workload.requests(WARM_UP)]


def _warm_up(engine: BenchmarkEngine, workload: Workload) -> tuple[list[Request], list[list[int]]]:
    """A run that does not count; some of its requests, and their outputs.

    Of all requests, so that everything is allocated that a run needs, but with short outputs: a third of its time.
    """
    requests = warm_up_requests(workload)
    reply = engine.run(requests)
    measure(requests, None, reply)
    return requests[:NUM_CHECKED], reply["token_ids"][:NUM_CHECKED]


def _run_rounds(
    children: dict[str, BenchmarkEngine], workload: Workload, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """The numbers of every run, and the KV samples of the last offline one.

    A B A B: in every round each engine once with all requests at once, then once for each rate.
    """
    loads = [(round, rate) for round in range(args.runs) for rate in (None, *args.rates)]
    schedule = [(*load, name) for load in loads for name in children if load[1] is None or name in ENGINES_WITH_RATES]
    runs: list[dict[str, Any]] = []
    kv: list[dict[str, float]] = []
    for round, rate, name in (bar := tqdm(schedule, unit="run", dynamic_ncols=True)):
        bar.set_description(f"{name}, {'all at once' if rate is None else f'{rate:g} requests/s'}")
        requests = workload.requests(round, rate)
        offsets = None if rate is None else workload.offsets(rate, round, rate)
        reply = children[name].run(requests, offsets)
        runs.append({"engine": name, "rate": rate, "round": round, **measure(requests, offsets, reply)})
        kv = kv_usage(requests, reply) if "kv" in reply else kv
    return runs, kv


def _measure_prefix(
    children: dict[str, BenchmarkEngine], workload: Workload, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """TTFT of a long prompt, and of a second one with the same first tokens. The first pair does not count."""
    log("a shared prefix")
    ttfts_by_engine: dict[str, list[list[float]]] = {name: [] for name in children if name != "transformers"}
    for round in range(WARM_UP, args.runs):
        prefix_requests = workload.prefix_pair(args.prefix_tokens, round)
        for name, times in ttfts_by_engine.items():
            offsets = [0.0] if name in ENGINES_WITH_RATES else None
            times.append(
                [1e3 * children[name].run([request], offsets)["events"][0][0][0] for request in prefix_requests]
            )
    rows = []
    for name, (_, *times) in ttfts_by_engine.items():
        first, second, ratio = map(statistics.median, zip(*((a, b, b / a) for a, b in times), strict=True))
        rows.append({"engine": name, "first_ms": first, "second_ms": second, "ratio": ratio})
    return rows


def environment_info() -> dict[str, Any]:
    """Return the context that a measurement needs to be meaningful."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty= with uncommitted changes"]
    cpu = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().replace("\t", "").splitlines() if line)
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "command": shlex.join(["python", f"tests/bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown",
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "nvidia-pytriton")},
        "machine": {
            "cpu": cpu.get("model name", "unknown processor").strip(),
            "flags": sorted(
                {"amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2"} & set(cpu.get("flags", "").split())
            ),
            "num_cpus": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "load": [os.getloadavg()[0]],
        },
    }


def log(what: str) -> None:
    """Progress, on stderr."""
    print(f"serving: {what}", file=sys.stderr, flush=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked as far as it can be without loading anything."""
    parser = command_line.new_parser("serving.py", __doc__, EXAMPLES)
    command_line.add_engine_options(parser)
    parser.set_defaults(prompt_tokens="32-256", output_tokens="32-128", runs=3)
    add = parser.add_argument
    names = ",".join(ENGINE_NAMES)
    add("--engines", type=lambda text: text.split(","), metavar="A,B", help=f"engines: {names} (default: all)")
    add(
        "--rates",
        type=_parse_rates,
        default=[],
        metavar="R,R",
        help="also R requests per second, a Poisson process",
    )
    add(
        "--prefix-tokens", type=int, default=1500, metavar="N", help="tokens of a shared prefix; 0: none (default 1500)"
    )
    add("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16 or float16")
    add("--max-num-seqs", type=int, default=64, metavar="N", help="sequences in a step (default 64)")
    add("--max-num-batched-tokens", type=int, default=2048, metavar="N", help="tokens in a step (default 2048)")
    add("--quantization", choices=("int8", "int4"), help="weights of this engine and of OpenVINO, quantized at load")
    add("--openvino-python", metavar="FILE", help="interpreter of OpenVINO GenAI's environment; adds openvino")
    args = command_line.parse_engine_options(parser, argv, ())
    if unknown := sorted(set(args.engines or ()) - set(ENGINE_NAMES)):
        parser.error(f"--engines: {unknown[0]!r} is not one of {names}")
    for name in args.engines or ():
        if name in PEERS and not getattr(args, f"{PEERS[name]}_python"):
            parser.error(f"--engines: {name} needs --{PEERS[name]}-python")
        if args.quantization and name not in ("offline", *PROTOCOLS, "openvino"):
            parser.error(f"--quantization: {name} cannot quantize weights; leave it out of --engines")
    if args.quantization and not args.engines:
        parser.error("--quantization: give --engines, for example offline,openvino")
    if min(args.rates, default=1) <= 0:
        parser.error("--rates must be positive")
    return args


def _parse_rates(text: str) -> list[float]:
    return [float(rate) for rate in text.split(",")]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report; every process that was started has ended afterwards."""
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        results = run_benchmark(args)
    except (WrongOutput, ChildFailed) as error:
        raise SystemExit(f"serving: no speed is reported: {error}") from error
    command_line.publish("serving.py", args, results, report.format_report(results))


def _terminate(*_: object) -> None:
    """End as Control-C does: by unwinding, so that every process ends too."""
    log("terminated")
    sys.exit(143)


if __name__ == "__main__":
    main()
