# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of `quire serve` with traces of all requests, with tracing off, and without OpenTelemetry.

Three servers run in alternating rounds: one sends the spans of every request to a real OpenTelemetry Collector, one has
tracing off, and one cannot import the packages of OpenTelemetry, as if the extra `tracing` were not installed. Clients
stream short completions, so that there are many spans for each token.

    make cluster-tools                                 # builds the collector
    python tests/bench/tracing.py                      # the tiny model
    python tests/bench/tracing.py --shape 135m --rounds 3
    python tests/bench/tracing.py --servers off absent # without the collector
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
import random_checkpoint

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / path) for path in ("tests", "hack", "backend")]

from support.otlp_receiver import OtlpReceiver, running_collector  # noqa: E402
from support.quire_serve import EXAMPLES, QuireServeProcess  # noqa: E402

BARS = {("on", "off"): 0.97, ("off", "absent"): 0.995}
"""Lowest ratio of the rates of two servers."""
WITHOUT_OPENTELEMETRY = """import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
"""
"""Content of a module `sitecustomize`. An environment without the extra would take 2 GB, most of it for torch."""


async def send(server: QuireServeProcess, num_streams: int, num_requests: int, num_tokens: int) -> float:
    """Return the tokens per second of all streams."""
    body = {"model": "base", "prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    url = f"http://127.0.0.1:{server.ports['openai']}/v1/completions"
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=num_streams)) as client:

        async def stream() -> None:
            for _ in range(num_requests):
                async with client.stream("POST", url, json=body) as response:
                    response.raise_for_status()
                    async for _ in response.aiter_bytes():
                        pass

        started = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(num_streams)))
        return num_streams * num_requests * num_tokens / (time.perf_counter() - started)


def main() -> int:
    """Print the ratios and return 1 if one of them is below its bar, or if spans are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="shape of random weights (default: the tiny model)")
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--requests", type=int, default=8, help="requests of each stream in a round")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each request")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--servers", nargs="+", choices=("on", "off", "absent"), default=["on", "off", "absent"])
    args = parser.parse_args()
    model = EXAMPLES / "models/tiny" if args.shape is None else random_checkpoint.cached_checkpoint(args.shape)
    with OtlpReceiver() as receiver, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        is_on = "on" in args.servers
        with running_collector(receiver, folder) if is_on else contextlib.nullcontext() as port:
            endpoint = f"--otlp-traces-endpoint=http://127.0.0.1:{port}"
            modes = {"on": (endpoint,), "off": (), "absent": ()}
            servers = {}
            for mode in args.servers:
                (folder / mode).mkdir()
                environment = _without_opentelemetry(folder) if mode == "absent" else None
                argv = ("--served-model-name=base", *modes[mode])
                servers[mode] = QuireServeProcess(str(model), folder / mode, *argv, env=environment)
            try:
                rates = _measure(servers, args)
            finally:
                for server in servers.values():
                    server.stop()
        num_spans = sum(span.name == "text_completion base" for span in receiver.spans)
    expected = (args.rounds + 1) * args.streams * args.requests if is_on else 0
    print(f"spans of requests: {num_spans} of {expected}")
    is_met = num_spans == expected
    for (mode, baseline), bar in BARS.items():
        if not {mode, baseline} <= set(rates):
            continue
        ratios = [a / b for a, b in zip(rates[mode], rates[baseline], strict=True)]
        ratio = statistics.median(ratios)
        print(f"{mode} / {baseline}: {ratio:.4f} (bar {bar}); rounds {[round(value, 3) for value in ratios]}")
        is_met &= ratio >= bar
    return int(not is_met)


def _without_opentelemetry(folder: Path) -> dict[str, str]:
    """Return an environment of processes that cannot import OpenTelemetry."""
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(WITHOUT_OPENTELEMETRY)
    environment = os.environ | {"PYTHONPATH": str(folder / "site")}
    command = [sys.executable, "-c", "import opentelemetry"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in done.stderr, "OpenTelemetry can be imported"
    return environment


def _measure(servers: dict[str, QuireServeProcess], args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the tokens per second of each server in each round."""
    for server in servers.values():
        server.wait_ready()
    if "absent" in servers:
        text = psutil.Process(servers["absent"].pid("text"))
        assert "site" in text.environ()["PYTHONPATH"], "the text process can import OpenTelemetry"
    rates: dict[str, list[float]] = {mode: [] for mode in servers}
    orders = itertools.cycle(itertools.permutations(servers))
    for number, order in zip(range(args.rounds + 1), orders, strict=False):
        for mode in order:
            rate = asyncio.run(send(servers[mode], args.streams, args.requests, args.tokens))
            if number:  # the first round fills the caches
                rates[mode].append(rate)
    return rates


if __name__ == "__main__":
    sys.exit(main())
