#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prefill apart from decode, against two mixed pods: latencies of short requests under bursts of long prompts.

python tests/bench/disaggregation.py [--rounds 2] [--seconds 24]

Random weights of a small shape, bfloat16, in pods (`quire serve`) of one thread. Short requests (16 to 256 prompt
tokens, 32 output tokens) arrive at random at half of the rate that one mixed pod can serve. Every 2 s, four prompts of
four chunks with one output token arrive at once. A chunk (--chunk) must be so small that one pod can compute these
prompts in time: in 2 s, a pod must compute sixteen chunks.

- mixed: the requests go to two pods in turn.
- apart: all requests go to a decode pod, which has a prefill pod compute the long prompts (x-prefiller-host-port). The
  decode pod itself computes only short prompts, so that its own chunks can be small (--decode-chunk).

Each of the two processors has a mixed pod and a pod of a role. The pods of one way are idle while the other way is
measured. The time to the first token and the times between tokens are those of the short requests, as a client measures
them. A result is the ratio of the p99 of both, over all rounds.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import aiohttp
import random_checkpoint

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "hack")]
from support.kv_pods import KVPods, kv_pods, metric  # noqa: E402

BAR = 0.5
LONG_CHUNKS = 4
BURST, BURST_S = 4, 2.0
SHORT_TOKENS = (16, 256)
OUTPUT_TOKENS = 32
CAPACITY_CLIENTS, CAPACITY_S = 16, 8.0
WARM_UP_S = 18.0
PREFILL, DECODE, MIXED = 0, 1, (2, 3)
"""Numbers of the pods."""
VOCAB = 49_000


