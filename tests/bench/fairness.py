# SPDX-License-Identifier: Apache-2.0
"""What a heavy client costs another one: the first token of a new client, alone and beside the load of one client.

    python tests/bench/fairness.py --model examples/models/tiny
    python tests/bench/fairness.py --shape 135m --loads prompts

The loads are one request with 1,024 prompts; eight requests with 20 log probabilities of each prompt token; and 16
streams whose client never reads. All of them have the same source address, and the new client has another one. The
first tokens of the new client's requests, one after the other, are measured while the load runs.
"""

import argparse
import contextlib
import http.client
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import random_checkpoint
from workload import Workload

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / path) for path in ("tests", "hack", "backend", "kernels")]

from support.openai_front import OpenAIFront, running_front  # noqa: E402

HEAVY_ADDRESS, NEW_ADDRESS = "127.0.0.3", "127.0.0.2"
MAX_RATIO = 3.0
"""Bar: first token of a new client beside one request with 1,024 prompts, divided by the same alone."""
TIMEOUT_S = 300.0
ENGINE = {"dtype": "auto", "max_num_batched_tokens": 512, "max_logprobs": 20, "kv_cache_memory_bytes": 512 * 2**20}
"""The token budget is the one that the planner gives to a CPU."""


def first_token_s(front: OpenAIFront, prompt: list[int]) -> float:
    """Return the seconds until the first token of a request of the new client."""
    connection = http.client.HTTPConnection("127.0.0.1", front.port, TIMEOUT_S, source_address=(NEW_ADDRESS, 0))
    body = {"model": "base", "prompt": prompt, "max_tokens": 1, "stream": True, "temperature": 0}
    started_at = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    line = response.readline()
    seconds = time.perf_counter() - started_at
    connection.close()
    assert response.status == 200 and line.startswith(b"data: {"), (response.status, line)
    return seconds


class Load:
    """Connections of the heavy client."""

    def __init__(self, front: OpenAIFront, bodies: list[dict[str, object]], reads: bool = True) -> None:
        self._sockets = [
            socket.create_connection(("127.0.0.1", front.port), TIMEOUT_S, (HEAVY_ADDRESS, 0)) for _ in bodies
        ]
        self._reads = reads
        self._num_open = len(bodies)
        self._threads = [
            threading.Thread(target=self._run, args=pair, daemon=True)
            for pair in zip(self._sockets, bodies, strict=True)
        ]

    @property
    def is_running(self) -> bool:
        """Whether a request of the load is still unanswered."""
        return self._num_open > 0

    def start(self) -> None:
        """Send all requests."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Close all connections."""
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _run(self, connection: socket.socket, body: dict[str, object]) -> None:
        data = json.dumps({"model": "base", "temperature": 0, "ignore_eos": True, **body}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close"
        connection.sendall(f"{head}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        try:
            while self._reads and connection.recv(65536):
                pass
        except OSError:
            pass
        if self._reads:
            self._num_open -= 1


def loads(vocab_size: int) -> dict[str, Callable[[OpenAIFront], Load]]:
    """Return functions that create the loads, by name."""
    prompts = [r.prompt_token_ids for r in Workload(1024, (8, 16), (1, 1), vocab_size, 1).requests()]
    long_prompts = [r.prompt_token_ids for r in Workload(8, (1500, 1500), (1, 1), vocab_size, 2).requests()]
    stream = {"prompt": prompts[0], "n": 8, "logprobs": 5, "max_tokens": 1500, "stream": True, "temperature": 1}
    return {
        "prompts": lambda front: Load(front, [{"prompt": prompts, "max_tokens": 64}]),
        "logprobs": lambda front: Load(
            front, [{"prompt": p, "prompt_logprobs": 20, "max_tokens": 16} for p in long_prompts]
        ),
        "readers": lambda front: Load(front, [stream] * 16, reads=False),
    }


@contextmanager
def running(load: Load) -> Iterator[None]:
    """Run a load while the block runs."""
    load.start()
    time.sleep(0.2)
    try:
        yield
    finally:
        load.stop()


def measure(
    front: OpenAIFront, prompts: Iterator[list[int]], seconds: float, is_running: Callable[[], bool]
) -> list[float]:
    """Return the times to the first token of requests, one after the other, while the load runs."""
    ends_at, times = time.monotonic() + seconds, []
    while time.monotonic() < ends_at and is_running():
        times.append(first_token_s(front, next(prompts)))
    return times


def main() -> int:
    """Measure each load; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint (default: random weights of --shape)")
    parser.add_argument("--shape", default="135m", choices=random_checkpoint.SHAPES)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="length of the new client's prompts")
    parser.add_argument("--seconds", type=float, default=20, help="time for each load (default %(default)s)")
    parser.add_argument("--loads", default="prompts,logprobs,readers")
    args = parser.parse_args()
    model = args.model or random_checkpoint.cached_checkpoint(args.shape)
    config = json.loads((model / "config.json").read_text())
    workload = Workload(20000, (args.prompt_tokens,) * 2, (1, 1), config["vocab_size"], 3)
    prompts = (request.prompt_token_ids for request in workload.requests())
    creators, bar_holds = loads(config["vocab_size"]), True
    with (
        tempfile.TemporaryDirectory() as folder,
        running_front(Path(folder), model=model, num_threads=None, **ENGINE) as front,
    ):
        measure(front, prompts, 3, lambda: True)
        alone = statistics.median(measure(front, prompts, 5, lambda: True))
        print(f"{'alone':<10} p50 {1000 * alone:8.1f} ms")
        for name in args.loads.split(","):
            load = creators[name](front)
            with running(load):
                times = sorted(measure(front, prompts, args.seconds, lambda load=load: load.is_running))
            if not times:
                print(f"{name:<10} ended before the first request")
                continue
            median = statistics.median(times)
            print(
                f"{name:<10} p50 {1000 * median:8.1f} ms   max {1000 * times[-1]:8.1f} ms   "
                f"ratio {median / alone:5.2f}   ({len(times)} requests)"
            )
            bar_holds &= name != "prompts" or median / alone <= MAX_RATIO
            time.sleep(1)
    return 0 if bar_holds else 1


if __name__ == "__main__":
    sys.exit(main())
