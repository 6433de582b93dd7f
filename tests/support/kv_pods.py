# SPDX-License-Identifier: Apache-2.0
"""Real services that read each other's KV blocks, and what tests read from their metrics."""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodocker_cluster.ports import free_ports
from support.engine_processes import IpcClient
from support.quire_serve import PORTS, QuireServeProcess

ALWAYS_READ = "--kv-recompute-threshold=0"
"""The option with which a service reads blocks also when other programs make reads slower than computing."""
DAY = "{} went to the forest on day {} and saw a bear."


@dataclass
class KVPods:
    """The services, and the addresses that they may name."""

    services: list[QuireServeProcess]
    transfer_ports: list[int]
    """Port of the KV blocks of each service."""
    relay_ports: Iterator[int]
    """Free ports that are allowed peers."""

    @property
    def addresses(self) -> list[str]:
        """Where each service serves its KV blocks."""
        return [f"127.0.0.1:{port}" for port in self.transfer_ports]

    @property
    def openai_addresses(self) -> list[str]:
        """Where each service serves its OpenAI API."""
        return [f"127.0.0.1:{service.ports['openai']}" for service in self.services]


@contextlib.contextmanager
def kv_pods(
    document: dict[str, Any],
    folder: Path,
    *flags: str,
    num_relays: int = 10,
    places: Sequence[set[int]] = (),
    engines: Sequence[dict[str, Any]] = ({}, {}),
) -> Iterator[KVPods]:
    """Start a service for each of `engines`, which has its settings beside those of the document. The last one is
    stopped at the end, if it still runs; the others are killed. `places` are the processors of each service, which then
    has one thread."""
    key = folder / "key"
    key.touch(0o600)
    key.write_text("k" * 32)
    ports = [dict(zip((*PORTS, "openai", "transfer"), free_ports(6), strict=True)) for _ in engines]
    relay_ports = free_ports(num_relays)
    transfer_ports = [names.pop("transfer") for names in ports]
    allowed = [*transfer_ports, *(names["openai"] for names in ports), *relay_ports]
    peers = ",".join(f"127.0.0.1:{port}" for port in allowed)
    services: list[QuireServeProcess] = []
    try:
        for number, transfer_port in enumerate(transfer_ports):
            own = [f"--kv-transfer-port={transfer_port}", f"--kv-transfer-key-file={key}"]
            own.append(f"--kv-transfer-peers={peers}")
            spec = document["spec"] | {"engine": document["spec"].get("engine", {}) | engines[number]}
            pod_document, pod_folder = document | {"spec": spec}, folder / f"pod-{number}"
            pod_folder.mkdir()
            with _placed(places[number]) if places else contextlib.nullcontext(None) as env:
                pod = QuireServeProcess(pod_document, pod_folder, *own, *flags, ports=ports[number], env=env)
            services.append(pod)
        for service in services:
            service.wait_ready()
        yield KVPods(services, transfer_ports, iter(relay_ports))
        services[-1].stop()
    finally:
        for service in services:
            if service.process.poll() is None:
                service.kill()
                service.assert_nothing_left()
            service.clean_up()


@contextlib.contextmanager
def _placed(processors: set[int]) -> Iterator[dict[str, str]]:
    """Processes that are started meanwhile, with this environment, have one thread for computing on these
    processors."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield os.environ | {"OMP_NUM_THREADS": "1"}
    finally:
        os.sched_setaffinity(0, before)


def forest(name: str, num_days: int = 14) -> str:
    """Return a prompt; two different names have no common beginning of a block."""
    return " ".join(DAY.format(name, day) for day in range(num_days))


def metric(service: QuireServeProcess, name: str) -> dict[str, float]:
    """Return the values of a metric by their labels except model_name."""
    values = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", service.metrics(), re.MULTILINE)
    return {re.sub(r',?model_name="[^"]*",?', "", labels): float(value) for labels, value in values}


def num_leases(service: QuireServeProcess) -> int:
    """Return how many leases other pods have."""
    with IpcClient(service.folder / "run/kv_peer.sock", "supervisor") as client:
        return int(client.call("status")["num_leases"])


def num_rows(service: QuireServeProcess) -> int:
    """Return how many rows of host memory these leases pin."""
    return int(metric(service, "quire_kv_transfer_leased_blocks")[""])
