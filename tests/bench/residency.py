# SPDX-License-Identifier: Apache-2.0
"""Benchmark of adapter loading: effect on running requests, waiting times, and time until a new adapter serves.

It uses real processes and random weights; no figure is reported unless outputs are correct. See docs/benchmarks.md.

    itl     inter-token latency of resident adapters' requests at 80 % of saturation, without and with concurrent loads
    zipf    1,000 registered adapters on 8 slots, requests by Zipf's law: failures, waiting times, and their bound
    change  time from a catalog with a new adapter to its first token, through a real `quire serve`
"""

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "hack")]

import command_line  # noqa: E402
import random_adapters  # noqa: E402
import random_checkpoint  # noqa: E402
import report  # noqa: E402
from core_traffic import CoreRequest, core_config, send_requests, zipf_weights  # noqa: E402
from itl import AdapterSets, ItlWorkload, measure_itl, register_adapters  # noqa: E402
from measure import WrongOutput, percentile, summarize_spread  # noqa: E402
from serving import environment_info, log  # noqa: E402
from support.engine_processes import EngineProcesses, wait_for  # noqa: E402
from support.quire_serve import QuireServeProcess  # noqa: E402

from quire_engine.lora.slot_table import RESERVE_AFTER_S  # noqa: E402

NUM_SLOTS = 8
NUM_RESIDENT = 4
NUM_FOLDERS = 24
"""Adapters on disk; more are registered, under digests of their own, and read from the same folders."""


@contextlib.contextmanager
def running_core(folder: Path, args: argparse.Namespace, model: str, **config: Any) -> Iterator[EngineProcesses]:
    """A running core."""
    os.environ.pop("OMP_NUM_THREADS", None)
    with EngineProcesses(folder, num_threads=args.threads, **core_config(model, **config)) as pod:
        yield pod.start("core")


def measure_itl_phase(args: argparse.Namespace, folder: Path, model: str, folders: list[Path]) -> dict[str, Any]:
    """See itl.py."""
    config = json.loads(Path(model, "config.json").read_text())
    # So far do the logits of weights that are drawn with this deviation spread.
    deviation = config["initializer_range"] * config["hidden_size"] ** 0.5
    workload = ItlWorkload(
        args.runs, args.seconds, args.loads, args.prompt_tokens, args.output_tokens, 48, 40_000, deviation, args.seed
    )
    resident, unloaded = [f"r{i}" for i in range(NUM_RESIDENT)], [f"c{i}" for i in range(NUM_FOLDERS - NUM_RESIDENT)]
    with running_core(folder, args, model, max_cpu_loras=NUM_SLOTS) as pod:
        register_adapters(pod, folders, resident, pinned=True)
        register_adapters(pod, folders[NUM_RESIDENT:], unloaded)
        *_, figures = measure_itl(pod, workload, AdapterSets(resident, unloaded, folders[NUM_RESIDENT:]), log)
        return figures