@dataclass
class Latencies:
    """What clients measured, in seconds."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    long_first: list[float] = field(default_factory=list)

    def add(self, other: "Latencies") -> None:
        for name in ("first", "between", "long_first"):
            getattr(self, name).extend(getattr(other, name))


def p(values: list[float], percent: float) -> float:
    """Return a percentile in milliseconds, by the nearest rank."""
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))] * 1000


class Client:
    """Sends requests with random prompts, of which no two have a common beginning."""

    def __init__(self, session: aiohttp.ClientSession, pods: KVPods, seed: int, long_tokens: int) -> None:
        self._session, self._pods, self._random = session, pods, random.Random(seed)
        self._long_tokens = long_tokens

    async def send(self, pod: int, num_tokens: int, num_output: int, prefiller: str = "") -> list[float]:
        """Send a request; return the seconds until each of its output tokens."""
        prompt = [self._random.randrange(2, VOCAB) for _ in range(num_tokens)]
        body = {"prompt": prompt, "max_tokens": num_output, "ignore_eos": True, "temperature": 0, "stream": True}
        headers = {"x-prefiller-host-port": prefiller} if prefiller else {}
        url = f"http://{self._pods.openai_addresses[pod]}/v1/completions"
        started, times = time.perf_counter(), []
        async with self._session.post(url, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    assert not line.startswith(b'data: {"error"'), line
                    times.append(time.perf_counter() - started)
        return times

    async def capacity(self) -> float:
        """Return how many short requests a second one mixed pod can serve."""
        end, count = time.perf_counter() + CAPACITY_S, 0

        async def run() -> None:
            nonlocal count
            while time.perf_counter() < end:
                await self.send(MIXED[1], self._random.randint(*SHORT_TOKENS), OUTPUT_TOKENS)
                count += 1

        started = time.perf_counter()
        await asyncio.gather(*(run() for _ in range(CAPACITY_CLIENTS)))
        return count / (time.perf_counter() - started)

    async def measure(self, is_apart: bool, rate: float, seconds: float) -> Latencies:
        """Run the load for some seconds, and wait for its last requests."""
        found, number = Latencies(), 0
        prefiller = self._pods.openai_addresses[PREFILL] if is_apart else ""

        def next_pod() -> int:
            nonlocal number
            number += 1
            return DECODE if is_apart else MIXED[number % 2]

        async def short() -> None:
            times = await self.send(next_pod(), self._random.randint(*SHORT_TOKENS), OUTPUT_TOKENS, prefiller)
            found.first.append(times[0])
            found.between += [later - earlier for earlier, later in pairwise(times)]

        async def long() -> None:
            found.long_first.append((await self.send(next_pod(), self._long_tokens, 1, prefiller))[0])

        async def shorts(group: asyncio.TaskGroup) -> None:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                await asyncio.sleep(self._random.expovariate(rate))
                group.create_task(short())

        async def bursts(group: asyncio.TaskGroup) -> None:
            for _ in range(int(seconds / BURST_S)):
                for _ in range(BURST):
                    group.create_task(long())
                await asyncio.sleep(BURST_S)

        async with asyncio.TaskGroup() as group:
            group.create_task(shorts(group))
            group.create_task(bursts(group))
        return found


async def compare(pods: KVPods, args: argparse.Namespace) -> dict[str, Latencies]:
    """Measure both ways in turn."""
    results = {"mixed": Latencies(), "apart": Latencies()}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        client = Client(session, pods, 0, LONG_CHUNKS * args.chunk)
        # As in pods that have run for a while: the long prompts have used every row of host memory.
        for is_apart, seconds in ((False, BURST_S), (True, WARM_UP_S)):
            await client.measure(is_apart, 1.0, seconds)
        rate = await client.capacity() / 2
        print(f"short requests: {rate:.2f}/s, half of what one pod serves", flush=True)
        for number in range(args.rounds):
            for name in ("mixed", "apart") if number % 2 == 0 else ("apart", "mixed"):
                found = await client.measure(name == "apart", rate, args.seconds)
                results[name].add(found)
                print_latencies(f"round {number + 1}, {name}", found)
    return results


def print_latencies(title: str, found: Latencies) -> None:
    """Print the percentiles of a run."""
    between = ", ".join(f"p{percent} {p(found.between, percent):.0f}" for percent in (50, 95, 99))
    first = ", ".join(f"p{percent} {p(found.first, percent):.0f}" for percent in (50, 95, 99))
    print(
        f"{title}: {len(found.first)} short requests, ITL {between}; TTFT {first}; "
        f"TTFT of long prompts p50 {p(found.long_first, 50):.0f} ms",
        flush=True,
    )


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=24.0, help="of each run")
    parser.add_argument("--shape", default="135m-8-layers")
    parser.add_argument("--chunk", type=int, default=192, help="tokens of a step; prompts have four times as many")
    parser.add_argument("--decode-chunk", type=int, default=64, help="tokens of a step of the decode pod")
    parser.add_argument("--mixed-chunk", type=int, help="tokens of a step of mixed pods (default: --chunk)")
    args = parser.parse_args()
    engine = {"dtype": "bfloat16", "maxModelLen": 2048, "maxNumSeqs": 32}
    engine |= {"kvCacheMemory": "768Mi", "kvCacheOffloading": {"memory": "256Mi"}}
    document = {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "bench"},
        "spec": {
            "model": {"source": {"path": str(random_checkpoint.cached_checkpoint(args.shape))}},
            "device": "CPU",
            "lora": {"maxLoaded": 0},
            "engine": engine,
        },
    }
    cpus = sorted(os.sched_getaffinity(0))
    places = [{cpus[0]}, {cpus[1 % len(cpus)]}] * 2
    chunks = (args.chunk, args.decode_chunk, *[args.mixed_chunk or args.chunk] * len(MIXED))
    engines = [{"maxNumBatchedTokens": chunk} for chunk in chunks]
    with (
        tempfile.TemporaryDirectory(prefix="quire-bench-") as folder,
        kv_pods(document, Path(folder), places=places, engines=engines) as pods,
    ):
        results = asyncio.run(compare(pods, args))
        print("results of the header:", json.dumps(metric(pods.services[DECODE], "quire_remote_prefills_total")))
        print("failed reads:", json.dumps(metric(pods.services[DECODE], "quire_kv_transfer_errors_total")))
    for name, found in results.items():
        print_latencies(name, found)
    mixed, apart = results["mixed"], results["apart"]
    ratios = {
        "ITL p99": p(apart.between, 99) / p(mixed.between, 99),
        "TTFT p99": p(apart.first, 99) / p(mixed.first, 99),
    }
    for name, ratio in ratios.items():
        print(f"{name}, apart / mixed: {ratio:.2f} (bar {BAR})")
    print(f"TTFT p50 of long prompts, apart / mixed: {p(apart.long_first, 50) / p(mixed.long_first, 50):.2f}")
    sys.exit(any(ratio > BAR for ratio in ratios.values()))


if __name__ == "__main__":
    main()
