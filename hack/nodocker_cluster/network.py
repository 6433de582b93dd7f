# SPDX-License-Identifier: Apache-2.0
"""Addresses of a cluster with a node, and the link between this machine and that node.

The node has a network namespace of its own: its bridge, its pods and its packet filter are nobody else's, and go with
it. The link goes too when the namespace does, so nothing has to be taken down.

QUIRE_CLUSTER_IPV6 makes all of it a network of IPv6, without any address of IPv4.
"""

import os
import subprocess
from dataclasses import dataclass

IPV6_VARIABLE = "QUIRE_CLUSTER_IPV6"
_DEVICE = "quire0"


@dataclass(frozen=True, slots=True)
class Network:
    """Addresses of one family."""

    host: str
    """This machine, as the node and its pods see it."""
    node: str
    link_bits: int
    pods: str
    services: str
    api_service: str
    dns: str
    """Nobody answers there: Debian has no package of CoreDNS. Pods find services by address."""
    any_cidr: str
    """The range of all addresses."""
    sysctls: tuple[str, ...]
    """Settings of the node's kernel, each 1: it forwards, and a pod that calls a service which leads back to its own
    bridge is translated."""

    @property
    def any_address(self) -> str:
        """The address to listen on for all of them."""
        return self.any_cidr.partition("/")[0]


V4 = Network(
    host="10.245.0.1",
    node="10.245.0.2",
    link_bits=30,
    pods="10.244.0.0/24",
    services="10.96.0.0/16",
    api_service="10.96.0.1",
    dns="10.96.0.10",
    any_cidr="0.0.0.0/0",
    sysctls=("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables"),
)
V6 = Network(
    host="fd00:10:245::1",
    node="fd00:10:245::2",
    link_bits=126,
    pods="fd00:10:244::/64",
    services="fd00:10:96::/112",
    api_service="fd00:10:96::1",
    dns="fd00:10:96::a",
    any_cidr="::/0",
    sysctls=("net/ipv6/conf/all/forwarding", "net/bridge/bridge-nf-call-ip6tables"),
)
NETWORK = V6 if os.environ.get(IPV6_VARIABLE) else V4
"""Of clusters that this process starts."""


class LinkError(Exception):
    """The link cannot be made; the message says why."""


def connect(pid: int) -> None:
    """Link this machine with the network namespace of process `pid`, and route pods and services there.

    Raises:
        LinkError: another cluster has the link, or this machine does not allow it.
    """
    _ip("link", "add", _DEVICE, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    add_address(f"{NETWORK.host}/{NETWORK.link_bits}", _DEVICE)
    _ip("link", "set", _DEVICE, "up")
    for cidr in (NETWORK.pods, NETWORK.services):
        _ip("route", "add", cidr, "via", NETWORK.node, "onlink", "dev", _DEVICE)


def is_connected() -> bool:
    """Whether a cluster has the link now."""
    return subprocess.run(["ip", "link", "show", _DEVICE], capture_output=True, check=False).returncode == 0


def add_address(address: str, device: str) -> None:
    """Give the device of this network namespace an address, which can be used at once.

    Raises:
        LinkError: it is refused.
    """
    # IPv6 would look for a second holder of the address first, for a second or two.
    _ip("address", "add", address, "dev", device, *(["nodad"] if ":" in address else []))


def format_for_url(host: str) -> str:
    """As an address is written before a port."""
    return f"[{host}]" if ":" in host else host


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
