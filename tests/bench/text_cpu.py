# SPDX-License-Identifier: Apache-2.0
"""CPU time of the text process per token, with 64 streams: `python tests/bench/text_cpu.py [--base FOLDER]`.

A real core of the tiny model generates the tokens, and one client reads all streams over the socket. With --base, each
round measures this tree and another tree of the project in turn; the other tree has an environment of its own in
`.venv`. The exit code is 1 if this tree needs more than 1.1 times the CPU time of the base.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_RATIO = 1.1
NUM_STREAMS, NUM_TOKENS, NUM_RUNS = 64, 800, 4


def main() -> int:
    """Compare both trees; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="tree to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each tree (default: %(default)s)")
    parser.add_argument("--one-tree", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_tree:
        print(measure_tree(args.one_tree))
        return 0
    now: list[float] = []
    base: list[float] = []
    for _ in range(args.rounds):
        now.append(run_in_tree(Path(__file__).resolve().parents[2]))
        if args.base:
            base.append(run_in_tree(args.base.resolve()))
        print(f"now {now[-1]:.2f} us per token" + (f", base {base[-1]:.2f}" if base else ""), flush=True)
    if not base:
        return 0
    ratio = statistics.median(now) / statistics.median(base)
    print(f"median of {args.rounds}: {ratio:.3f} (bar {MAX_RATIO})")
    return int(ratio > MAX_RATIO)


def run_in_tree(tree: Path) -> float:
    """Measure one tree in its own environment; return the microseconds per token."""
    command = [tree / ".venv/bin/python", __file__, f"--one-tree={tree}"]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure_tree(tree: Path) -> float:
    """Return the microseconds of CPU time of the text process for each token."""
    sys.path[:0] = [str(tree / "tests"), str(tree / "hack")]
    import psutil
    from support.engine_processes import EngineProcesses

    with tempfile.TemporaryDirectory() as name:
        config = {"model": str(tree / "examples/models/tiny"), "device": "cpu", "kv_cache_memory_bytes": 2**28}
        processes = EngineProcesses(Path(name), max_num_seqs=NUM_STREAMS, max_model_len=1024, **config)
        with processes.start("core", "text"):
            text = psutil.Process(processes.processes["text"].pid)
            asyncio.run(run_streams(Path(name), 40))
            before = text.cpu_times()
            for _ in range(NUM_RUNS):
                asyncio.run(run_streams(Path(name), NUM_TOKENS))
            after = text.cpu_times()
    seconds = after.user + after.system - before.user - before.system
    return seconds / (NUM_RUNS * NUM_STREAMS * NUM_TOKENS) * 1e6


async def run_streams(folder: Path, num_tokens: int) -> None:
    """Run all streams at once."""
    from quire_spec.constants import TEXT_SOCKET
    from quire_spec.engine.sampling_params import SamplingParams
    from quire_spec.protocol.messages import GenerateRequest, Hello, OutputDelta
    from quire_spec.protocol.request_client import RequestClient

    client = RequestClient(folder / TEXT_SOCKET, Hello("openai", pid=os.getpid()))
    await client.connect()
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    is_done = [asyncio.get_running_loop().create_future() for _ in range(NUM_STREAMS)]
    for number, done in enumerate(is_done):

        def sink(delta: OutputDelta, done: "asyncio.Future[None]" = done) -> None:
            assert delta.error_code is None, delta.error
            if delta.final:
                done.set_result(None)

        prompt = [7 + number, *range(20, 50)]
        client.submit(GenerateRequest(client.new_id(), "base", None, prompt, params, True), sink)
    await asyncio.gather(*is_done)
    await client.close()


if __name__ == "__main__":
    sys.exit(main())
