# SPDX-License-Identifier: Apache-2.0
"""KV tiers: time to the first token of a prefix that the KV cache has evicted, and the cost of a tier without use.

    OMP_NUM_THREADS=1 python tests/bench/tier.py --rounds 7
    OMP_NUM_THREADS=1 python tests/bench/tier.py --folder /tmp/tier        with a folder behind the host memory

Random weights of the 135M shape, bfloat16. `host`: the prefix was used twice, is copied to host memory, and is evicted
from the device before each round. `computed`: a prefix of the same length that occurs for the first time. `folder`: it
is evicted from host memory too, and the files are in the page cache. Rounds alternate, and medians are compared.
`no reuse`: prompts that share nothing, in an engine with and in one without a tier, in turns.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("backend", "kernels")]

import random_checkpoint  # noqa: E402

from quire_engine.core.engine import Engine  # noqa: E402
from quire_spec.engine.config import EngineConfig  # noqa: E402
from quire_spec.engine.sampling_params import SamplingParams  # noqa: E402
from quire_spec.protocol.messages import SequenceRequest  # noqa: E402

VOCAB = 49152


class Bench:
    """An engine, and prompts that it has not seen."""

    def __init__(self, shape: str, prefix_tokens: int, **fields: Any) -> None:
        folder = random_checkpoint.cached_checkpoint(shape)
        base = {
            "model": str(folder),
            "kv_cache_memory_bytes": 2**28,
            "max_model_len": 2048,
            "skip_tokenizer_init": True,
        }
        self.engine = Engine.from_config(EngineConfig.from_json(base | fields))
        self._prefix_tokens, self._num_prompts, self._next_id = prefix_tokens, 0, 0

    def new_prefix(self) -> list[int]:
        """Return a prefix that shares no block with earlier ones."""
        self._num_prompts += 1
        return [(self._num_prompts * 7919 + i * 31) % (VOCAB - 10) + 5 for i in range(self._prefix_tokens)]

    def ttft(self, prefix: list[int]) -> float:
        """Return the seconds from the arrival of `prefix` and one more token to its first output token."""
        self._next_id += 1
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        start = time.perf_counter()
        self.engine.add(SequenceRequest(self._next_id, [*prefix, 3], params, None, None, []))
        first = 0.0
        while self.engine.has_work:
            if any(result.token_ids for result in self.engine.step().results) and not first:
                first = time.perf_counter() - start
        return first

    def throughput(self, num_requests: int, num_output: int) -> float:
        """Return output tokens per second of requests that share nothing."""
        params, num_tokens = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True), 0
        start = time.perf_counter()
        for _ in range(num_requests):
            self._next_id += 1
            self.engine.add(SequenceRequest(self._next_id, self.new_prefix()[:128], params, None, None, []))
        while self.engine.has_work:
            num_tokens += sum(len(result.token_ids) for result in self.engine.step().results)
        return num_tokens / (time.perf_counter() - start)

    def evict(self, *, host: bool = False) -> None:
        """Evict everything from the device, and from host memory too if `host` is set."""
        pools = [self.engine._block_pool, *([self.engine._scheduler.host_cache.pool] if host else [])]
        for pool in pools:
            pool.free(pool.allocate(pool.num_free))

    def store(self, prefix: list[int]) -> None:
        """Use a prefix until all its blocks are in host memory."""
        for _ in range(20):
            self.ttft(prefix)
            if self.engine.stats().num_cached_host_blocks >= len(prefix) // self.engine.config.block_size:
                return
        raise RuntimeError("the blocks are not stored: copying is slower than computing")


def _report(name: str, values: list[float], reference: list[float]) -> None:
    ratio = statistics.median(values) / statistics.median(reference)
    low, high = min(values), max(values)
    print(f"{name}: ttft_ms={statistics.median(values) * 1e3:.1f} ({low * 1e3:.1f}-{high * 1e3:.1f}) ratio={ratio:.3f}")


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(random_checkpoint.SHAPES), default="135m")
    parser.add_argument("--prefix-tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="an empty folder: also measure the folder tier")
    arguments = parser.parse_args()
    folder = {} if arguments.folder is None else {"kv_offloading_folder": arguments.folder}
    bench = Bench(arguments.shape, arguments.prefix_tokens, kv_offloading_size=1, **folder)
    prefix = bench.new_prefix()
    bench.store(prefix)
    if folder:
        time.sleep(2.0)  # the files are written
    times: dict[str, list[float]] = {"computed": [], "host": [], "folder": []}
    for _ in range(arguments.rounds):
        times["computed"].append(bench.ttft(bench.new_prefix()))
        bench.evict()
        times["host"].append(bench.ttft(prefix))
        if folder:
            bench.evict(host=True)
            times["folder"].append(bench.ttft(prefix))
    hits = bench.engine.stats().host_cache_hits
    for name, values in times.items():
        if values:
            _report(name, values, times["computed"])
    print(
        f"tokens found in host memory: {hits}, expected {len(times['host'] + times['folder']) * len(prefix) // 16 * 16}"
    )
    without = Bench(arguments.shape, arguments.prefix_tokens)
    rates: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(2 * arguments.rounds):
        name = ("on", "off")[(number + number // 2) % 2]
        rates[name].append((bench if name == "on" else without).throughput(16, 32))
    on, off = statistics.median(rates["on"]), statistics.median(rates["off"])
    print(f"no reuse: on={on:.1f} off={off:.1f} tokens/s ratio={on / off:.3f}")


if __name__ == "__main__":
    main()
