# SPDX-License-Identifier: Apache-2.0
"""Time from the start of `quire serve` to /v2/health/ready, and to the first answer of a request, over several starts.

Two threads poll at the same time: one sends readiness requests, the other one generate requests for one token. Every
request opens a connection. The difference is positive if a ready server rejects requests, and negative if the server
answers before it reports ready.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "hack")]

from support.quire_serve import QuireServeProcess, example_document  # noqa: E402

POLL_S = 0.02
TIMEOUT_S = 120.0
EXAMPLES = """\
examples:
  python tests/bench/readiness.py --rounds 5
"""


def first_success(
    service: QuireServeProcess, is_success: Callable[[], bool], started: float, times: list[float]
) -> None:
    """Poll until `is_success` returns True or the time is over; append when it was called and when it returned."""
    while time.perf_counter() - started < TIMEOUT_S and service.process.poll() is None:
        called = time.perf_counter()
        if is_success():
            times += [called - started, time.perf_counter() - started]
            return
        time.sleep(POLL_S)


def measure(folder: Path) -> tuple[float, float, float]:
    """Return the seconds from the start of a service to ready and to its first answer, and what that request took."""
    started = time.perf_counter()
    service = QuireServeProcess(example_document(), folder)
    try:
        ready: list[float] = []
        answered: list[float] = []
        checks = [
            (lambda: service.request("http", "/v2/health/ready").status == 200, ready),
            (lambda: service.generate("tales", "Once", max_tokens=1).status == 200, answered),
        ]
        threads = [threading.Thread(target=first_success, args=(service, c, started, times)) for c, times in checks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not ready or not answered:
            raise RuntimeError(f"not ready after {TIMEOUT_S:.0f} s:\n{service.tail()}")
        return ready[1], answered[1], answered[1] - answered[0]
    finally:
        service.stop()


def main(args: argparse.Namespace) -> None:
    differences = []
    for i in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            ready_s, answered_s, request_s = measure(Path(folder))
        differences.append(answered_s - ready_s)
        times = f"ready {ready_s:.2f} s, first answer {answered_s:.2f} s, {differences[-1]:+.2f} s"
        print(f"start {i + 1}: {times}; its request took {request_s:.2f} s", flush=True)
    print(f"first answer less ready: median {statistics.median(differences):+.2f} s, largest {max(differences):+.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of starts (default: %(default)s)")
    main(parser.parse_args())
