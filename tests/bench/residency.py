# SPDX-License-Identifier: Apache-2.0
"""The benchmark of adapters that come and go: what loads cost those who run, who waits how long, how soon a new one
serves. Real processes and random weights; no figure is reported unless outputs are right. docs/benchmarks.md says more.

    itl     time between tokens of resident adapters' requests at 80 % of saturation, without and with loads beside them
    zipf    1,000 registered adapters on 8 slots, requests by Zipf's law: failures, waits, and the bound on them
    change  from a catalogue with a new adapter to its first token, through a real `quire serve`
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

import adapters  # noqa: E402
import checkpoint  # noqa: E402
from core_traffic import Ask, config_of, send, zipf_weights  # noqa: E402
from itl import Cast, Plan, measure_itl, register  # noqa: E402
from measure import WrongOutput, percentile, spread  # noqa: E402
from serving import circumstances, say  # noqa: E402
from support.pod import Pod, eventually  # noqa: E402
from support.service import Service  # noqa: E402

from quire_engine.lora.slot_table import RESERVE_AFTER_S  # noqa: E402

BEGIN, END = "<!-- results of tests/bench/residency.py: begin -->", "<!-- results of tests/bench/residency.py: end -->"
NUM_SLOTS = 8
NUM_RESIDENT = 4
NUM_FOLDERS = 24
"""Adapters on disk; more are registered, under digests of their own, and read from the same folders."""


@contextlib.contextmanager
def core(folder: Path, args: argparse.Namespace, model: str, **config: Any) -> Iterator[Pod]:
    """A running core."""
    os.environ.pop("OMP_NUM_THREADS", None)
    with Pod(folder, num_threads=args.threads, **config_of(model, **config)) as pod:
        yield pod.start("core")


def itl(args: argparse.Namespace, folder: Path, model: str, folders: list[Path]) -> dict[str, Any]:
    """See itl.py."""
    shape = json.loads(Path(model, "config.json").read_text())
    # So far do the logits of weights that are drawn with this deviation spread.
    deviation = shape["initializer_range"] * shape["hidden_size"] ** 0.5
    plan = Plan(
        args.runs, args.seconds, args.loads, args.prompt_tokens, args.output_tokens, 48, 40_000, deviation, args.seed
    )
    resident, cold = [f"r{i}" for i in range(NUM_RESIDENT)], [f"c{i}" for i in range(NUM_FOLDERS - NUM_RESIDENT)]
    with core(folder, args, model, max_cpu_loras=NUM_SLOTS) as pod:
        register(pod, folders, resident, pinned=True)
        register(pod, folders[NUM_RESIDENT:], cold)
        *_, found = measure_itl(pod, plan, Cast(resident, cold, folders[NUM_RESIDENT:]), say)
        return found


def zipf(args: argparse.Namespace, folder: Path, model: str, folders: list[Path]) -> dict[str, Any]:
    """A closed loop of clients that each ask an adapter drawn by Zipf's law."""
    names = [f"z{i}" for i in range(args.registered)]
    draw = random.Random(args.seed)
    with core(folder, args, model, max_cpu_loras=4 * NUM_SLOTS) as pod:
        register(pod, folders, names)
        asked = draw.choices(names, zipf_weights(len(names), 1.0), k=args.zipf_requests)
        asks = [
            Ask(0.0, "zipf", name, [draw.randrange(40_000) for _ in range(16)], draw.randint(4, 16)) for name in asked
        ]
        begun = time.perf_counter()
        answers = send(pod, asks, args.clients)
        seconds = time.perf_counter() - begun
        with pod.peer("core", "supervisor") as supervisor:
            supervisor.call("check")
            evictions = supervisor.call("status")["stats"]["num_adapter_evictions"]
    waits = [answer.started - answer.sent for answer in answers]
    longest = max(answer.times[-1] - answer.started for answer in answers)
    busy = set(names[:NUM_SLOTS])
    of = {
        kind: [w for w, a in zip(waits, answers, strict=True) if (a.ask.adapter in busy) == (kind == "busy")]
        for kind in ("busy", "rare")
    }
    # As in slots.py: no more adapters can be ahead than clients ask for at a time.
    bound = RESERVE_AFTER_S + (-(-args.clients // (NUM_SLOTS // 2)) + 1) * (longest + 1.0)
    return {
        "registered": args.registered,
        "adapters_asked": len(set(asked)),
        "requests": len(answers),
        "failed": 0,
        "requests_per_s": len(answers) / seconds,
        "evictions": evictions,
        **{f"wait_{kind}_s": {f"p{p}": percentile(each, p) for p in (50, 99, 100)} for kind, each in of.items()},
        "longest_request_s": longest,
        "bound_s": bound,
    }


def change(args: argparse.Namespace, folder: Path, model: str, folders: list[Path]) -> dict[str, Any]:
    """Through the server; each adapter is new content in a folder of its own."""
    source = {"path": model}
    spec = {
        "device": "CPU",
        "model": {"source": source},
        "lora": {"maxLoaded": NUM_SLOTS},
        "engine": {"maxNumSeqs": 64},
    }
    document = {"apiVersion": "quire.dev/v1alpha1", "kind": "LLMService", "metadata": {"name": "bench"}, "spec": spec}
    service = Service(document, folder)
    took: dict[str, list[float]] = {"lora_name": [], "model": []}
    try:
        service.wait_ready()
        service.text("bench", "Once", max_tokens=2, temperature=0.0)
        base = service.text("bench", "Once upon", max_tokens=12, temperature=0.0)
        held: list[dict[str, Any]] = []
        for i in range(2 * args.runs):
            way = ("lora_name", "model")[i % 2]
            name = f"new-{i}"
            expose = "Parameter" if way == "lora_name" else "Model"
            held.append({"name": name, "source": {"path": str(folders[i])}, "expose": expose})
            document = {"generation": service.status()["generation"] + 1, "adapters": held}
            begun = time.perf_counter()
            assert service.put_adapters(document).status == 202
            model_name, more = ("bench", {"lora_name": name}) if way == "lora_name" else (name, {})
            eventually(
                lambda m=model_name, p=more: service.generate(m, "Once upon", max_tokens=1, **p).status == 200, 30
            )
            took[way].append(time.perf_counter() - begun)
            if service.text(model_name, "Once upon", max_tokens=12, temperature=0.0, **more) == base:
                raise WrongOutput(f"{name} says what the base model says")
    finally:
        service.stop()
    return {way: spread(seconds) for way, seconds in took.items()}


PARTS = {"itl": itl, "zipf": zipf, "change": change}


def table(results: dict[str, Any]) -> str:
    """The figures, as Markdown."""
    rows = [("what", "figure", "bar")]
    if found := results.get("itl"):
        p99, p50 = found["p99_ratio"], found["p50_ratio"]
        rows += [
            (
                f"ITL p99 at 80 % of saturation, {found['loads_per_run']} adapters loaded in {found['seconds']:g} s / "
                "none",
                f"{found['with_p99_ms']['median']:.1f} / {found['without_p99_ms']['median']:.1f} ms: "
                f"{p99['median']:.2f} ({p99['min']:.2f}-{p99['max']:.2f})",
                "1.10 (GPU)",
            ),
            ("the same, p50", f"{p50['median']:.2f} ({p50['min']:.2f}-{p50['max']:.2f})", ""),
        ]
    if found := results.get("zipf"):
        rare, busy = found["wait_rare_s"], found["wait_busy_s"]
        rows += [
            (
                f"{found['registered']} adapters on {NUM_SLOTS} slots, Zipf: failed of {found['requests']} requests",
                str(found["failed"]),
                "0",
            ),
            (
                f"wait of the others' requests, p50, p99, longest ({found['adapters_asked']} adapters, "
                f"{found['evictions']} evictions)",
                ", ".join(f"{rare[p]:.2f}" for p in ("p50", "p99", "p100")) + " s",
                f"{found['bound_s']:.1f} s",
            ),
            (
                f"wait of the {NUM_SLOTS} most asked adapters' requests",
                ", ".join(f"{busy[p]:.2f}" for p in ("p50", "p99", "p100")) + " s",
                "",
            ),
        ]
    if found := results.get("change"):
        for way, what in (("lora_name", "as lora_name"), ("model", "as a model of its own")):
            each = found[way]
            figure = f"{each['median']:.2f} s ({each['min']:.2f}-{each['max']:.2f})"
            rows.append((f"catalogue change to first token of a new adapter, {what}", figure, "2 s"))
    head, *body = rows
    lines = [f"| {' | '.join(head)} |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in body)]
    machine = results["machine"]
    runs = f"; medians of {results['runs']} runs (least-most)" if {"itl", "change"} & set(results) else ""
    threads = f"{results['threads']} computing" if results["threads"] else "as many threads as by itself"
    return (
        f"{machine['cpu']}, {machine['num_cpus']} CPUs ({threads}), load {machine['load'][0]:.1f} before and "
        f"{machine['load'][-1]:.1f} after; {results['when']}; commit {results['commit']}"
        f"{runs}.\n\n" + "\n".join(lines)
    )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="residency.py", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--shape", choices=checkpoint.SHAPES, default="135m", help="random weights of a shape (default 135m)")
    add("--parts", type=lambda text: text.split(","), default=list(PARTS), metavar="A,B", help="of itl,zipf,change")
    add("--runs", type=int, default=5, metavar="N", help="rounds of itl, and changes of each kind (default 5)")
    add("--seconds", type=float, default=30.0, metavar="S", help="of a run of itl (default 30)")
    add("--loads", type=int, default=100, metavar="N", help="adapters that are loaded in a run of itl (default 100)")
    add("--prompt-tokens", type=int, default=32, metavar="N", help="of itl's requests (default 32)")
    add("--output-tokens", type=int, default=64, metavar="N", help="of itl's requests (default 64)")
    add("--registered", type=int, default=1000, metavar="N", help="adapters of zipf (default 1000)")
    add("--zipf-requests", type=int, default=600, metavar="N", help="requests of zipf (default 600)")
    add("--clients", type=int, default=32, metavar="N", help="of zipf, each with one request at a time (default 32)")
    add(
        "--threads",
        type=int,
        metavar="N",
        help="that the core of itl and zipf computes with (default: as many as by itself); with one less than there "
        "are cores, loads have a core of their own, as beside a GPU",
    )
    add("--seed", type=int, default=0, metavar="N", help="of prompts, arrivals and adapters (default 0)")
    add("-o", "--output", type=Path, metavar="FILE", help="write everything as JSON")
    add("--markdown", type=Path, metavar="FILE", help="put the table between the marks of this document")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.parts) - set(PARTS)):
        parser.error(f"--parts: {unknown[0]!r} is not one of {', '.join(PARTS)}")
    if 2 * args.runs > NUM_FOLDERS:
        parser.error(f"--runs: at most {NUM_FOLDERS // 2}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report; every process that was started has ended afterwards."""
    args = arguments(argv)
    model = checkpoint.cached(args.shape)
    folders = adapters.make(model, Path(tempfile.gettempdir()) / f"quire-bench-{os.getuid()}-adapters", NUM_FOLDERS, 16)
    results: dict[str, Any] = {**circumstances(), "runs": args.runs, "threads": args.threads}
    try:
        for part in args.parts:
            say(part)
            with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
                results[part] = PARTS[part](args, Path(folder), str(model), folders)
    except WrongOutput as error:
        raise SystemExit(f"residency: no figure is reported: {error}") from error
    results["machine"]["load"].append(os.getloadavg()[0])
    text = table(results)
    print(text)
    if args.output:
        args.output.write_text(json.dumps(results, indent=1))
    if args.markdown:
        before, begin, rest = args.markdown.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        if not (begin and end):
            raise SystemExit(f"--markdown: {args.markdown} has no lines {BEGIN!r} and {END!r}; add them")
        args.markdown.write_text(f"{before}{BEGIN}\n\n```\n{results['command']}\n```\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
