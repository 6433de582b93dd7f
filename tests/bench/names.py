# SPDX-License-Identifier: Apache-2.0
"""Benchmark of adapters that are found by name: many in one folder, requested by Zipf's law, on few slots.

A real `quire serve` gets requests over the OpenAI API. A round has four parts: the rate of a closed loop over as many
adapters as there are slots; an open loop of half that rate over the same adapters; and the same open loop over all
adapters, most of which no request has named before. This last part runs twice with the same names, so that all adapters
are known the second time. Every failed request is counted. No figure is reported unless an adapter changes the output.
See docs/benchmarks.md.
"""

import argparse
import asyncio
import functools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "hack")]

import command_line  # noqa: E402
import random_adapters  # noqa: E402
import random_checkpoint  # noqa: E402
import report  # noqa: E402
from core_traffic import zipf_weights  # noqa: E402
from measure import WrongOutput, percentile, summarize_spread  # noqa: E402
from serving import environment_info, log  # noqa: E402
from support.quire_serve import QuireServeProcess  # noqa: E402

RANK = 8
_RESIDENCY_POLL_S = 0.2


@dataclass(frozen=True)
class Answer:
    """One request that has ended; times are in seconds since the start of its part."""

    adapter: str
    arrival: float
    ttft: float
    error: str


class Traffic:
    """The clients of one service."""

    def __init__(self, service: QuireServeProcess, session: aiohttp.ClientSession, args: argparse.Namespace) -> None:
        self._service, self._session, self._args = service, session, args
        self.slots: list[tuple[float, frozenset[str]]] = []
        """The adapters that had a slot, at several times."""

    async def ask(self, adapter: str, rng: random.Random, started: float) -> Answer:
        """Stream one request."""
        words = " ".join(rng.choices(("cat", "dog", "tree", "sun", "ball", "day"), k=self._args.prompt_words))
        body = {"model": adapter, "prompt": words, "max_tokens": self._args.output_tokens, "ignore_eos": True}
        url = f"http://127.0.0.1:{self._service.ports['openai']}/v1/completions"
        arrival, first, error = time.perf_counter() - started, 0.0, "no token"
        try:
            async with self._session.post(url, json=body | {"stream": True, "temperature": 0.0}) as response:
                if response.status != 200:
                    return Answer(adapter, arrival, 0.0, f"{response.status} {await response.text()}")
                async for line in response.content:
                    first = first or time.perf_counter() - started
                    error = "" if line.startswith(b"data: [DONE]") else error
        except (aiohttp.ClientError, TimeoutError) as failure:
            error = repr(failure)
        return Answer(adapter, arrival, first - arrival, error)

    async def closed_loop(self, adapters: Sequence[str], seconds: float, rng: random.Random) -> list[Answer]:
        """As many clients as there are slots, each with one request at a time."""
        started, answers = time.perf_counter(), list[Answer]()

        async def run_client() -> None:
            while time.perf_counter() - started < seconds:
                answers.append(await self.ask(rng.choice(adapters), rng, started))

        await asyncio.gather(*(run_client() for _ in range(self._args.clients)))
        return answers

    async def open_loop(
        self, choose: Callable[[], str], rate: float, seconds: float, rng: random.Random
    ) -> list[Answer]:
        """Requests of a Poisson process."""
        started, tasks, at = time.perf_counter(), list[asyncio.Task[Answer]](), rng.expovariate(rate)
        self.slots.clear()
        poller = asyncio.create_task(self._poll_slots(started))
        while at < seconds:
            await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
            tasks.append(asyncio.create_task(self.ask(choose(), rng, started)))
            at += rng.expovariate(rate)
        answers = [await task for task in tasks]
        poller.cancel()
        return answers

    async def _poll_slots(self, started: float) -> None:
        url = f"http://127.0.0.1:{self._service.ports['health']}/adapters"
        while True:
            at = time.perf_counter() - started
            async with self._session.get(url) as response:
                rows = (await response.json())["adapters"]
            self.slots.append((at, frozenset(row["name"] for row in rows if row["level"] == "gpu")))
            await asyncio.sleep(_RESIDENCY_POLL_S)

    def had_slot(self, answer: Answer) -> bool:
        """Return whether the adapter was in a slot before and after the arrival."""
        before = [names for at, names in self.slots if at <= answer.arrival][-1:]
        after = [names for at, names in self.slots if at > answer.arrival][:1]
        return bool(before and after) and answer.adapter in before[0] & after[0]


