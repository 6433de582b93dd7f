# SPDX-License-Identifier: Apache-2.0
"""Requests over a bad link between prefill and decode: `python tests/bench/kv_link.py [--requests 2000]`. Needs root.

One pod computes each prompt, and another one reads its KV blocks and generates, over a link of 100 Mbit/s that loses
1 % of the packets in both directions. After that, the link drops all packets for 60 s while requests continue. All
prompts differ. Requests name the same prefill pod by many addresses in turn, so that the decode pod has measured
nothing about it and always reads. All programs run in a network namespace, which ends with them. Exit status 1: a
request failed, an output was wrong, no packet was lost, fewer than half of the prompts were read, or rows stay pinned.
"""

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "hack")]
from support.kv_pods import KVPods, forest, kv_pods, metric, num_leases  # noqa: E402
from support.quire_serve import QuireServeProcess, example_document  # noqa: E402

NUM_CLIENTS = 8
CHECKED = 20
"""One output in this number is compared with that of the prefill pod alone."""
MIN_READ_SHARE = 0.5
NUM_ADDRESSES = 1000
"""Addresses of the prefill pod. A measurement has expired when the decode pod uses an address again."""
NUM_SOURCES = 16
"""Addresses from which the prefill pod sees the connections of the decode pod."""
PREFILL, DECODE = 0, 1


@dataclass
class Results:
    """What clients of one phase saw."""

    seconds: list[float] = field(default_factory=list)
    num_read: int = 0
    """Prompts that the decode pod found in host memory, because it has read them."""
    failures: list[str] = field(default_factory=list)


