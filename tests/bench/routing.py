#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Routing by what pods have cached, against round robin: vllm-router, or Envoy with the endpoint picker, before two
`quire serve` processes.

python tests/bench/routing.py [--model FOLDER] [--policies round_robin,...] [--scraping]

With --scraping, it measures what the picker's reading of the metrics every 50 ms costs: tokens/s of one pod, and tokens
for each second of the pod's CPU time, while the picker runs, against those while it is stopped, in turn. On a busy
machine, only the second ratio counts.

The load is mooncake_conversation.jsonl: 120 requests of conversations with at least five turns, from the conversation
trace of Mooncake (FAST'25, github.com/kvcache-ai/Mooncake, FAST25-release, Apache-2.0). Its blocks of 512 tokens are
blocks of 16 tokens here, so that a small model can compute them. Each hash id becomes a fixed text. The requests are
sent at the times of the trace, compressed to --seconds; with --clients, they are sent in order by a few clients. Each
policy gets new servers, whose caches are empty. --kv-cache-memory makes the caches small, so that a pod cannot keep all
conversations.
"""

import argparse
import contextlib
import json
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "hack")]
from support.cluster import running_cluster  # noqa: E402
from support.controller_harness import answer_model_readers, llm_service  # noqa: E402
from support.envoy import running_envoy  # noqa: E402
from support.fake_kubelet import FakeKubelet  # noqa: E402
from support.picked_service import PickedService, picked_service  # noqa: E402
from support.quire_serve import EXAMPLES, QuireServeProcess  # noqa: E402
from support.routers import Router, two_pods  # noqa: E402

TRACE = Path(__file__).with_name("mooncake_conversation.jsonl")
BLOCK_SIZE = 16


def read_trace(path: Path = TRACE) -> list[tuple[float, list[int]]]:
    """Return the time in seconds and the hash ids of each request, in the order of arrival.

    Raises:
        ValueError: a line is not a request; the message has its number.
    """
    requests = []
    last = 0.0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        row = json.loads(line)
        ids, timestamp = row["hash_ids"], row["timestamp"]
        if timestamp < last or not ids or any(type(i) is not int or i < 0 for i in ids):
            raise ValueError(f"{path}:{number}: timestamps must not decrease, and hash_ids must be numbers from 0 on")
        last = timestamp
        requests.append((timestamp / 1000, ids))
    return requests


class BlockText:
    """Texts of BLOCK_SIZE tokens each, whose tokens stay the same when they are joined."""

    def __init__(self, tokenize: Any) -> None:
        """`tokenize` returns the token ids of a text without special tokens."""
        candidates = (
            Path(__file__).read_text() + "a story of the house and the garden in time with one small dog"
        ).split()
        words = sorted({f" {word}" for word in candidates if word.isalpha()})
        self._words = [word for word in words if len(tokenize(word)) == 1]
        assert len(self._words) >= 12, f"the tokenizer has too few words: {self._words}"
        sample = self.of(list(range(20)))
        assert len(tokenize(sample)) == 20 * BLOCK_SIZE, "the blocks are not whole"

    def of(self, hash_ids: list[int]) -> str:
        return "".join("".join(random.Random(i).choices(self._words, k=BLOCK_SIZE)) for i in hash_ids)


def send(url: str, prompt: str, max_tokens: int = 8) -> tuple[float, dict[str, Any]]:
    """Send a request; return the time to its first token and its usage."""
    body = {"model": "tales", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    started, first, usage = time.monotonic(), None, None
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if line.startswith(b"data: {"):
                first = first or time.monotonic() - started
                usage = json.loads(line[6:]).get("usage")
    assert first is not None and usage, "the stream has no usage"
    return first, usage


def replay(url: str, requests: list[tuple[float, str]]) -> list[tuple[float, dict[str, Any]]]:
    """Send each prompt at its time; return what `send` returns of each."""
    started = time.monotonic()

    def at_its_time(request: tuple[float, str]) -> tuple[float, dict[str, Any]]:
        time.sleep(max(0.0, started + request[0] - time.monotonic()))
        return send(url, request[1])

    with ThreadPoolExecutor(len(requests)) as pool:
        return [*pool.map(at_its_time, requests)]


def service(args: argparse.Namespace, replicas: int) -> tuple[dict[str, Any], Path]:
    """Return an LLMService whose model is on the claim `models`, and the folder of the claim."""
    model = args.model or EXAMPLES / "models/tiny"
    engine = {"dtype": "float32"} | ({"kvCacheMemory": args.kv_cache_memory} if args.kv_cache_memory else {})
    document = llm_service(
        replicas=replicas,
        model={"source": {"pvc": {"claimName": "models", "path": model.name}}, "servedName": "tales"},
        engine=engine,
        networking={"inferencePool": {"targetPort": "openai", "endpointPicker": {"name": "picker"}}},
    )
    return document, model.parent


@contextlib.contextmanager
def picked(args: argparse.Namespace, replicas: int, folder: Path) -> Iterator[PickedService]:
    """Start a service behind the picker."""
    document, claim = service(args, replicas)
    with running_cluster(folder) as cluster:
        cluster.install_crd()
        with FakeKubelet(cluster) as kubelet:
            answer_model_readers(kubelet, claim / document["spec"]["model"]["source"]["pvc"]["path"])
            with picked_service(cluster, kubelet, document, folder, claim) as found:
                yield found


@contextlib.contextmanager
def front(policy: str, args: argparse.Namespace, folder: Path) -> Iterator[tuple[QuireServeProcess, str]]:
    """Start two pods behind a router; yield one of them and the router's URL."""
    if policy == "endpoint_picker":
        with picked(args, 2, folder) as found:
            yield next(iter(found.pods.running.values())), f"http://127.0.0.1:{found.port}"
        return
    document, claim = service(args, 2)
    pvc = document["spec"]["model"]["source"].pop("pvc")
    document["spec"]["model"]["source"]["path"] = str(claim / pvc["path"])
    with two_pods(document, folder) as pods:
        if policy == "envoy_round_robin":
            hosts = [("127.0.0.1", pod.ports["openai"]) for pod in pods]
            with running_envoy(hosts, folder) as port:
                yield pods[0], f"http://127.0.0.1:{port}"
        else:
            with Router(args.binaries, f"vllm-router:{policy}", pods, "tales", folder / "router.log") as router:
                yield pods[0], router.url


def compare(args: argparse.Namespace) -> None:
    """Print the hit rate and the times to the first token of each policy."""
    trace = read_trace()[: args.requests]
    begin, end = trace[0][0], trace[-1][0]
    scale = args.seconds / (end - begin)
    for policy in args.policies.split(","):
        with (
            tempfile.TemporaryDirectory(prefix="quire-routing-") as temporary,
            front(policy, args, Path(temporary)) as (pod, url),
        ):

            def tokenize(text: str, pod: QuireServeProcess = pod) -> list[int]:
                body = {"prompt": text, "add_special_tokens": False}
                return pod.request("openai", "/tokenize", body).body["tokens"]

            text = BlockText(tokenize)
            prompts = [text.of(ids) for _, ids in trace]
            started = time.monotonic()
            if args.clients:
                with ThreadPoolExecutor(args.clients) as pool:
                    results = [*pool.map(partial(send, url), prompts)]
            else:
                results = replay(url, [((at - begin) * scale, p) for (at, _), p in zip(trace, prompts, strict=True)])
            seconds = time.monotonic() - started
            num_blocks = re.search(r'num_gpu_blocks="(\d+)"', pod.metrics())
        ttfts = [ttft for ttft, _ in results]
        total = sum(usage["prompt_tokens"] for _, usage in results)
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for _, usage in results)
        print(
            f"{policy}: hit rate {cached / total:.3f}, TTFT p50 {statistics.median(ttfts) * 1000:.0f} ms, "
            f"p95 {statistics.quantiles(ttfts, n=20)[-1] * 1000:.0f} ms, {seconds:.1f} s for {total} prompt tokens, "
            f"{num_blocks and num_blocks[1]} blocks in each pod",
            flush=True,
        )


