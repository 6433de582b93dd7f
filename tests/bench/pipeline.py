# SPDX-License-Identifier: Apache-2.0
"""Two pipeline stages beside one process with as many threads: tokens/s, and the idle time of the busiest stage.

    python tests/bench/pipeline.py [--rounds 2] [--seconds 8]

32 sequences decode greedily on random weights of a 135M Llama, in bfloat16. The figures begin when all of them decode.
Each engine runs in a process of its own, and the engines alternate. The fastest round of an engine counts, because
other work on the machine only makes rounds slower. The script prints:

- stages/process: tokens/s of two stages, with one thread each, relative to one process with two threads.
- one step/process: the same with one step in flight (pipeline_micro_batches 1).
- bubble: the part of the time in which the busiest stage uses no CPU.

Exit status 1: a bar is missed.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import psutil
import random_checkpoint

from quire_engine.core.engine import Engine
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.messages import SequenceRequest

MIN_RATIO, MAX_BUBBLE = 0.88, 0.15
NUM_SEQS = 32
ENGINES: dict[str, dict[str, Any]] = {
    "process": {},
    "stages": {"pipeline_parallel_size": 2},
    "one step": {"pipeline_parallel_size": 2, "pipeline_micro_batches": 1},
}


def measure(fields: dict[str, Any], seconds: float) -> dict[str, float]:
    """Return tokens/s and the idle share of the busiest process."""
    config = EngineConfig(
        model=str(random_checkpoint.cached_checkpoint("135m")),
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=NUM_SEQS,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        **fields,
    )
    config.validate()
    engine = Engine.from_config(config)
    ranks = [psutil.Process(), *psutil.Process().children()]
    assert len(ranks) == config.ranks_per_core, ranks
    params = SamplingParams.from_mapping({"temperature": 0.0, "max_tokens": 1900, "ignore_eos": True})
    for i in range(NUM_SEQS):
        engine.add(SequenceRequest(i, [(7 * i + j) % 40_000 for j in range(64)], params))
    num_started = 0
    while num_started < NUM_SEQS:
        num_started += len(engine.step().started)
    for _ in range(8):
        engine.step()
    num_tokens, cpu_before, start = 0, list(map(_cpu_seconds, ranks)), time.perf_counter()
    while time.perf_counter() - start < seconds:
        num_tokens += sum(len(result.token_ids) for result in engine.step().results)
    wall = time.perf_counter() - start
    busy = [(_cpu_seconds(rank) - before) / wall for rank, before in zip(ranks, cpu_before, strict=True)]
    return {"tokens/s": num_tokens / wall, "idle": 1 - max(busy), "least busy": min(busy)}


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _measure_in_child(engine: str, seconds: float) -> dict[str, float]:
    argv = [sys.executable, __file__, "--engine", engine, "--seconds", str(seconds)]
    output = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(output.splitlines()[-1]))


def main() -> int:
    """Print the figures of each round, and compare the best ones with the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--engine", choices=ENGINES, help="measure only this engine, in this process")
    args = parser.parse_args()
    if args.engine is not None:
        print(json.dumps(measure(ENGINES[args.engine], args.seconds)))
        return 0
    best, bubbles = dict.fromkeys(ENGINES, 0.0), []
    for _ in range(args.rounds):
        figures = {engine: _measure_in_child(engine, args.seconds) for engine in ENGINES}
        best = {engine: max(speed, figures[engine]["tokens/s"]) for engine, speed in best.items()}
        bubbles.append(figures["stages"]["idle"])
        speeds = ", ".join(f"{engine} {values['tokens/s']:.0f} tokens/s" for engine, values in figures.items())
        print(f"{speeds}, bubble {bubbles[-1]:.3f}, other stage busy {figures['stages']['least busy']:.3f}", flush=True)
    ratio, bubble = best["stages"] / best["process"], min(bubbles)
    print(f"stages/process {ratio:.3f} (bar {MIN_RATIO}), one step/process {best['one step'] / best['process']:.3f}")
    print(f"bubble {bubble:.3f} (bar {MAX_BUBBLE})")
    return int(ratio < MIN_RATIO or bubble > MAX_BUBBLE)


if __name__ == "__main__":
    sys.exit(main())
