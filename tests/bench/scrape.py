# SPDX-License-Identifier: Apache-2.0
"""CPU time that one read of a pod's metrics costs, as an endpoint picker reads them: every 50 ms.

    python tests/bench/scrape.py [--adapters 100]

Reads the page of the health port and the page of the OpenAI port of a real `quire serve`, in turn, while all adapters
are used, and beside that measures the same load without a reader. The difference of the CPU time of all processes of
the pod, divided by the number of reads, is the cost of a read.
"""

import argparse
import http.client
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / path) for path in ("tests", "hack")]

from support.quire_serve import QuireServeProcess, example_document, running_service  # noqa: E402

INTERVAL_S = 0.05
MAX_CPU_MS = 1.0


def cpu_by_process(service: QuireServeProcess) -> dict[str, float]:
    """Return the CPU seconds of each process of the pod, by its command."""
    seconds: dict[str, float] = {}
    for process in [psutil.Process(service.process.pid), *service.child_processes()]:
        times = process.cpu_times()
        name = next((a for a in process.cmdline() if a.startswith("quire_")), process.name())
        seconds[name] = seconds.get(name, 0.0) + times.user + times.system
    return seconds


def use_adapter(service: QuireServeProcess, name: str) -> None:
    """Send a request. Only the first adapters have models of the server, so the name is a parameter."""
    service.text("tales", "Once", lora_name=name, max_tokens=1)


class Traffic(threading.Thread):
    """Uses the adapters one after the other, five times a second, until it is stopped."""

    def __init__(self, service: QuireServeProcess, adapters: list[str]) -> None:
        super().__init__(daemon=True)
        self._service, self._adapters = service, adapters
        self._stopped = threading.Event()

    def run(self) -> None:
        """Send requests."""
        index = 0
        while not self._stopped.wait(0.2):
            use_adapter(self._service, self._adapters[index % len(self._adapters)])
            index += 1

    def stop(self) -> None:
        """Stop after the current request."""
        self._stopped.set()
        self.join()


def read_pages(port: int, path: str, seconds: float) -> int:
    """Read a page every INTERVAL_S over one connection, if there is a port; return how often."""
    connection, num_reads = http.client.HTTPConnection("127.0.0.1", port) if port else None, 0
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        started_at = time.monotonic()
        if connection is not None:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            assert response.status == 200 and b"vllm:num_requests_running" in body
            num_reads += 1
        time.sleep(max(0.0, INTERVAL_S - (time.monotonic() - started_at)))
    if connection is not None:
        connection.close()
    return num_reads


def main() -> int:
    """Measure; return 1 if a read costs more than MAX_CPU_MS."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=3, help="number of adapters (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    document, holds = example_document(), True
    source = document["spec"]["adapters"][0]["source"]
    names = [f"adapter-{i}" for i in range(args.adapters)]
    document["spec"]["adapters"] = [{"name": name, "source": source} for name in names]
    with tempfile.TemporaryDirectory() as folder, running_service(document, Path(folder)) as service:
        for name in names:
            use_adapter(service, name)
        traffic = Traffic(service, names)
        traffic.start()
        for port_name in ("health", "openai"):
            baseline = _measure(service, 0, "", args.seconds)[0]
            seconds, num_reads = _measure(service, service.ports[port_name], "/metrics", args.seconds)
            costs = {name: 1000 * (seconds[name] - baseline.get(name, 0.0)) / num_reads for name in seconds}
            total = sum(costs.values())
            holds &= total <= MAX_CPU_MS
            parts = ", ".join(f"{name} {cost:.2f}" for name, cost in sorted(costs.items()) if abs(cost) >= 0.01)
            print(f"{port_name} port: {total:.2f} ms of CPU a read (bar {MAX_CPU_MS:g}), {num_reads} reads: {parts}")
        traffic.stop()
    return 0 if holds else 1


def _measure(service: QuireServeProcess, port: int, path: str, seconds: float) -> tuple[dict[str, float], int]:
    before = cpu_by_process(service)
    num_reads = read_pages(port, path, seconds)
    after = cpu_by_process(service)
    return {name: after[name] - before.get(name, 0.0) for name in after}, num_reads


if __name__ == "__main__":
    sys.exit(main())
