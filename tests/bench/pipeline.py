# SPDX-License-Identifier: Apache-2.0
"""Two pipeline stages beside one process with as many threads: tokens/s, and the idle time of the busiest stage.

    python tests/bench/pipeline.py [--rounds 2] [--seconds 8] [--nodes | --reload]

32 sequences decode greedily on random weights of a 135M Llama, in bfloat16. The figures begin when all of them decode.
Each engine runs in a process of its own, and the engines alternate. The fastest round of an engine counts, because
other work on the machine only makes rounds slower. The script prints:

- stages/process: tokens/s of two stages, with one thread each, relative to one process with two threads.
- one step/process: the same with one step in flight (pipeline_micro_batches 1).
- bubble: the part of the time in which the busiest stage uses no CPU.

--nodes instead compares two stages on two nodes, which are network namespaces, with the same stages on one (nodes/one
machine). --reload starts two `quire serve` of the example on two nodes, kills a rank, and prints the time until
all models answer again, relative to that of the cold start of both (reload/cold start). Both need root.

Exit status 1: a bar is missed.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import random_checkpoint

from quire_engine.core.engine import Engine
from quire_engine.executor.rank_node import RankNode
from quire_engine.weights.checkpoint import Checkpoint
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.messages import SequenceRequest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "hack")]

from support.node_group import running_group, write_key  # noqa: E402
from support.node_namespaces import NodeNamespace, node_namespaces  # noqa: E402

MIN_RATIO, MAX_BUBBLE = 0.88, 0.15
MAX_RELOAD = 0.6
NUM_SEQS = 32
_ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
"""Environment of a node, because both nodes share the cores of this machine, of which they know nothing."""
ENGINES: dict[str, dict[str, Any]] = {
    "process": {},
    "stages": {"pipeline_parallel_size": 2},
    "one step": {"pipeline_parallel_size": 2, "pipeline_micro_batches": 1},
}


def _config(fields: dict[str, Any]) -> EngineConfig:
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
    return config


def measure(fields: dict[str, Any], seconds: float) -> dict[str, float]:
    """Return tokens/s and the idle share of the busiest process of this node."""
    config = _config(fields)
    engine = Engine.from_config(config)
    ranks = [psutil.Process(), *psutil.Process().children()]
    assert len(ranks) == config.ranks_per_node, ranks
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


def _measure_in_child(fields: dict[str, Any], seconds: float, enter: tuple[str, ...] = ()) -> dict[str, float]:
    argv = [*enter, sys.executable, __file__, "--fields", json.dumps(fields), "--seconds", str(seconds)]
    env = _ONE_THREAD if enter else None
    output = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
    return dict(json.loads(output.splitlines()[-1]))


@contextlib.contextmanager
def _second_node(fields: dict[str, Any], node: NodeNamespace) -> Iterator[None]:
    argv = [*node.enter, sys.executable, __file__, "--fields", json.dumps(fields), "--node-rank=1"]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, env=_ONE_THREAD) as process:
        try:
            yield
        finally:
            process.kill()


def measure_nodes(rounds: int, seconds: float) -> int:
    """Print tokens/s of two stages on two nodes and on one machine."""
    best = {"one machine": 0.0, "nodes": 0.0}
    with node_namespaces(2) as nodes, tempfile.TemporaryDirectory() as folder:
        fields = {"nnodes": 2, "master_addr": nodes[0].address, "rank_key_file": str(write_key(Path(folder, "key")))}
        stages = ENGINES["stages"]
        for _ in range(rounds):
            figures = {"one machine": _measure_in_child(stages, seconds)["tokens/s"]}
            with _second_node(stages | fields, nodes[1]):
                figures["nodes"] = _measure_in_child(stages | fields, seconds, nodes[0].enter)["tokens/s"]
            best = {name: max(speed, figures[name]) for name, speed in best.items()}
            print(", ".join(f"{name} {speed:.0f} tokens/s" for name, speed in figures.items()), flush=True)
    print(f"nodes/one machine {best['nodes'] / best['one machine']:.3f}")
    return 0


def measure_reload(rounds: int) -> int:
    """Print the seconds from the kill of a rank to ready, and those of the cold start."""
    ratios = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            started = time.monotonic()
            with running_group(Path(folder)) as group:
                group.wait_ready()
                cold_s = time.monotonic() - started
                # After a group that lasted, the pauses begin with the shortest one.
                time.sleep(31)
                group.processes(1, "rank_worker_process")[0].kill()
                killed = time.monotonic()
                group.leader.wait(lambda leader=group.leader: leader.health()[0] == 503, 20, "not ready")
                group.wait_ready()
                reload_s = time.monotonic() - killed
        ratios.append(reload_s / cold_s)
        print(f"cold start {cold_s:.1f} s, reload {reload_s:.1f} s, ratio {ratios[-1]:.3f}", flush=True)
    ratio = statistics.median(ratios)
    print(f"reload/cold start {ratio:.3f} (bar {MAX_RELOAD})")
    return int(ratio > MAX_RELOAD)


def main() -> int:
    """Print the figures of each round, and compare the best ones with the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--nodes", action="store_true", help="compare two nodes with one machine")
    parser.add_argument("--reload", action="store_true", help="measure the time from the kill of a rank to ready")
    parser.add_argument("--fields", type=json.loads, help="measure only an engine with these fields, in this process")
    parser.add_argument("--node-rank", type=int, help="with --fields, compute for an engine on another node")
    args = parser.parse_args()
    if args.node_rank is not None:
        config = _config(args.fields)
        checkpoint = Checkpoint.load(Path(config.model))
        with tempfile.TemporaryDirectory() as folder:
            RankNode(config, checkpoint, args.node_rank, config.master_addr or "", Path(folder)).run()
        return 0
    if args.fields is not None:
        print(json.dumps(measure(args.fields, args.seconds)))
        return 0
    if args.nodes:
        return measure_nodes(args.rounds, args.seconds)
    if args.reload:
        return measure_reload(args.rounds)
    best, bubbles = dict.fromkeys(ENGINES, 0.0), []
    for _ in range(args.rounds):
        figures = {engine: _measure_in_child(fields, args.seconds) for engine, fields in ENGINES.items()}
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