class Link:
    """The rules for packets from and to the port of the prefill pod."""

    def __init__(self, port: int, other_ports: list[int]) -> None:
        """Connections to `other_ports` reach `port` too."""
        self._port = port
        # Small packets, as on a wire: the loopback device would pass 64 KiB at once.
        _run("ip", "link", "set", "lo", "mtu", "1500", "gso_max_size", "1500", "gso_max_segs", "1", "up")
        _run("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "100mbit", "burst", "64kb", "latency", "100ms")
        rules = [f"-A OUTPUT -p tcp --dport {other} -j REDIRECT --to-port {port}" for other in other_ports]
        # The prefill pod limits the connections from one address.
        for number in range(NUM_SOURCES):
            which = f"-m statistic --mode nth --every {NUM_SOURCES - number} --packet 0"
            rules.append(f"-A POSTROUTING -p tcp --dport {port} {which} -j SNAT --to-source 127.1.0.{number + 1}")
        _run("iptables-restore", "--noflush", text="\n".join(("*nat", *rules, "COMMIT", "")))

    def lose(self, probability: float) -> None:
        """Lose this share of all packets from now on."""
        _run("iptables", "-F", "INPUT")
        loss = ("-m", "statistic", "--mode", "random", "--probability", str(probability), "-j", "DROP")
        for side in ("--sport", "--dport"):
            _run("iptables", "-A", "INPUT", "-p", "tcp", side, str(self._port), *loss)

    @property
    def num_lost(self) -> int:
        """Packets that were lost since the last call of `lose`."""
        lines = _run("iptables", "-L", "INPUT", "-v", "-x", "-n").splitlines()
        return sum(int(line.split()[0]) for line in lines if "DROP" in line and "statistic" in line)


def _run(*command: str, text: str | None = None) -> str:
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


async def complete(
    session: aiohttp.ClientSession, pod: QuireServeProcess, prompt: str, **fields: Any
) -> dict[str, Any]:
    """Return the answer of a pod; raises ValueError for another status than 200."""
    body = {"model": "tales", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    async with session.post(f"http://127.0.0.1:{pod.ports['openai']}/v1/completions", json=body) as response:
        answer = await response.json()
        if response.status != 200:
            raise ValueError(f"{response.status}: {answer}")
    found: dict[str, Any] = answer
    return found


async def run_requests(pods: KVPods, title: str, count: int, seconds: float = 3600.0) -> Results:
    """Send `count` requests, or as many as begin within a time."""
    results, numbers, end = Results(), iter(range(count)), time.monotonic() + seconds
    started = time.monotonic()

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            if time.monotonic() > end:
                return
            prompt = forest(f"{title} {number}")
            try:
                role = {"do_remote_decode": True, "do_remote_prefill": False}
                first = await complete(session, pods.services[PREFILL], prompt, max_tokens=1, kv_transfer_params=role)
                params = first["kv_transfer_params"] | {"remote_port": next(pods.relay_ports)}
                begin = time.monotonic()
                second = await complete(session, pods.services[DECODE], prompt, kv_transfer_params=params)
                results.seconds.append(time.monotonic() - begin)
                results.num_read += second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 100
                if number % CHECKED == 0:
                    alone = await complete(session, pods.services[PREFILL], prompt)
                    if second["choices"][0]["text"] != alone["choices"][0]["text"]:
                        raise ValueError("the output is not that of the prefill pod")
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                results.failures.append(f"request {number}: {error!r}")
            if sys.stderr.isatty() or number % 500 == 499:
                print(f"\r{title}: {number + 1} requests", end="" if sys.stderr.isatty() else "\n", file=sys.stderr)

    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(*(client(session) for _ in range(NUM_CLIENTS)))
    total, ordered = len(results.seconds) + len(results.failures), sorted(results.seconds)
    p50, p99 = (1e3 * ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
    print(
        f"{title}: {total} requests in {time.monotonic() - started:.0f} s, {len(results.failures)} failed, "
        f"{results.num_read} prompts read, decode p50 {p50:.0f} ms, p99 {p99:.0f} ms",
        flush=True,
    )
    return results


def problems(pods: KVPods, link: Link, count: int, partition_s: float) -> Iterator[str]:
    """Run all phases, and yield what is wrong."""
    link.lose(0.0)
    asyncio.run(run_requests(pods, "good link", count // 10))
    link.lose(0.01)
    lossy = asyncio.run(run_requests(pods, "1 % loss", count))
    print(f"{link.num_lost} packets were lost", flush=True)
    if link.num_lost < 100:
        yield "no packets were lost"
    if lossy.num_read < MIN_READ_SHARE * count:
        yield f"{lossy.num_read} of {count} prompts were read"
    link.lose(1.0)
    parted = asyncio.run(run_requests(pods, "partition", count, partition_s))
    link.lose(0.0)
    time.sleep(31.0)  # the leases that could not be released
    healed = asyncio.run(run_requests(pods, "healed", count // 10))
    if healed.num_read < MIN_READ_SHARE * (count // 10):
        yield f"{healed.num_read} of {count // 10} prompts were read after the partition"
    for results in (lossy, parted, healed):
        yield from results.failures[:10]
    if leases := num_leases(pods.services[PREFILL]):
        yield f"{leases} leases remain"
    print("failed reads:", metric(pods.services[DECODE], "quire_kv_transfer_errors_total"))


def main() -> None:
    """Run the phases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="in the phase with loss (default: %(default)s)")
    parser.add_argument("--partition", type=float, default=60.0, help="seconds of the partition (default: %(default)s)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.inside:
        os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.argv, "--inside"])
    _run("ip", "link", "set", "lo", "up")
    document = example_document()
    document["spec"]["engine"] |= {"maxModelLen": 512, "kvCacheOffloading": {"memory": "64Mi"}}
    with (
        tempfile.TemporaryDirectory(prefix="quire-bench-") as folder,
        kv_pods(document, Path(folder), num_relays=NUM_ADDRESSES) as pods,
    ):
        ports = [*pods.relay_ports]
        pods.relay_ports = itertools.cycle(ports)
        found = [*problems(pods, Link(pods.transfer_ports[PREFILL], ports), args.requests, args.partition)]
    print(*found, sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
