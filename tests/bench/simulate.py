# SPDX-License-Identifier: Apache-2.0
"""Error of `quire simulate` on a trace that was not used for fitting, and its speed.

    python tests/bench/simulate.py                          # the tiny model
    python tests/bench/simulate.py --service mine.yaml --rate 2

Records two traces on a real engine: the first with groups of eight and no shared beginnings, the second with groups of
four, shared beginnings and other lengths. Fits the first, simulates the second, and compares. Run it on an idle
machine: a step that waits for another program cannot be predicted. Exit status 1: a bar is missed.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK_TOKENS = 32
BARS = {"p50": 0.10, "p95": 0.20}
MIN_STEPS_PER_S = 1500


def recorded(rate: float, count: int, max_tokens: int) -> list[dict[str, object]]:
    """Return requests that arrive at random, half of them alone and half of them in groups of eight, and share
    nothing."""
    rng, now, trace = random.Random(1), 0.0, []
    while len(trace) < count:
        size = 8 if rng.random() < 1 / 9 else 1
        now += rng.expovariate(rate / (16 / 9))
        for _ in range(size):
            lengths = {"input_length": rng.randrange(16, max_tokens), "output_length": rng.randrange(8, 128)}
            trace.append({"timestamp": 1000 * now, **lengths})
    return trace[:count]


def bursts(rate: float, count: int, max_tokens: int) -> list[dict[str, object]]:
    """Return requests that arrive in groups of four and share beginnings."""
    rng, now, trace = random.Random(2), 0.0, []
    for index in range(count):
        now += rng.expovariate(rate / 4) if index % 4 == 0 else 0.0
        num_blocks = rng.randrange(2, max_tokens // BLOCK_TOKENS)
        shared, document = rng.randrange(num_blocks), rng.randrange(6)
        hash_ids = [document * 10_000 + i if i < shared else 100_000 + index * 1000 + i for i in range(num_blocks)]
        lengths = {"input_length": num_blocks * BLOCK_TOKENS, "output_length": rng.randrange(8, 96)}
        trace.append({"timestamp": 1000 * now, **lengths, "hash_ids": hash_ids})
    return trace


def simulate(*arguments: object) -> str:
    """Run `quire simulate` and return its output."""
    command = [sys.executable, "-m", "quire_operator.cli", "simulate", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> int:
    """Measure; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--service", type=Path, default=ROOT / "examples/llmservice.yaml")
    parser.add_argument("--rate", type=float, default=12.0, help="requests a second (default %(default)s)")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=900, help="longest prompt (default %(default)s)")
    args = parser.parse_args()
    block_size = f"--trace-block-size={BLOCK_TOKENS}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for trace_name, make in (("recorded", recorded), ("bursts", bursts)):
            lines = make(args.rate, args.requests, args.max_tokens)
            (folder / f"{trace_name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
            recording = folder / f"{trace_name}.recording"
            simulate("record", "-f", args.service, f"--trace={folder}/{trace_name}.jsonl", block_size, "-o", recording)
        print(simulate("fit", folder / "recorded.recording", "-o", folder / "steps.json"))
        holds = True
        for trace_name in ("recorded", "bursts"):
            real = _latencies(folder, f"{trace_name}.recording")
            command = ("run", f"--model={folder}/steps.json", f"--trace={folder}/{trace_name}.jsonl", block_size)
            result = json.loads(simulate(*command, "-o", "json"))
            print(f"{trace_name}: simulated / recorded, {result['outside_share']:.1%} extrapolated")
            for kind, values in result["latencies_ms"].items():
                for percentile, value in values.items():
                    ratio, bar = value / real[kind][percentile], BARS.get(percentile)
                    fails = trace_name == "bursts" and bar is not None and abs(ratio - 1) > bar
                    holds &= not fails
                    note = "" if bar is None else f"  (bar {bar:.0%}){'  FAIL' if fails else ''}"
                    print(
                        f"  {kind:5}{percentile:4}{value:10.2f} / {real[kind][percentile]:8.2f} ms = {ratio:.3f}{note}"
                    )
        speed = result["simulated_steps_per_s"]
        print(f"{speed:.0f} simulated steps a second (bar {MIN_STEPS_PER_S})")
    return 0 if holds and speed >= MIN_STEPS_PER_S else 1


def _latencies(folder: Path, name: str) -> dict[str, dict[str, float]]:
    from quire_engine.simulation.recording import read_recording

    latencies = read_recording(folder / name).timeline.latencies()
    return {"ttft": latencies.ttft, "itl": latencies.itl}


if __name__ == "__main__":
    sys.exit(main())
