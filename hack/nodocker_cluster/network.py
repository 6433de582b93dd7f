# SPDX-License-Identifier: Apache-2.0
"""Addresses of a cluster with a node, and the network link between this machine and that node.

The node has its own network namespace, which contains its bridge, pods and packet filter. When the kernel removes the
namespace, it also removes its contents and the link. Therefore, no cleanup is necessary.

If QUIRE_CLUSTER_IPV6 is set, the network uses only IPv6.
"""

import os
import subprocess
from dataclasses import dataclass

from nodocker_cluster.binaries import ClusterError

IPV6_VARIABLE = "QUIRE_CLUSTER_IPV6"
_DEVICE = "quire0"


@dataclass(frozen=True, slots=True)
class Network:
    """Addresses of a cluster in one address family."""

    host: str
    """The node and its pods reach this machine at this address."""
    node: str
    link_bits: int
    pods: str
    services: str
    api_service: str
    any_cidr: str
    """IP range of all addresses."""
    sysctls: tuple[str, ...]
    """Kernel settings of the node that are set to 1. They turn on forwarding. They also turn on address translation for
    calls from a pod to a service whose endpoint is on the same bridge as the pod."""

    @property
    def any_address(self) -> str:
        """The wildcard address. If a program listens on this address, it listens on all addresses."""
        return self.any_cidr.partition("/")[0]


V4 = Network(
    host="10.245.0.1",
    node="10.245.0.2",
    link_bits=30,
    pods="10.244.0.0/24",
    services="10.96.0.0/16",
    api_service="10.96.0.1",
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
    any_cidr="::/0",
    sysctls=("net/ipv6/conf/all/forwarding", "net/bridge/bridge-nf-call-ip6tables"),
)
DNS_DOMAIN = "cluster.local"
"""Domain of the names of Services and pods."""
NETWORK = V6 if os.environ.get(IPV6_VARIABLE) else V4
"""Network of the clusters that this process starts."""


class LinkError(ClusterError):
    """The link cannot be created; the message contains the reason."""


def connect(pid: int) -> None:
    """Link this machine with the network namespace of the process `pid`, and route the addresses of pods and services
    to it.

    Raises:
        LinkError: another cluster uses the link, or this machine does not allow the creation of links.
    """
    _ip("link", "add", _DEVICE, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    add_address(f"{NETWORK.host}/{NETWORK.link_bits}", _DEVICE)
    _ip("link", "set", _DEVICE, "up")
    for cidr in (NETWORK.pods, NETWORK.services):
        _ip("route", "add", cidr, "via", NETWORK.node, "onlink", "dev", _DEVICE)


def is_connected() -> bool:
    """Return whether a cluster uses the link."""
    return subprocess.run(["ip", "link", "show", _DEVICE], capture_output=True, check=False).returncode == 0


def add_address(address: str, device: str) -> None:
    """Assign an address to a device in this network namespace. The address can be used immediately.

    Raises:
        LinkError: the ip command failed.
    """
    # Without nodad, IPv6 would check for duplicate addresses, which takes one or two seconds.
    _ip("address", "add", address, "dev", device, *(["nodad"] if ":" in address else []))


def format_for_url(host: str) -> str:
    """Return an address in the form that a URL requires: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
