#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Routing by what pods have cached, against round robin: vllm-router in front of two `quire serve` processes.

PYTHONPATH=tests:hack python tests/bench/routing.py [--model FOLDER] [--policies round_robin,cache_aware,kv_aware]

The load is mooncake_conversation.jsonl: 120 requests of conversations with at least five turns, from the conversation
trace of Mooncake (FAST'25, github.com/kvcache-ai/Mooncake, FAST25-release, Apache-2.0). Its blocks of 512 tokens are
blocks of 16 tokens here, so that a small model can compute them. Each hash id becomes a fixed text. The requests are
sent in order by a few clients. Each policy gets new servers, whose caches are empty.
"""

import argparse
import json
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from support.quire_serve import example_document
from support.routers import Router, two_pods

TRACE = Path(__file__).with_name("mooncake_conversation.jsonl")
BLOCK_SIZE = 16


def read_trace(path: Path = TRACE) -> list[list[int]]:
    """Return the hash ids of each request, in the order of arrival.

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
        requests.append(ids)
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


def run(url: str, prompts: list[str], num_clients: int) -> tuple[list[float], int, int, float]:
    """Send all prompts; return the times to the first token, the cached tokens, the prompt tokens and the seconds."""
    pending: queue.SimpleQueue[str] = queue.SimpleQueue()
    for prompt in prompts:
        pending.put(prompt)
    ttfts: list[float] = []
    usages: list[dict[str, Any]] = []

    def client() -> None:
        while True:
            try:
                prompt = pending.get_nowait()
            except queue.Empty:
                return
            body = {"model": "tales", "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
            body["stream_options"] = {"include_usage": True}
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            started, first = time.monotonic(), None
            with urllib.request.urlopen(request, timeout=600) as response:
                for line in response:
                    if line.startswith(b"data: {"):
                        first = first or time.monotonic() - started
                        usage = json.loads(line[6:]).get("usage")
            assert first is not None and usage, "the stream has no usage"
            ttfts.append(first)
            usages.append(usage)

    threads = [threading.Thread(target=client) for _ in range(num_clients)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ttfts) == len(prompts), "a request failed"
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return ttfts, cached, sum(usage["prompt_tokens"] for usage in usages), time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=Path, default=Path(".venv-clients/requirements-routers/bin"))
    parser.add_argument("--model", type=Path, help="folder of a checkpoint (default: the example's)")
    parser.add_argument("--policies", default="round_robin,cache_aware,kv_aware")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=120)
    args = parser.parse_args()
    document = example_document()
    if args.model:
        document["spec"] = {"device": "CPU", "model": {"source": {"path": str(args.model)}, "servedName": "tales"}}
    trace = read_trace()[: args.requests]
    for policy in args.policies.split(","):
        with (
            tempfile.TemporaryDirectory(prefix="quire-routing-") as temporary,
            two_pods(document, Path(temporary)) as pods,
        ):

            def tokenize(text: str, pod: Any = pods[0]) -> list[int]:
                body = {"prompt": text, "add_special_tokens": False}
                return pod.request("openai", "/tokenize", body).body["tokens"]

            text = BlockText(tokenize)
            log = Path(temporary, "router.log")
            with Router(args.binaries, f"vllm-router:{policy}", pods, "tales", log) as router:
                ttfts, cached, total, seconds = run(router.url, [text.of(ids) for ids in trace], args.clients)
        print(
            f"{policy}: hit rate {cached / total:.3f}, TTFT p50 {statistics.median(ttfts) * 1000:.0f} ms, "
            f"p95 {statistics.quantiles(ttfts, n=20)[-1] * 1000:.0f} ms, {seconds:.1f} s for {total} prompt tokens",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
