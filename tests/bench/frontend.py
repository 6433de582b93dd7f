# SPDX-License-Identifier: Apache-2.0
"""Tokens per second through the server and one stub: `python tests/bench/frontend.py [STREAMS [TOKENS]]`.

A fake text process generates the tokens, so only the server and the stub are measured. It sends a token per stream
every 20 ms, every 5 ms, and as fast as possible. The Python clients share the machine and are slower than the server:
read the CPU time per token of server and stub, which does not depend on the clients, and take tokens/s as a lower
bound.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "hack")]

from support.frontend_harness import BASE, FrontendHarness, running_frontend  # noqa: E402
from support.quire_serve import run_concurrently  # noqa: E402


def main(num_streams: int, num_tokens: int) -> None:
    print(f"{'client':8}{'step':>7}{'tokens/s':>10}{'responses/s':>13}{'us/token server':>17}{'stub':>6}{'late':>5}")
    with tempfile.TemporaryDirectory() as folder, running_frontend(Path(folder)) as harness:
        for client in ("http", "grpc"):
            for step in (0.02, 0.005, 0):
                measure_frontend(harness, client, step, num_streams, num_tokens)


def measure_frontend(harness: FrontendHarness, client: str, step: float, num_streams: int, num_tokens: int) -> None:
    """One line of the table; `late` is how much longer than the text process alone it took."""
    call = harness.http_stream if client == "http" else harness.grpc_stream
    processes = [psutil.Process(harness.process.pid), harness.child_processes()[0]]
    before, started = [cpu_seconds(p) for p in processes], time.monotonic()
    streams = run_concurrently(
        *(call(BASE, f"step={step}", max_tokens=num_tokens) for _ in range(num_streams)), timeout=600
    )
    seconds, total = time.monotonic() - started, num_streams * num_tokens
    assert all(stream.text.count(" ") == num_tokens for stream in streams)
    server, stub = ((cpu_seconds(p) - b) / total * 1e6 for p, b in zip(processes, before, strict=True))
    rate, responses = total / seconds, sum(len(stream.pieces) for stream in streams) / seconds
    late = f"{seconds / (step * num_tokens) - 1:.0%}" if step else ""
    print(f"{client:8}{step * 1000:4.0f} ms{rate:10.0f}{responses:13.0f}{server:17.0f}{stub:6.0f}{late:>5}", flush=True)


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds that a process has used."""
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("streams", nargs="?", type=int, default=64, help="concurrent streams (default: %(default)s)")
    parser.add_argument("tokens", nargs="?", type=int, default=200, help="tokens of each stream (default: %(default)s)")
    arguments = parser.parse_args()
    main(arguments.streams, arguments.tokens)