def measure_scraping(args: argparse.Namespace) -> None:
    """Print tokens/s of a pod, and tokens for each second of its CPU time, while the picker reads its metrics and while
    it is stopped, for each round."""
    ratios: list[tuple[float, ...]] = []
    stop = threading.Event()

    def load(url: str, number: int) -> None:
        while not stop.is_set():
            send(url, f"{number} Once", 256)

    def tokens(pod: QuireServeProcess) -> float:
        found = re.search(r"^vllm:generation_tokens_total{.*} (\S+)$", pod.metrics(), re.MULTILINE)
        return float(found[1]) if found else 0.0

    with (
        tempfile.TemporaryDirectory(prefix="quire-routing-") as temporary,
        picked(args, 1, Path(temporary)) as found,
        ThreadPoolExecutor(args.clients or 8) as pool,
    ):
        ((address, pod),) = found.pods.running.items()
        for number in range(args.clients or 8):
            pool.submit(load, f"http://{address}:{pod.ports['openai']}", number)
        picker = psutil.Process(found.picker.process.pid)
        try:
            for number in range(args.rounds):
                rates = {}
                for is_read in (True, False) if number % 2 else (False, True):
                    picker.send_signal(signal.SIGCONT if is_read else signal.SIGSTOP)
                    time.sleep(0.5)
                    before, cpu_s, at = tokens(pod), pod.cpu_seconds(), time.monotonic()
                    time.sleep(args.seconds / args.rounds / 2)
                    num_tokens, seconds = tokens(pod) - before, time.monotonic() - at
                    rates[is_read] = num_tokens / seconds, num_tokens / (pod.cpu_seconds() - cpu_s)
                ratios.append(tuple(a / b for a, b in zip(rates[True], rates[False], strict=True)))
                print(f"read every 50 ms, not read: {rates[True]}, {rates[False]}", flush=True)
        finally:
            picker.send_signal(signal.SIGCONT)
            stop.set()
    for name, values in zip(("tokens/s", "tokens for each CPU second"), zip(*ratios, strict=True), strict=True):
        print(f"{name}: ratio {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=Path, default=Path(".venv-clients/requirements-routers/bin"))
    parser.add_argument("--model", type=Path, help="folder of a checkpoint (default: the example's)")
    parser.add_argument("--policies", default="round_robin,cache_aware,kv_aware,envoy_round_robin,endpoint_picker")
    parser.add_argument("--seconds", type=float, default=60, help="in which the trace is replayed, or for --scraping")
    parser.add_argument("--clients", type=int, default=0, help="send in order from so many clients instead")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--kv-cache-memory", help="spec.engine.kvCacheMemory, such as 24Mi")
    parser.add_argument("--scraping", action="store_true")
    parser.add_argument("--rounds", type=int, default=5, help="of --scraping")
    args = parser.parse_args()
    (measure_scraping if args.scraping else compare)(args)


if __name__ == "__main__":
    sys.exit(main())
