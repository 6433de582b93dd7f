# SPDX-License-Identifier: Apache-2.0
"""Free ports that remain free until their program listens."""

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from nodocker_cluster import ports
from nodocker_cluster.ports import free_ports

HACK = Path(ports.__file__).parents[1]


@pytest.fixture
def few(tmp_path, monkeypatch):
    """Ten consecutive ports that no other process was given, all unused."""
    while (given := free_ports(10))[-1] != given[0] + 9:
        pass
    monkeypatch.setattr(ports, "PORTS", range(given[0], given[0] + 10))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return given


def test_ports_are_not_reused_before_all_were_used(few):
    given = [port for count in (1, 4, 3, 2) for port in free_ports(count)]
    assert given == few
    assert free_ports(3) == few[:3]


def test_ports_in_use_are_skipped(few):
    with socket.create_server(("127.0.0.1", few[2])):
        assert free_ports(4) == [few[0], few[1], few[3], few[4]]
        with pytest.raises(OSError, match="9 of 10 ports"):
            free_ports(10)
    assert len(free_ports(10)) == 10


def test_concurrent_processes_get_different_ports():
    argv = [sys.executable, "-c", "from nodocker_cluster.ports import *; print(*(free_ports(4) for _ in range(50)))"]

    def run(_):
        return subprocess.run(argv, cwd=HACK, capture_output=True, text=True, check=True, timeout=60).stdout

    with ThreadPoolExecutor() as pool:
        given = "".join(pool.map(run, range(3))).replace("]", ",").replace("[", "").replace("\n", "").split(",")
    numbers = [int(number) for number in given if number.strip()]
    assert len(numbers) == len(set(numbers)) == 600


def test_ports_are_below_the_ephemeral_range():
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports.PORTS) < low
