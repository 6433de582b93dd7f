# SPDX-License-Identifier: Apache-2.0
"""Output tokens per second with KV events and without: `python tests/bench/kv_events.py [--rounds 6]`.

Two text processes with one core each serve the same random weights. One core publishes KV events, and a subscriber
reads them all in this process. Each round sends the same requests, which share nothing, to both of them in turn. The
ratio of the cores' CPU times says more than that of the rates if other programs run. Exit status 1: the bar is missed.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import random_checkpoint
import zmq
from data_parallel import EngineProcesses, measure, plain
from nodocker_cluster.ports import free_ports

MIN_RATIO = 0.98


def main() -> int:
    """Measure; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--shape", choices=sorted(random_checkpoint.SHAPES), default="135m")
    args = parser.parse_args()
    model, (port,) = random_checkpoint.cached_checkpoint(args.shape), free_ports(1)
    config = {"model": str(model), "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 2**28}
    events = {"kv_events_config": {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}"}}
    rates: dict[str, list[float]] = {"on": [], "off": []}
    cpu_seconds = {"on": 0.0, "off": 0.0}
    with (
        tempfile.TemporaryDirectory() as folder,
        EngineProcesses(Path(folder) / "on", None, **config, **events) as on,
        EngineProcesses(Path(folder) / "off", None, **config) as off,
    ):
        subscriber = Subscriber(port)
        for processes in (on, off):
            processes.start("core", "text", timeout_s=300.0)
            asyncio.run(measure(processes.folder, plain, False, -1))
        for key in range(args.rounds):
            for name, processes in (("on", on), ("off", off))[:: 1 if key % 2 else -1]:
                before = sum(psutil.Process(processes.processes["core"].pid).cpu_times()[:2])
                rates[name].append(asyncio.run(measure(processes.folder, plain, False, key)))
                cpu_seconds[name] += sum(psutil.Process(processes.processes["core"].pid).cpu_times()[:2]) - before
            print(f"on {rates['on'][-1]:.0f}, off {rates['off'][-1]:.0f} tokens/s", flush=True)
        assert subscriber.num_batches > 100, "the subscriber receives the events"
    ratio = statistics.median(a / b for a, b in zip(rates["on"], rates["off"], strict=True))
    print(f"CPU time of the core, off / on: {cpu_seconds['off'] / cpu_seconds['on']:.3f}")
    print(f"{subscriber.num_batches} batches; median ratio of {args.rounds} rounds {ratio:.3f} (bar {MIN_RATIO})")
    return int(ratio < MIN_RATIO)


class Subscriber:
    """Reads all events in a thread."""

    def __init__(self, port: int) -> None:
        self.num_batches = 0
        self._socket = zmq.Context().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            self._socket.recv_multipart()
            self.num_batches += 1


if __name__ == "__main__":
    sys.exit(main())
