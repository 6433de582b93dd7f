# SPDX-License-Identifier: Apache-2.0
"""Nodes for tests: network namespaces on this machine, each with its own address, on one bridge. Needs root.

The kernel removes a namespace and its links with the last process and name. `partition` drops packets with a rule of
the packet filter (iptables on nftables), as a broken network does: no end gets an error.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_BRIDGE = "quirenodes"
_NETWORK = "10.246."
_DIRECTIONS = (("INPUT", "--source"), ("OUTPUT", "--destination"))


@dataclass(frozen=True)
class NodeNamespace:
    """One node."""

    name: str
    address: str

    @property
    def enter(self) -> tuple[str, ...]:
        """Words before a command that is run on this node."""
        return "nsenter", f"--net=/run/netns/{self.name}"

    def wrapper(self, folder: Path, program: Path) -> Path:
        """Write a program to `folder` that runs another one on this node, and return its path."""
        path = folder / f"on-{self.name}"
        path.write_text("#!/bin/sh\nexec " + " ".join((*self.enter, str(program), '"$@"')) + "\n")
        path.chmod(0o755)
        return path

    @contextlib.contextmanager
    def partition(self, others: Sequence["NodeNamespace"]) -> Iterator[None]:
        """Drop all packets between this node and others while the context is open."""
        rules = [(chain, side, node.address) for node in others for chain, side in _DIRECTIONS]
        for rule in rules:
            self._iptables("--append", *rule)
        try:
            yield
        finally:
            for rule in rules:
                self._iptables("--delete", *rule)

    def _iptables(self, action: str, *rule: str) -> None:
        _run(*self.enter, "iptables", action, *rule, "--jump", "DROP")


def missing_for_namespaces() -> str:
    """Return what this process lacks to create namespaces and to stop their packets; empty if it lacks nothing."""
    missing = [program for program in ("ip", "iptables", "nsenter") if shutil.which(program) is None]
    return "root" if os.geteuid() else ", ".join(missing)


@contextlib.contextmanager
def node_namespaces(count: int, number: int = 77) -> Iterator[list[NodeNamespace]]:
    """Create nodes that reach each other and this machine, which has the first address of their network. Test files
    that run at the same time use different numbers."""
    bridge, network = f"{_BRIDGE}{number}", f"{_NETWORK}{number}."
    nodes = [NodeNamespace(f"{bridge}-{i}", f"{network}{i + 2}") for i in range(count)]
    _remove(bridge, nodes)
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "address", "add", f"{network}1/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for i, node in enumerate(nodes):
            _run("ip", "netns", "add", node.name)
            _run("ip", "link", "add", f"{bridge}{i}", "type", "veth", "peer", "name", "eth0", "netns", node.name)
            _run("ip", "link", "set", f"{bridge}{i}", "master", bridge, "up")
            _run("ip", "-netns", node.name, "address", "add", f"{node.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-netns", node.name, "link", "set", device, "up")
        yield nodes
    finally:
        _remove(bridge, nodes)


def _remove(bridge: str, nodes: Sequence[NodeNamespace]) -> None:
    # A connection that was cut keeps the namespace, and so both ends of its link, some minutes after its processes.
    links = [f"{bridge}{i}" for i in range(len(nodes))]
    commands = [("netns", "delete", node.name) for node in nodes] + [
        ("link", "delete", link) for link in (*links, bridge)
    ]
    for command in commands:
        subprocess.run(["ip", *command], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
