# SPDX-License-Identifier: Apache-2.0
"""Addresses of a cluster with a node, and the link between this machine and that node.

The node has a network namespace of its own: its bridge, its pods and its packet filter are nobody else's, and go with
it. The link goes too when the namespace does, so nothing has to be taken down.
"""

import subprocess

HOST = "10.245.0.1"
"""This machine, as the node and its pods see it."""
NODE = "10.245.0.2"
LINK_BITS = 30
PODS = "10.244.0.0/24"
SERVICES = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
DNS = "10.96.0.10"
"""Nobody answers there: Debian has no package of CoreDNS. Pods find services by address."""
_DEVICE = "quire0"


class LinkError(Exception):
    """The link cannot be made; the message says why."""


def connect(pid: int) -> None:
    """Link this machine with the network namespace of process `pid`, and route pods and services there.

    Raises:
        LinkError: another cluster has the link, or this machine does not allow it.
    """
    _ip("link", "add", _DEVICE, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    _ip("address", "add", f"{HOST}/{LINK_BITS}", "dev", _DEVICE)
    _ip("link", "set", _DEVICE, "up")
    for where in (PODS, SERVICES):
        _ip("route", "add", where, "via", NODE, "onlink", "dev", _DEVICE)


def connected() -> bool:
    """Whether a cluster has the link now."""
    return subprocess.run(["ip", "link", "show", _DEVICE], capture_output=True, check=False).returncode == 0


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
