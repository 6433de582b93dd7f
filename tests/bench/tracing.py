# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of `quire serve` with and without traces of all requests, in alternating rounds.

Two servers run in turns: one sends the spans of every request to a real OpenTelemetry Collector, the other has tracing
off. Clients stream short completions, so that there are many spans for each token.

    make cluster-tools                                 # builds the collector
    python tests/bench/tracing.py                      # the tiny model
    python tests/bench/tracing.py --shape 135m --rounds 3
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
import random_checkpoint

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / path) for path in ("tests", "hack", "backend")]

from support.otlp_receiver import OtlpReceiver, running_collector  # noqa: E402
from support.quire_serve import EXAMPLES, QuireServeProcess  # noqa: E402

MIN_RATIO = 0.97


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
    """Print the ratio and return 1 if it is below the bar, or if spans are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="shape of random weights (default: the tiny model)")
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--requests", type=int, default=8, help="requests of each stream in a round")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each request")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    model = EXAMPLES / "models/tiny" if args.shape is None else random_checkpoint.cached_checkpoint(args.shape)
    with OtlpReceiver() as receiver, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_collector(receiver, folder) as port:
            flags = {"off": (), "on": (f"--otlp-traces-endpoint=http://127.0.0.1:{port}",)}
            servers = {}
            for mode, more in flags.items():
                (folder / mode).mkdir()
                argv = ("--served-model-name=base", *more)
                servers[mode] = QuireServeProcess(str(model), folder / mode, *argv)
            try:
                ratios = _measure(servers, args)
            finally:
                for server in servers.values():
                    server.stop()
        num_spans = sum(span.name == "text_completion base" for span in receiver.spans)
    expected = (args.rounds + 1) * args.streams * args.requests
    ratio = statistics.median(ratios)
    print(f"traced / not traced: {ratio:.3f} (bar {MIN_RATIO}); rounds {[round(value, 3) for value in ratios]}")
    print(f"spans of requests: {num_spans} of {expected}")
    return int(ratio < MIN_RATIO or num_spans != expected)


def _measure(servers: dict[str, QuireServeProcess], args: argparse.Namespace) -> list[float]:
    for server in servers.values():
        server.wait_ready()
    ratios = []
    for number in range(args.rounds + 1):
        order = ("off", "on") if number % 2 else ("on", "off")
        rates = {mode: asyncio.run(send(servers[mode], args.streams, args.requests, args.tokens)) for mode in order}
        print(f"round {number}: " + ", ".join(f"{mode} {rate:.0f} tokens/s" for mode, rate in sorted(rates.items())))
        if number:  # the first round fills the caches
            ratios.append(rates["on"] / rates["off"])
    return ratios


if __name__ == "__main__":
    sys.exit(main())