async def measure_round(service: QuireServeProcess, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One round; see the docstring of the file."""
    rng = random.Random(seed)
    names = [f"lora-{i}" for i in range(args.adapters)]
    few, weights = names[: args.slots], zipf_weights(len(names), 1.0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        traffic = Traffic(service, session, args)
        await asyncio.gather(*(traffic.ask(name, rng, 0.0) for name in few))
        closed = await traffic.closed_loop(few, args.seconds, rng)
        rate = len(closed) / args.seconds / 2
        log(f"{rate:.1f} requests/s")
        few_answers = await traffic.open_loop(lambda: rng.choice(few), rate, args.seconds, rng)
        few_p50 = percentile([answer.ttft for answer in few_answers], 50)
        figures = {"rate": rate, "few_p50_ms": 1e3 * few_p50, "failed": 0.0}
        answers = [*closed, *few_answers]
        for part in ("first", "again"):
            choose = functools.partial(_choose, random.Random(seed), names, weights)
            many = await traffic.open_loop(choose, rate, 2 * args.seconds, rng)
            answers += many
            served = [answer for answer in many if not answer.error]
            resident = [answer.ttft for answer in served if traffic.had_slot(answer)]
            others = [answer.ttft for answer in served if not traffic.had_slot(answer)]
            figures |= {
                f"{part}_requests": len(many),
                f"{part}_adapters": len({answer.adapter for answer in many}),
                f"{part}_resident": len(resident) / len(served),
                f"{part}_resident_p50_ms": 1e3 * percentile(resident, 50),
                f"{part}_others_p50_ms": 1e3 * percentile(others, 50),
                f"{part}_others_p99_ms": 1e3 * percentile(others, 99),
                f"{part}_ratio": percentile(resident, 50) / few_p50,
            }
    failed = [answer for answer in answers if answer.error]
    for answer in failed[:3]:
        log(f"failed: {answer.adapter}: {answer.error[:300]}")
    return figures | {"failed": len(failed)}


def _choose(rng: random.Random, names: Sequence[str], weights: Sequence[float]) -> str:
    return rng.choices(names, weights)[0]


def run(args: argparse.Namespace, model: Path, prefix: Path) -> list[dict[str, Any]]:
    """Each round has a service of its own, to which no adapter is known."""
    spec: dict[str, Any] = {
        "device": "CPU",
        "model": {"source": {"path": str(model)}},
        "lora": {"maxLoaded": args.slots, "maxRank": RANK, "maxCached": args.cached},
        "adapterSources": [{"path": str(prefix), "limit": {"adapters": args.limit or args.adapters, "size": "64Gi"}}],
    }
    if args.threads:
        spec["runtime"] = {"env": [{"name": "OMP_NUM_THREADS", "value": str(args.threads)}]}
    document = {"apiVersion": "quire.dev/v1alpha1", "kind": "LLMService", "metadata": {"name": "base"}, "spec": spec}
    rounds = []
    for seed in range(args.runs):
        with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
            service = QuireServeProcess(document, Path(folder))
            try:
                service.wait_ready()
                _check_output(service)
                rounds.append(asyncio.run(measure_round(service, args, seed)))
            finally:
                service.stop()
    return rounds


def _check_output(service: QuireServeProcess) -> None:
    texts = [
        service.text("base", "Once upon a time", max_tokens=12, temperature=0.0, **parameters)
        for parameters in ({}, {"lora_name": "lora-0"})
    ]
    if texts[0] == texts[1]:
        raise WrongOutput("an adapter says what the base model says")


def make_prefix(model: Path, count: int) -> Path:
    """Return a folder with `count` different adapters, made once and kept."""
    config = json.loads((model / "config.json").read_text())
    folder = Path(tempfile.gettempdir()) / f"quire-bench-{os.getuid()}-names-{config['hidden_size']}"
    prefix = folder / "by-name"
    prefix.mkdir(parents=True, exist_ok=True)
    for i, path in enumerate(random_adapters.make_adapters(model, prefix, count, RANK)):
        link = prefix / f"lora-{i}"
        if not link.exists():
            link.symlink_to(path)
    return prefix


def format_table(results: dict[str, Any]) -> str:
    """The figures, as Markdown."""
    spread = {name: summarize_spread([r[name] for r in results["rounds"]]) for name in results["rounds"][0]}

    def text(name: str, digits: int = 1) -> str:
        values = [f"{spread[name][key]:.{digits}f}" for key in ("median", "min", "max")]
        return f"{values[0]} ({values[1]}-{values[2]})"

    rows = [
        ("what", "first requests", "the same again", "bar"),
        (
            f"{results['adapters']} adapters, {results['slots']} slots, Zipf: failed requests",
            text("failed", 0),
            "",
            "0",
        ),
        ("rate of the open loops, requests/s", text("rate"), "", ""),
        (f"TTFT p50 with {results['slots']} adapters in all, ms", text("few_p50_ms"), "", ""),
    ]
    for what, name, digits, bar in (
        ("requests", "requests", 0, ""),
        ("adapters that they named", "adapters", 0, ""),
        ("requests whose adapter had a slot on arrival, of all", "resident", 2, ""),
        ("their TTFT p50, ms", "resident_p50_ms", 1, ""),
        (f"the same / with {results['slots']} adapters in all", "ratio", 2, "1.1"),
        ("TTFT p50 of the other requests, ms", "others_p50_ms", 1, ""),
        ("TTFT p99 of the other requests, ms", "others_p99_ms", 1, ""),
    ):
        rows.append((what, text(f"first_{name}", digits), text(f"again_{name}", digits), bar))
    head, *body = rows
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in body)]
    rounds = f"Medians of {len(results['rounds'])} rounds (least-most)."
    return "\n".join([f"{report.environment_line(results)}{rounds}\n", *lines])


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line.new_parser("names.py", __doc__)
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, metavar="DIR", help="a Llama checkpoint in Hugging Face format")
    model.add_argument(
        "--shape", choices=random_checkpoint.SHAPES, default="135m", help="random weights (default 135m)"
    )
    add("--prepare", action="store_true", help="only write the adapters, which takes minutes")
    add("--adapters", type=int, default=1000, metavar="N", help="adapters in the folder (default 1000)")
    add("--limit", type=int, metavar="N", help="adapters that are kept at a time (default: all)")
    add("--slots", type=int, default=8, metavar="N", help="adapter slots (default 8)")
    add("--cached", type=int, default=256, metavar="N", help="adapters in host memory (default 256)")
    add("--threads", type=int, metavar="N", help="that the core computes with (default: as many as by itself)")
    add("--clients", type=int, default=8, metavar="N", help="clients of the closed loop (default 8)")
    add(
        "--seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="of a part; the last two take twice as long (default 20)",
    )
    add("--prompt-words", type=int, default=32, metavar="N", help="words of a prompt (default 32)")
    add("--output-tokens", type=int, default=16, metavar="N", help="tokens of an output (default 16)")
    add("--runs", type=int, default=3, metavar="N", help="rounds (default 3)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report; every process that was started has ended afterwards."""
    args = parse_arguments(argv)
    model = args.model or random_checkpoint.cached_checkpoint(args.shape)
    prefix = make_prefix(model, args.adapters)
    if args.prepare:
        return
    results: dict[str, Any] = {**environment_info(), "adapters": args.adapters, "slots": args.slots}
    try:
        results["rounds"] = run(args, model, prefix)
    except WrongOutput as error:
        raise SystemExit(f"names: no figure is reported: {error}") from error
    results["machine"]["load"].append(os.getloadavg()[0])
    command_line.publish("names.py", args, results, format_table(results))


if __name__ == "__main__":
    main()
