# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark: one trace, one set of weights, several engines, runs that alternate.

Engines: this one offline and through the real server (HTTP and gRPC), transformers.generate in static batches, and
vLLM where an environment has it. No speed is reported unless outputs are right. docs/benchmarks.md says more.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import checkpoint
import plot
import report
from child import Child, ChildFailed
from engines import AT_RATES, MAX_GAP, NAMES, ROOT, Engine, check_float32, check_gap, engines
from measure import WrongOutput, kv_use, measure
from tqdm import tqdm
from workload import Bounds, Request, Workload

FORMAT = 1
"""Of results.json; raise it with any change of meaning."""
NUM_CHECKED = 4
WARM_UP = -1
"""The round that does not count; its outputs are checked."""

EXAMPLES = """\
examples:
  python tests/bench/serving.py --model examples/models/tiny --requests 8 --runs 1      does everything work?
  python tests/bench/serving.py --shape 135m -o results.json --plot results.png
  python tests/bench/serving.py --shape 135m --rates 1,2,4 --engines offline,http
  python tests/bench/serving.py --shape 135m --vllm-python ~/vllm/bin/python --markdown docs/benchmarks.md

Run it on a machine that does nothing else: the load before and after is part of the report.
"""


class Benchmark:
    """One session: arguments, the engines, what is found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._names: list[str] = args.engines or [n for n in NAMES if n != "vllm" or args.vllm_python]
        self._settings = {name: getattr(args, name) for name in ("dtype", "max_num_seqs", "max_num_batched_tokens")}
        self._settings |= {"model": str((args.model or checkpoint.cached(args.shape)).resolve()), "block_size": 16}
        vocab_size = json.loads(Path(self._settings["model"], "config.json").read_text())["vocab_size"]
        self._work = Workload(args.requests, args.prompt_tokens, args.output_tokens, vocab_size, args.seed)
        self._plan = [
            (round, rate, name)
            for round in range(args.runs)
            for rate in (None, *args.rates)
            for name in self._names
            if rate is None or name in AT_RATES
        ]
        """A B A B: in every round each engine once, and once more for each rate."""

    def run(self) -> dict[str, Any]:
        """Start everything, check, measure; the results document.

        Raises:
            WrongOutput: an engine generates something wrong.
            ChildFailed: a process failed.
        """
        args, results = self._args, circumstances()
        work = {
            "num_requests": args.requests,
            "runs": args.runs,
            "seed": args.seed,
            "prefix_tokens": args.prefix_tokens,
        }
        work |= {name: "-".join(map(str, getattr(args, name))) for name in ("prompt_tokens", "output_tokens")}
        results |= {"format": FORMAT, "settings": self._settings, "workload": work, "command": _command()}
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-")))
            total = 1 + 2 * len(self._names) + len(self._plan)
            self._bar = stack.enter_context(
                tqdm(total=total, dynamic_ncols=True, bar_format="{l_bar}{bar}| {n}/{total}")
            )
            own = {"model": self._settings["model"], "dtype": "float32", "batch": 1}
            with Child("oracle", "static_batches.py", own, folder) as oracle:
                self._check(oracle, folder)
                running = stack.enter_context(engines(self._names, self._settings, args.vllm_python, folder))
                results["about"] = {name: engine.about() for name, engine in self._each(running, "loading {}")}
                each = self._each(running, "warming {} up and checking what it generates")
                gaps = {name: self._warm_up(engine, oracle) for name, engine in each}
            results["check"] = {"num_requests": NUM_CHECKED, "max_gap": MAX_GAP, "gaps": gaps}
            results["runs"], results["kv"] = self._rounds(running)
            results["prefix"] = self._prefix(running) if args.prefix_tokens else []
            account = running["offline"].child.call("memory") if "offline" in running else None
            pss = {name: engine.pss_bytes() for name, engine in running.items()}
            results["memory"] = {"pss": pss, "offline": account}
        results["machine"]["load"].append(os.getloadavg()[0])
        return results | report.summarize(results["runs"])

    def _each(self, running: dict[str, Engine], what: str) -> Iterator[tuple[str, Engine]]:
        for name, engine in running.items():
            self._bar.set_description(what.format(name))
            yield name, engine
            self._bar.update()

    def _check(self, oracle: Child, folder: Path) -> None:
        self._bar.set_description("checking float32 against transformers")
        requests = [Request(prompt, min(num, 32)) for prompt, num in self._work.requests(WARM_UP)[:NUM_CHECKED]]
        check_float32(self._settings["model"], requests, oracle, folder)
        self._bar.update()

    def _warm_up(self, engine: Engine, oracle: Child) -> float:
        """A run that does not count; the worst gap of its outputs."""
        requests = self._work.requests(WARM_UP)
        reply = engine.run(requests)
        measure(requests, None, reply)
        return check_gap(engine.name, requests[:NUM_CHECKED], reply["token_ids"][:NUM_CHECKED], oracle)

    def _rounds(self, running: dict[str, Engine]) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
        """The numbers of every run, and the KV samples of the last offline run with all requests at once."""
        runs: list[dict[str, Any]] = []
        kv: list[dict[str, float]] = []
        for round, rate, name in self._plan:
            self._bar.set_description(f"{name}, {'all at once' if rate is None else f'{rate:g} requests/s'}")
            requests = self._work.requests(round, rate)
            offsets = None if rate is None else self._work.offsets(rate, round, rate)
            reply = running[name].run(requests, offsets)
            runs.append({"engine": name, "rate": rate, "round": round, **measure(requests, offsets, reply)})
            kv = kv_use(requests, reply) if (name, rate) == ("offline", None) else kv
            self._bar.update()
        return runs, kv

    def _prefix(self, running: dict[str, Engine]) -> list[dict[str, Any]]:
        """TTFT of a long prompt, and of a second one with the same first tokens. The first pair is not counted."""
        self._bar.set_description("shared prefix")
        found: dict[str, list[list[float]]] = {name: [] for name in running if name in AT_RATES}
        for round in range(WARM_UP, self._args.runs):
            pair = self._work.prefix_pair(self._args.prefix_tokens, round)
            for name, times in found.items():
                times.append([1e3 * running[name].run([request], [0.0])["events"][0][0][0] for request in pair])
        rows = []
        for name, (_, *times) in found.items():
            first, second, ratio = map(statistics.median, zip(*((a, b, b / a) for a, b in times), strict=True))
            rows.append({"engine": name, "first_ms": first, "second_ms": second, "ratio": ratio})
        return rows


def circumstances() -> dict[str, Any]:
    """What a number is worth nothing without."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty= with uncommitted changes"]
    cpu = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().replace("\t", "").splitlines() if line)
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown",
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "nvidia-pytriton")},
        "machine": {
            "cpu": cpu.get("model name", "unknown processor").strip(),
            "flags": sorted({"amx_bf16", "avx512_bf16", "avx512f", "avx2"} & set(cpu.get("flags", "").split())),
            "num_cpus": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "load": [os.getloadavg()[0]],
        },
    }