def measure_zipf_phase(args: argparse.Namespace, folder: Path, model: str, folders: list[Path]) -> dict[str, Any]:
    """A closed loop of clients that each ask an adapter drawn by Zipf's law."""
    names = [f"z{i}" for i in range(args.registered)]
    rng = random.Random(args.seed)
    with running_core(folder, args, model, max_cpu_loras=4 * NUM_SLOTS) as pod:
        register_adapters(pod, folders, names)
        requested = rng.choices(names, zipf_weights(len(names), 1.0), k=args.zipf_requests)
        requests = [
            CoreRequest(0.0, "zipf", name, [rng.randrange(40_000) for _ in range(16)], rng.randint(4, 16))
            for name in requested
        ]
        started = time.perf_counter()
        responses = send_requests(pod, requests, args.clients)
        seconds = time.perf_counter() - started
        with pod.connect("core", "supervisor") as supervisor:
            supervisor.call("check")
            evictions = supervisor.call("status")["stats"]["num_adapter_evictions"]
    waits = [response.started_at - response.sent_at for response in responses]
    longest = max(answer.token_times[-1] - answer.started_at for answer in responses)
    busy = set(names[:NUM_SLOTS])
    waits_by_kind = {
        kind: [
            w for w, a in zip(waits, responses, strict=True) if (a.request.adapter_digest in busy) == (kind == "busy")
        ]
        for kind in ("busy", "rare")
    }
    # As in slot_table.py: at most as many adapters can be ahead as clients request at a time.
    bound = RESERVE_AFTER_S + (-(-args.clients // (NUM_SLOTS // 2)) + 1) * (longest + 1.0)
    return {
        "registered": args.registered,
        "adapters_asked": len(set(requested)),
        "requests": len(responses),
        "failed": 0,
        "requests_per_s": len(responses) / seconds,
        "evictions": evictions,
        **{
            f"wait_{kind}_s": {f"p{p}": percentile(kind_waits, p) for p in (50, 99, 100)}
            for kind, kind_waits in waits_by_kind.items()
        },
        "longest_request_s": longest,
        "bound_s": bound,
    }


def measure_change_phase(args: argparse.Namespace, folder: Path, model: str, folders: list[Path]) -> dict[str, Any]:
    """Through the server; each adapter is new content in a folder of its own."""
    source = {"path": model}
    spec = {
        "device": "CPU",
        "model": {"source": source},
        "lora": {"maxLoaded": NUM_SLOTS},
        "engine": {"maxNumSeqs": 64},
    }
    document = {"apiVersion": "quire.dev/v1alpha1", "kind": "LLMService", "metadata": {"name": "bench"}, "spec": spec}
    service = QuireServeProcess(document, folder)
    seconds_by_mode: dict[str, list[float]] = {"lora_name": [], "model": []}
    try:
        service.wait_ready()
        service.text("bench", "Once", max_tokens=2, temperature=0.0)
        base = service.text("bench", "Once upon", max_tokens=12, temperature=0.0)
        adapters_in_catalog: list[dict[str, Any]] = []
        for i in range(2 * args.runs):
            mode = ("lora_name", "model")[i % 2]
            name = f"new-{i}"
            expose = "Parameter" if mode == "lora_name" else "Model"
            adapters_in_catalog.append({"name": name, "source": {"path": str(folders[i])}, "expose": expose})
            document = {"generation": service.status()["generation"] + 1, "adapters": adapters_in_catalog}
            started = time.perf_counter()
            assert service.put_adapters(document).status == 202
            model_name, lora_params = ("bench", {"lora_name": name}) if mode == "lora_name" else (name, {})
            wait_for(
                lambda m=model_name, p=lora_params: service.generate(m, "Once upon", max_tokens=1, **p).status == 200,
                30,
            )
            seconds_by_mode[mode].append(time.perf_counter() - started)
            if service.text(model_name, "Once upon", max_tokens=12, temperature=0.0, **lora_params) == base:
                raise WrongOutput(f"{name} says what the base model says")
    finally:
        service.stop()
    return {way: summarize_spread(seconds) for way, seconds in seconds_by_mode.items()}


PHASES = {"itl": measure_itl_phase, "zipf": measure_zipf_phase, "change": measure_change_phase}


def format_table(results: dict[str, Any]) -> str:
    """The figures, as Markdown."""
    rows = [("what", "figure", "bar")]
    if figures := results.get("itl"):
        p99, p50 = figures["p99_ratio"], figures["p50_ratio"]
        rows += [
            (
                f"ITL p99 at 80 % of saturation, {figures['loads_per_run']} adapters loaded in {figures['seconds']:g} "
                "s / "
                "none",
                f"{figures['with_p99_ms']['median']:.1f} / {figures['without_p99_ms']['median']:.1f} ms: "
                f"{p99['median']:.2f} ({p99['min']:.2f}-{p99['max']:.2f})",
                "1.10 (GPU)",
            ),
            ("the same, p50", f"{p50['median']:.2f} ({p50['min']:.2f}-{p50['max']:.2f})", ""),
        ]
    if figures := results.get("zipf"):
        rare, busy = figures["wait_rare_s"], figures["wait_busy_s"]
        rows += [
            (
                f"{figures['registered']} adapters on {NUM_SLOTS} slots, Zipf: failed of {figures['requests']} "
                "requests",
                str(figures["failed"]),
                "0",
            ),
            (
                f"wait of the others' requests, p50, p99, longest ({figures['adapters_asked']} adapters, "
                f"{figures['evictions']} evictions)",
                ", ".join(f"{rare[p]:.2f}" for p in ("p50", "p99", "p100")) + " s",
                f"{figures['bound_s']:.1f} s",
            ),
            (
                f"wait of the {NUM_SLOTS} most asked adapters' requests",
                ", ".join(f"{busy[p]:.2f}" for p in ("p50", "p99", "p100")) + " s",
                "",
            ),
        ]
    if figures := results.get("change"):
        for mode, description in (("lora_name", "as lora_name"), ("model", "as a model of its own")):
            mode_figures = figures[mode]
            figure = f"{mode_figures['median']:.2f} s ({mode_figures['min']:.2f}-{mode_figures['max']:.2f})"
            rows.append((f"catalogue change to first token of a new adapter, {description}", figure, "2 s"))
    head, *body = rows
    lines = [f"| {' | '.join(head)} |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in body)]
    threads = f"{results['threads']} computing threads" if results["threads"] else "default number of threads"
    runs = f"; medians of {results['runs']} runs (least-most)" if {"itl", "change"} & set(results) else ""
    return f"{report.environment_line(results)}{threads}{runs}.\n\n" + "\n".join(lines)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line.new_parser("residency.py", __doc__)
    add = parser.add_argument
    add("--shape", choices=random_checkpoint.SHAPES, default="135m", help="random weights of a shape (default 135m)")
    add("--parts", type=lambda text: text.split(","), default=list(PHASES), metavar="A,B", help="itl, zipf, change")
    add("--runs", type=int, default=5, metavar="N", help="rounds of itl, and changes of each kind (default 5)")
    add("--seconds", type=float, default=30.0, metavar="S", help="duration of a run of itl (default 30)")
    add("--loads", type=int, default=100, metavar="N", help="adapters that are loaded in a run of itl (default 100)")
    add("--prompt-tokens", type=int, default=32, metavar="N", help="prompt tokens of itl's requests (default 32)")
    add("--output-tokens", type=int, default=64, metavar="N", help="output tokens of itl's requests (default 64)")
    add("--registered", type=int, default=1000, metavar="N", help="adapters of zipf (default 1000)")
    add("--zipf-requests", type=int, default=600, metavar="N", help="requests of zipf (default 600)")
    add(
        "--clients",
        type=int,
        default=32,
        metavar="N",
        help="clients of zipf, each with one request at a time (default 32)",
    )
    add(
        "--threads",
        type=int,
        metavar="N",
        help="that the core of itl and zipf computes with (default: as many as by itself); with one less than there "
        "are cores, loads have a core of their own, as beside a GPU",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of prompts, arrivals and adapters (default 0)")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.parts) - set(PHASES)):
        parser.error(f"--parts: {unknown[0]!r} is not one of {', '.join(PHASES)}")
    if 2 * args.runs > NUM_FOLDERS:
        parser.error(f"--runs: at most {NUM_FOLDERS // 2}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report; every process that was started has ended afterwards."""
    args = parse_arguments(argv)
    model = random_checkpoint.cached_checkpoint(args.shape)
    folders = random_adapters.make_adapters(
        model, Path(tempfile.gettempdir()) / f"quire-bench-{os.getuid()}-adapters", NUM_FOLDERS, 16
    )
    results: dict[str, Any] = {**environment_info(), "runs": args.runs, "threads": args.threads}
    try:
        for phase in args.parts:
            log(phase)
            with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
                results[phase] = PHASES[phase](args, Path(folder), str(model), folders)
    except WrongOutput as error:
        raise SystemExit(f"residency: no figure is reported: {error}") from error
    results["machine"]["load"].append(os.getloadavg()[0])
    command_line.publish("residency.py", args, results, format_table(results))


if __name__ == "__main__":
    main()
