# SPDX-License-Identifier: Apache-2.0
"""Cost of the OpenAI front: time that it adds to a first token, and what slow readers cost other streams.

ttft: one request at a time, in turns through the front and as a frame to the text process, which the front itself
sends. The difference of the two times to a first token is what the front adds.

slow: connections that read one byte a second, beside normal streams. They hold complete outputs that their clients have
not read. Reported are memory of front and text process for each connection, and the time between tokens of the normal
streams, with the connections and without, in alternating runs.

messages: streams of the Messages API beside streams of chat completions, in alternating runs. The checkpoint needs a
chat template.
"""

import argparse
import contextlib
import json
import os
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import measure
import psutil
import random_checkpoint
from child import ChildProcess
from workload import Workload

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / path) for path in ("tests", "hack", "backend", "kernels")]

import routes  # noqa: E402
from support.engine_processes import first_event, wait_for  # noqa: E402
from support.openai_front import OpenAIFront, running_front  # noqa: E402

MAX_ADDED_TTFT_MS = 3.0
MAX_BYTES_PER_CONNECTION = 50_000
MAX_ITL_RATIOS = {"p50": 1.05, "p99": 1.20}
RECEIVE_BUFFER_BYTES = 2048
EXAMPLES = """\
examples:
  python tests/bench/openai_front.py --model examples/models/tiny --parts ttft
  python tests/bench/openai_front.py --model examples/models/tiny --parts slow --connections 100 --runs 1
  python tests/bench/openai_front.py --model examples/models/tiny --parts messages --streams 24 --runs 10
  python tests/bench/openai_front.py --shape 135m
"""