def _command() -> str:
    return shlex.join(["python", "tests/bench/serving.py", *sys.argv[1:]])


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked as far as it can be without loading anything."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="serving.py", description=__doc__, epilog=EXAMPLES, formatter_class=form)
    model, add = parser.add_mutually_exclusive_group(required=True), parser.add_argument
    model.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint in Hugging Face format")
    model.add_argument("--shape", choices=checkpoint.SHAPES, help="random weights of a shape, made once and kept")
    names, rates = (lambda text: text.split(",")), (lambda text: [float(rate) for rate in text.split(",")])
    add("--engines", type=names, metavar="A,B", help=f"of {','.join(NAMES)} (default: all that are there)")
    add("--vllm-python", metavar="FILE", help="interpreter of an environment that has vllm")
    add("--requests", type=int, default=64, metavar="N", help="requests of a run (default 64)")
    add("--prompt-tokens", type=Bounds.parse, default="32-256", metavar="A-B", help="of a prompt (default 32-256)")
    add("--output-tokens", type=Bounds.parse, default="32-128", metavar="A-B", help="of an output (default 32-128)")
    add(
        "--rates", type=rates, default=[], metavar="R,R", help="also at these requests per second, as a Poisson process"
    )
    add("--runs", type=int, default=3, metavar="N", help="rounds; in each, every engine runs once (default 3)")
    add("--prefix-tokens", type=int, default=1500, metavar="N", help="of a shared prefix; 0: none (default 1500)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts, lengths and arrivals (default 0)")
    add("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16 or float16")
    add("--max-num-seqs", type=int, default=64, metavar="N", help="sequences in a step (default 64)")
    add("--max-num-batched-tokens", type=int, default=2048, metavar="N", help="tokens in a step (default 2048)")
    add("-o", "--output", type=Path, metavar="FILE", help="write everything as JSON")
    add("--plot", type=Path, metavar="FILE", help="draw throughput, latencies by rate and KV use (needs matplotlib)")
    add("--markdown", type=Path, metavar="FILE", help="put the tables between the marks of this document")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.engines or ()) - set(NAMES)):
        parser.error(f"--engines: {unknown[0]!r} is not one of {', '.join(NAMES)}")
    if "vllm" in (args.engines or ()) and not args.vllm_python:
        parser.error("--engines: vllm needs --vllm-python")
    if args.model and not (args.model / "config.json").is_file():
        parser.error(f"--model: {args.model} holds no config.json; give the folder of a checkpoint")
    if min(args.requests, args.runs, *args.rates) <= 0:
        parser.error("--requests, --runs and --rates must be positive")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report; every process that was started has ended afterwards."""
    args = arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Control-C does: by unwinding
    try:
        results = Benchmark(args).run()
    except (WrongOutput, ChildFailed) as error:
        raise SystemExit(f"serving: no speed is reported: {error}") from error
    print(report.text(results))
    if args.output:
        args.output.write_text(json.dumps(results, indent=1))
    if args.markdown:
        report.write_markdown(results, args.markdown)
    if args.plot:
        plot.draw(results, args.plot)


if __name__ == "__main__":
    main()
