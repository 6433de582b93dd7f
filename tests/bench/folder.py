# SPDX-License-Identifier: Apache-2.0
"""A folder with a million KV blocks: what a process that opens it needs, and how long its other threads wait.

    python tests/bench/folder.py --files 1000000 --folder /tmp/blocks        creates files if the folder has none

The files are empty; only their names matter here. A thread that stands for the steps of an engine sleeps for 1 ms again
and again, and measures how much later than that it runs.
"""

import argparse
import hashlib
import os
import resource
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "backend")]

from quire_engine.kv_transfer.folder_store import FolderStore  # noqa: E402


class _Rows:
    layout = "bench"

    def buffers(self, row: int) -> list[memoryview]:
        return [memoryview(bytearray(4096))]

    def synchronize(self) -> None:
        pass


def _create(root: Path, representation: str, num_files: int) -> None:
    for first in range(256):
        (root / representation / f"{first:02x}").mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        name = hashlib.sha256(str(number).encode()).hexdigest()
        os.close(os.open(root / representation / name[:2] / name, os.O_WRONLY | os.O_CREAT, 0o600))


def _lateness(seconds: float) -> list[float]:
    """Return by how many seconds each sleep of 1 ms was late, for this number of seconds."""
    late, end = [], time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        time.sleep(0.001)
        late.append(time.perf_counter() - start - 0.001)
    return sorted(late)


def _report(name: str, late: list[float]) -> None:
    p99, last = late[int(0.99 * len(late))] * 1e3, late[-1] * 1e3
    print(f"{name}: late by p50={late[len(late) // 2] * 1e3:.2f} p99={p99:.2f} max={last:.2f} ms")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    first = FolderStore(arguments.folder, _Rows(), "0/1", 2**50)
    if not (arguments.folder / first._representation.hex()).exists():
        start = time.perf_counter()
        _create(arguments.folder, first._representation.hex(), arguments.files)
        print(f"created {arguments.files} files in {time.perf_counter() - start:.1f} s")
    _report("idle", _lateness(3.0))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    store = FolderStore(arguments.folder, _Rows(), "0/1", 2**50)
    print(f"open: {(time.perf_counter() - start) * 1e3:.1f} ms")
    done = threading.Event()
    store.write([hashlib.sha256(b"new").digest()], [0], lambda _: done.set())
    done.wait()
    print(f"first write: {(time.perf_counter() - start) * 1e3:.1f} ms after the start")
    late: list[float] = []
    while len(store._index) < arguments.files:
        late += _lateness(0.1)
    print(f"all files found after {time.perf_counter() - start:.1f} s")
    _report("while they are searched", sorted(late))
    print(f"memory: {(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024:.0f} MiB more at most")
    keys = [hashlib.sha256(str(number).encode()).digest() for number in range(10_000)]
    start = time.perf_counter()
    assert store.contains(keys) == len(keys)
    print(f"contains: {(time.perf_counter() - start) / len(keys) * 1e6:.2f} us for each key")


if __name__ == "__main__":
    main()
