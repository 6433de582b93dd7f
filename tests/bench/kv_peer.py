# SPDX-License-Identifier: Apache-2.0
"""KV peers: speed of a read over TCP, time to the first token of a prefix that a peer has, and the cost without use.

    OMP_NUM_THREADS=1 python tests/bench/kv_peer.py --rounds 7

Random weights of the 135M shape, bfloat16. The peer is a process with an engine of its own and the server of KV blocks.

- transfer: the blocks of a prefix, from the lease to checked rows of this process, against as many bytes from a plain
  socket of a process that does nothing else. Bytes/s.
- ttft: a prefix that the peer has computed, and whose blocks are only on its device, against one that is computed.
- no reuse: prompts that share nothing, in an engine with and in one without peers, in turns. Tokens/s.
"""

import argparse
import contextlib
import multiprocessing
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "backend", "kernels")]

from tier import Bench  # noqa: E402

from quire_spec.engine.sampling_params import SamplingParams  # noqa: E402
from quire_spec.protocol.messages import SequenceRequest  # noqa: E402

BARS = {"transfer": 0.6, "ttft": 0.3, "no reuse": 0.98}
"""Transfer and tokens/s: at least this ratio. TTFT: at most this ratio."""


class PeerBench(Bench):
    """An engine that reads from peers."""

    def __init__(self, arguments: argparse.Namespace, key_file: Path, prompt_offset: int = 0) -> None:
        transfer = {"key_file": str(key_file), "allowed_peers": ["127.0.0.0/8:1"]}
        super().__init__(arguments.shape, arguments.prefix_tokens, kv_offloading_size=1, kv_transfer=transfer)
        self._num_prompts = prompt_offset
        # As in a pod that has run for a while: no row is written for the first time.
        rows, layout = self.engine._runner.host_rows, self.engine.row_layout
        for row in range(self.engine.memory.swap_bytes // layout.row_bytes):
            for buffer in rows.buffers(row):
                buffer[:] = bytes(len(buffer))

    def ttft_with_peer(self, prefix: list[int], source: str) -> float:
        """Return the seconds to the first output token of a prefix that `source` has."""
        self._next_id += 1
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        start = time.perf_counter()
        self.engine.add(SequenceRequest(self._next_id, [*prefix, 3], params, kv_source=source))
        while self.engine.has_work:
            self.engine.step()
        return time.perf_counter() - start

    def keys(self, prefix: list[int]) -> list[bytes]:
        """Return the keys of the blocks of a prefix."""
        hasher, keys, parent = self.engine.block_hasher, [], self.engine.block_hasher.root(None, None)
        for start in range(0, len(prefix) // hasher.block_size * hasher.block_size, hasher.block_size):
            parent = hasher.extend(parent, prefix[start : start + hasher.block_size])
            keys.append(parent)
        return keys

    def transfer(self, prefix: list[int], source: str) -> float:
        """Read the blocks of a prefix into rows; return bytes per second."""
        keys, done = self.keys(prefix), threading.Event()
        pool, num_read = self.engine._scheduler.host_cache.pool, []
        rows = pool.allocate(len(keys))
        store = self.engine._peers.find(source)
        start = time.perf_counter()
        store.read(keys, rows, lambda number: (num_read.append(number), done.set()))
        done.wait()
        seconds = time.perf_counter() - start
        pool.free(rows)
        assert num_read == [len(keys)], store.errors
        return len(keys) * self.engine.row_layout.row_bytes / seconds


def _serve(pipe: Connection, arguments: argparse.Namespace, key_file: Path) -> None:
    """Compute the prefixes that come through the pipe, and serve their blocks."""
    from support.kv_peer import PeerServer

    bench = PeerBench(arguments, key_file)
    server = PeerServer(bench.engine, key_file)
    pipe.send(server.address)
    while (prefix := pipe.recv()) is not None:
        bench.ttft(prefix)
        pipe.send(None)
    server.close()


def _send_plain(pipe: Connection, num_bytes: int) -> None:
    data = memoryview(bytearray(num_bytes))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname())
        connection, _ = listener.accept()
        with connection:
            while connection.recv(1):
                connection.sendall(data)


@contextlib.contextmanager
def _child(function: Any, *args: Any) -> Iterator[tuple[Connection, Any]]:
    """Run a function in another process; yield the pipe to it and its first message."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(theirs, *args), daemon=True)
    process.start()
    try:
        yield ours, ours.recv()
    finally:
        # It ends by itself, unless there was an error.
        process.join(10)
        process.terminate()
        process.join()


def _plain_speed(connection: socket.socket, buffer: memoryview) -> float:
    start, position = time.perf_counter(), 0
    connection.sendall(b"?")
    while position < len(buffer):
        position += connection.recv_into(buffer[position:])
    return len(buffer) / (time.perf_counter() - start)


def _report(name: str, values: list[float], reference: list[float], unit: str, scale: float) -> None:
    ratio = statistics.median(values) / statistics.median(reference)
    spread = f"{min(values) / scale:.1f}-{max(values) / scale:.1f}"
    print(
        f"{name}: {statistics.median(values) / scale:.1f} {unit} ({spread}), reference "
        f"{statistics.median(reference) / scale:.1f} {unit}, ratio={ratio:.3f} bar={BARS[name]}"
    )


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="135m")
    parser.add_argument("--prefix-tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder, "key")
        key_file.touch(0o600)
        key_file.write_text("k" * 32)
        with _child(_serve, arguments, key_file) as (peer, source):
            bench = PeerBench(arguments, key_file, prompt_offset=1000)
            _compare(bench, peer, source, arguments)
            peer.send(None)
    without = Bench(arguments.shape, arguments.prefix_tokens, kv_offloading_size=1)
    rates: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(2 * arguments.rounds):
        name = ("on", "off")[(number + number // 2) % 2]
        rates[name].append((bench if name == "on" else without).throughput(16, 32))
    _report("no reuse", rates["on"], rates["off"], "tokens/s", 1)


def _compare(bench: PeerBench, peer: Connection, source: str, arguments: argparse.Namespace) -> None:
    times: dict[str, list[float]] = {"computed": [], "peer": []}
    speeds: dict[str, list[float]] = {"plain": [], "peer": []}
    bench.ttft(bench.new_prefix())
    prefix: list[int] = []
    for _ in range(arguments.rounds):
        times["computed"].append(bench.ttft(bench.new_prefix()))
        prefix = bench.new_prefix()
        peer.send(prefix)
        peer.recv()
        times["peer"].append(bench.ttft_with_peer(prefix, source))
    expected = arguments.rounds * (len(prefix) // bench.engine.config.block_size)
    stats = bench.engine.stats()
    print(f"blocks read: {stats.num_peer_read_blocks}, expected {expected}, errors {stats.peer_errors}")
    _report("ttft", times["peer"], times["computed"], "ms", 1e-3)
    assert bench.engine.row_layout is not None
    num_bytes = len(bench.keys(prefix)) * bench.engine.row_layout.row_bytes
    with (
        _child(_send_plain, num_bytes) as (_, address),
        socket.create_connection(address) as connection,
    ):
        buffer = memoryview(bytearray(num_bytes))
        for _ in range(arguments.rounds + 1):
            speeds["plain"].append(_plain_speed(connection, buffer))
            speeds["peer"].append(bench.transfer(prefix, source))
    _report("transfer", speeds["peer"][1:], speeds["plain"][1:], "MB/s", 1e6)


if __name__ == "__main__":
    main()
