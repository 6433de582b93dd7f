# SPDX-License-Identifier: Apache-2.0
"""`quire bench`: runs all loads on a server and reports them. Called by main.py."""

import argparse
import asyncio
import datetime
import json
import os
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quire_operator.cli.bench import svg
from quire_operator.cli.bench.client import Client, Outcome, Settings
from quire_operator.cli.bench.figures import summarize
from quire_operator.cli.bench.outputs import OutputCheck, count_problem
from quire_operator.cli.bench.report import format_report
from quire_operator.cli.bench.runner import Limits, LoadResult, Runner
from quire_operator.cli.bench.workload import Load, Workload, model_weights, read_dataset
from quire_spec.errors import ConfigError, InvalidArgument
from quire_spec.net.server_url import server_root

FORMAT = 1
"""Of the JSON file; raise it with any change of meaning."""
_DEFAULT_CONCURRENCY = (1, 4, 16)
_DEFAULT_SECONDS = 20.0
_MAX_LISTED_ERRORS = 5


def run(args: argparse.Namespace) -> int:
    """Run the benchmark, print the report, and return the exit status."""
    for file in (args.svg, args.output):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"{file}: the folder does not exist; create it, or give another file")
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # one connection for each open request
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    ignore_eos = args.dataset is None if args.ignore_eos is None else args.ignore_eos
    settings = Settings(
        root=server_root(args.url, "--url", "QUIRE_API_KEY"),
        api_key=args.api_key or os.environ.get("QUIRE_API_KEY"),
        is_chat=args.endpoint == "chat",
        ignore_eos=ignore_eos,
        seed=args.seed,
    )
    dataset = [] if args.dataset is None else read_dataset(args.dataset, args.endpoint)
    async with Client(settings) as client:
        weights = await _weights(client, args)
        workload = Workload(weights, args.input_len, args.output_len, args.seed, dataset=dataset)
        seconds = args.seconds or (_DEFAULT_SECONDS if args.num_prompts is None else None)
        progress = _Progress(args.num_prompts)
        limits = Limits(args.num_prompts, seconds, ends_after_failures=not args.report_anyway)
        runner = Runner(client, workload, limits, progress.advance)
        _note("sending some prompts alone, to compare their outputs under load")
        if not dataset:
            await runner.calibrate(next(iter(weights)))
        await runner.run_alone()
        check, results = OutputCheck(), []
        for load in _loads(args):
            progress.start(str(load) if seconds is None else f"{load}, {seconds:g} s")
            result = await runner.run(load)
            progress.close()
            results.append(result)
            for number, loaded in result.checked.items():
                check.add(runner.alone[number], loaded, str(load))
            if not args.report_anyway and (check.num_different or _problems(result)):
                break
    return _report(args, settings, weights, results, check)


async def _weights(client: Client, args: argparse.Namespace) -> dict[str, float]:
    """Return the weight of each model. The list of the server is read in any case, because it is the cheapest check of
    the URL and the key."""
    models = await client.models()
    if args.adapters is not None:
        return model_weights(args.adapters, [model["id"] for model in models if model["parent"] is not None])
    if args.model is None and not models:
        raise InvalidArgument("the server lists no models; name one with --model")
    return {args.model or models[0]["id"]: 1.0}


def _loads(args: argparse.Namespace) -> list[Load]:
    if args.request_rate is not None:
        return [Load(request_rate=rate) for rate in args.request_rate]
    return [Load(concurrency=number) for number in args.concurrency or _DEFAULT_CONCURRENCY]


def _problems(result: LoadResult) -> list[str]:
    """Return why a load is not reported."""
    outcomes = [*result.outcomes, *result.checked.values()]
    figures = summarize(result.load, result.outcomes, [*result.checked.values()], result.seconds, {})
    problems = [f"{count} of {len(outcomes)} requests failed: {text}" for text, count in figures["errors"].items()]
    wrong = [problem for o in outcomes if o.error is None and (problem := count_problem(o))]
    if wrong:
        problems.append(f"{len(wrong)} outputs have a wrong number of tokens: {wrong[0]}")
    return problems[:_MAX_LISTED_ERRORS]


def _report(
    args: argparse.Namespace,
    settings: Settings,
    weights: dict[str, float],
    results: list[LoadResult],
    check: OutputCheck,
) -> int:
    """Print and write what is right, name what is not, and return the exit status."""
    problems = [f"{result.load}: {problem}" for result in results for problem in _problems(result)]
    is_different = check.num_different > 0
    for problem in problems:
        _note(problem)
    if is_different:
        for example in check.examples[:_MAX_LISTED_ERRORS]:
            _note(f"different output: {example}")
        if not args.report_anyway:
            _note(
                f"no figures: {check.num_different} of {check.num_compared} outputs under load differ from the same "
                "prompts alone, by more than rounding explains (seed and temperature 0). A server that samples in "
                "spite of temperature 0, or that mixes requests up, does this. --report-anyway reports its figures."
            )
            return 1
    reported = [result for result in results if args.report_anyway or not _problems(result)]
    limits_ms = dict(args.goodput or ())
    loads = [summarize(r.load, r.outcomes, [*r.checked.values()], r.seconds, limits_ms) for r in reported]
    if loads:
        print(format_report(loads, check, sys.stdout.encoding))
        document = {
            "format": FORMAT,
            "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "url": settings.root,
            "endpoint": args.endpoint,
            "models": weights,
            "ignore_eos": settings.ignore_eos,
            "seed": settings.seed,
            "input_len": None if args.dataset else args.input_len,
            "output_len": args.output_len,
            "dataset": None if args.dataset is None else str(args.dataset),
            "goodput_limits_ms": limits_ms,
            "outputs": {**asdict(check), "num_compared": check.num_compared},
            "loads": loads,
        }
        if args.output is not None:
            _write(args.output, json.dumps(document, indent=2) + "\n", "-o")
        if args.svg is not None:
            names = ", ".join(weights) if len(weights) <= 4 else f"{len(weights)} models"
            _write(args.svg, svg.chart(f"{names} on {settings.root}", loads, limits_ms), "--svg")
    if problems and not args.report_anyway:
        _note("a load with a failed request or a wrong output is not reported; --report-anyway reports it")
    return 1 if problems or is_different else 0


class _Progress:
    """A progress bar for each load."""

    def __init__(self, num_prompts: int | None) -> None:
        self._num_prompts = num_prompts
        self._bar: Any = None
        self._num_failed = 0

    def start(self, name: str) -> None:
        self._num_failed = 0
        self._bar = tqdm(
            desc=name, total=self._num_prompts, unit=" requests", dynamic_ncols=True, disable=not sys.stderr.isatty()
        )

    def advance(self, outcome: Outcome) -> None:
        self._num_failed += outcome.error is not None
        if self._num_failed:
            self._bar.set_postfix_str(f"{self._num_failed} failed", refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


def _write(file: Path, text: str, option: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {file}: {error.strerror}; give another file") from error
    _note(f"wrote {file}")


def _note(text: str) -> None:
    print(f"quire bench: {text}", file=sys.stderr, flush=True)