def http_message(body: dict[str, object], headers: str = "") -> bytes:
    """Return a request for a completion as it goes over the wire."""
    data = json.dumps({"model": "base", "temperature": 0, "ignore_eos": True, "stream": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def measure_ttft(front: OpenAIFront, num_pairs: int, num_prompt_tokens: int, vocab_size: int) -> dict[str, float]:
    """Return the medians of both paths and of the difference within a pair, in milliseconds."""
    http_ms, frame_ms = [], []
    workload = Workload(1, (num_prompt_tokens,) * 2, (1, 1), vocab_size, 0)
    with front.engine.connect("text", "stub") as text, socket.create_connection(("127.0.0.1", front.port)) as http:
        http.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        text.submit([1], max_tokens=1)
        text.receive()

        def through_the_front(prompt: list[int]) -> float:
            started, received = time.perf_counter(), b""
            http.sendall(http_message({"prompt": prompt, "max_tokens": 1}))
            while b"data: " not in received:
                received += http.recv(65536)
                assert received.startswith(b"HTTP/1.1 200"), received
            elapsed = time.perf_counter() - started
            while not received.endswith(b"0\r\n\r\n"):
                received += http.recv(65536)
            return elapsed

        def as_a_frame(prompt: list[int]) -> float:
            started = time.perf_counter()
            delta = first_event(text, text.submit(prompt, max_tokens=1, temperature=0, ignore_eos=True))
            elapsed = time.perf_counter() - started
            assert delta.final
            return elapsed

        for i in range(num_pairs + 5):
            pair = [(as_a_frame, frame_ms), (through_the_front, http_ms)]
            for j, (send, times) in enumerate(pair[:: 1 if i % 2 else -1]):
                elapsed = send(workload.requests(i, j)[0].prompt_token_ids)
                if i >= 5:  # the first ones warm up
                    times.append(1e3 * elapsed)
    added = [a - b for a, b in zip(http_ms, frame_ms, strict=True)]
    medians = {"front_ms": statistics.median(http_ms), "frame_ms": statistics.median(frame_ms)}
    return {**medians, "added_p50_ms": statistics.median(added), "added_p99_ms": measure.percentile(added, 99)}


@contextlib.contextmanager
def slow_readers(front: OpenAIFront, count: int, num_tokens: int, vocab_size: int, key: int) -> Iterator[None]:
    """Open connections whose outputs are complete in the engine; each reads one byte a second."""
    workload = Workload(count, (16, 16), (num_tokens,) * 2, vocab_size, 1)
    # A long id makes events of 0.4 kB, so that an output is larger than what the kernel takes.
    headers = f"X-Request-Id: {'x' * 120}\r\n"
    body = {"max_tokens": num_tokens, "stream_options": {"continuous_usage_stats": True}}
    connections, done = [], threading.Event()

    def read() -> None:
        while not done.wait(1.0):
            for connection in connections:
                with contextlib.suppress(BlockingIOError):
                    assert connection.recv(1), "the front closed a connection"

    try:
        for request in workload.requests(key):
            connection = socket.socket()
            # Before the connection exists: it decides the window.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            connection.connect(("127.0.0.1", front.port))
            connection.sendall(http_message({"prompt": request.prompt_token_ids, **body}, headers))
            connection.setblocking(False)
            connections.append(connection)
        reader = threading.Thread(target=read)
        reader.start()
        wait_for(lambda: num_connections(front) >= count, what="the connections")
        time.sleep(1.0)  # the last requests reach the engine
        front.engine.wait_idle()
        yield
        done.set()
        reader.join()
    finally:
        done.set()
        for connection in connections:
            connection.close()
    wait_for(lambda: num_connections(front) <= count // 10, what="the end of the connections")


def num_connections(front: OpenAIFront) -> int:
    """Return the open connections of the front."""
    return len([c for c in psutil.Process(front.process.pid).net_connections("tcp") if c.status == "ESTABLISHED"])


def private_bytes(front: OpenAIFront) -> dict[str, int]:
    """Return the memory of front and text process that they share with no other process."""
    pids = {"front": front.process.pid, "text": front.engine.processes["text"].pid}
    return {name: psutil.Process(pid).memory_full_info().uss for name, pid in pids.items()}


def measure_slow_readers(
    front: OpenAIFront, args: argparse.Namespace, vocab_size: int, folder: Path
) -> dict[str, object]:
    """Return memory by connection, and times between tokens of the normal streams with and without slow readers."""
    itls: dict[str, list[dict[str, float]]] = {"alone": [], "beside": []}
    sizes = (args.prompt_tokens,) * 2, (args.tokens,) * 2
    workload = Workload(args.streams, *sizes, vocab_size, 2)
    memory: dict[str, float] = {}
    with ChildProcess("clients", "clients.py", {"model": "base", "openai": front.port}, folder) as clients:

        def run(*key: object) -> dict[str, float]:
            requests = workload.requests(*key)
            reply = clients.call("run", requests=requests, offsets=None, via="openai")
            itl: dict[str, float] = measure.measure(requests, None, reply)["itl_ms"]
            return itl

        run("warm-up")
        for i in range(args.runs):
            before = private_bytes(front)
            itls["alone"].append(run(i, "alone"))
            with slow_readers(front, args.connections, args.slow_tokens, vocab_size, i):
                if not memory:
                    after = private_bytes(front)
                    memory = {name: (after[name] - before[name]) / args.connections for name in before}
                itls["beside"].append(run(i, "beside"))
                unread = num_connections(front)
            assert unread >= args.connections, "every connection is open until the end of the run"
    pairs = list(zip(itls["alone"], itls["beside"], strict=True))
    ratios = {p: measure.summarize_spread([b[p] / a[p] for a, b in pairs]) for p in MAX_ITL_RATIOS}
    medians = {name: {p: statistics.median(r[p] for r in runs) for p in ("p50", "p99")} for name, runs in itls.items()}
    return {"bytes_per_connection": memory, "itl_ms": medians, "itl_ratio": ratios}


def main(args: argparse.Namespace) -> int:
    """Measure, print, and return 1 above a bar."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    model = (args.model or random_checkpoint.cached_checkpoint(args.shape)).resolve()
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    config = {"dtype": "auto", "max_num_seqs": 64, "max_num_queued_reqs": 4 * args.connections}
    load, is_met = [os.getloadavg()[0]], True
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as temporary:
        folder = Path(temporary)
        with running_front(folder, model=model, num_threads=None, **config) as front:
            if "ttft" in args.parts:
                ttft = measure_ttft(front, args.pairs, args.prompt_tokens, vocab_size)
                print(json.dumps(ttft))
                is_met = ttft["added_p50_ms"] <= MAX_ADDED_TTFT_MS
                print(f"added TTFT p50 {ttft['added_p50_ms']:.2f} ms, bar {MAX_ADDED_TTFT_MS:g}", flush=True)
            if "slow" in args.parts:
                slow = measure_slow_readers(front, args, vocab_size, folder)
                print(json.dumps(slow))
                num_bytes = sum(slow["bytes_per_connection"].values())  # type: ignore[attr-defined]
                is_met &= num_bytes <= MAX_BYTES_PER_CONNECTION
                print(f"memory per connection {num_bytes / 1e3:.1f} kB, bar {MAX_BYTES_PER_CONNECTION / 1e3:g}")
                for p, bar in MAX_ITL_RATIOS.items():
                    ratio = slow["itl_ratio"][p]["median"]  # type: ignore[index]
                    is_met &= ratio <= bar
                    print(f"ITL {p} beside / alone {ratio:.3f}, bar {bar:g}")
            if "messages" in args.parts:
                speeds = routes.measure_routes(front, args.streams, args.tokens, args.runs)
                print(json.dumps(speeds))
                is_met &= speeds["ratio"] >= routes.MIN_MESSAGES_RATIO
                print(f"messages / chat {speeds['ratio']:.3f}, bar {routes.MIN_MESSAGES_RATIO:g}")
    print(f"load {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after")
    return not is_met


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, help="folder of a checkpoint")
    add("--shape", choices=sorted(random_checkpoint.SHAPES), default="135m", help="random weights")
    add(
        "--parts",
        type=lambda text: text.split(","),
        default=["ttft", "slow"],
        help="parts: ttft,slow,messages (default: ttft,slow)",
    )
    add("--pairs", type=int, default=200, help="requests through each path (default: %(default)s)")
    add("--prompt-tokens", type=int, default=32, help="tokens of each prompt (default: %(default)s)")
    add("--connections", type=int, default=1000, help="connections that read one byte a second (default: %(default)s)")
    add("--slow-tokens", type=int, default=64, help="tokens of each slow output (default: %(default)s)")
    add("--streams", type=int, default=32, help="streams of normal readers (default: %(default)s)")
    add("--tokens", type=int, default=128, help="tokens of each normal output (default: %(default)s)")
    add("--runs", type=int, default=5, help="with and without slow readers (default: %(default)s)")
    sys.exit(main(parser.parse_args()))
