# SPDX-License-Identifier: Apache-2.0
"""Borders of a process that reads URLs which other people write, such as the operator: the addresses that it connects
to, and that it follows redirects only on one host.

Without borders, everybody who can create an LLMService could make the operator read from the services of the cluster,
the cloud's metadata service, or the operator's own pod (server-side request forgery). The OpenAI front reads the URLs
of images inside of borders without private networks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from socket import AddressFamily
from typing import Self

from aiohttp import ThreadedResolver
from aiohttp.abc import AbstractResolver, ResolveResult

from quire_spec.errors import ConfigError, Unavailable

Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address

PRIVATE_NETWORKS = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
"""Networks of clusters and companies."""
CHART_VALUE = "sources.allowedCIDRs"
_METADATA_SERVICES = tuple(
    map(ip_network, ("168.63.129.16/32", "100.100.100.200/32", "192.0.0.192/32", "fd00:ec2::/32"))
)
"""Metadata services of clouds that are not link-local: Azure, Alibaba, Oracle, AWS."""
_NAT64 = IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class Borders:
    """The private networks from which a process may read. Public addresses are always allowed. Loopback and link-local
    addresses and metadata services never are."""

    networks: tuple[Network, ...] = tuple(map(ip_network, PRIVATE_NETWORKS))
    private_refusal: str = (
        f"its address is private and not in the chart's value {CHART_VALUE}; add its network to that value"
    )
    """Why the process does not connect to a private address, and what to do."""

    @classmethod
    def parse(cls, networks: str) -> Self:
        """Parse a list of networks in CIDR notation, separated by commas; it can be empty.

        Raises:
            ConfigError: a network is invalid.
        """
        try:
            return cls(tuple(ip_network(network) for network in networks.split(",") if network))
        except ValueError as error:
            raise ConfigError(f"{CHART_VALUE}: {error}; write networks like 10.0.0.0/8") from error

    def refusal(self, address: str) -> str | None:
        """Return why the process does not connect to an IP address; None if it does."""
        ip = _embedded(ip_address(address.partition("%")[0]))
        is_local = ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast
        if is_local or ip in IPv4Network("0.0.0.0/8") or any(ip in network for network in _METADATA_SERVICES):
            return "the process never reads from loopback or link-local addresses; use another address"
        if ip.is_global or any(ip in network for network in self.networks):
            return None
        return self.private_refusal


def _embedded(ip: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for, if there is one."""
    if isinstance(ip, IPv4Address):
        return ip
    if ip in _NAT64:
        return IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else ip)


_is_unchecked: ContextVar[bool] = ContextVar("_is_unchecked", default=False)


@contextmanager
def unchecked(is_unchecked: bool) -> Iterator[None]:
    """While the context is open, the addresses of hosts are not checked if `is_unchecked` is true: hosts that the
    administrator sets, such as a proxy."""
    token = _is_unchecked.set(is_unchecked)
    try:
        yield
    finally:
        _is_unchecked.reset(token)


class CheckingResolver(AbstractResolver):
    """Resolves host names, and refuses addresses outside of the borders.

    aiohttp connects to the addresses that its resolver returns, so a name cannot have another address when the
    connection is made (DNS rebinding).
    """

    def __init__(self, borders: Borders) -> None:
        self._borders, self._resolver = borders, ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: AddressFamily = AddressFamily.AF_INET
    ) -> list[ResolveResult]:
        """Return the allowed addresses of a host.

        Raises:
            Unavailable: none of its addresses is allowed.
            OSError: the host has no address.
        """
        results = await self._resolver.resolve(host, port, family)
        if _is_unchecked.get():
            return results
        refusals = {result["host"]: self._borders.refusal(result["host"]) for result in results}
        allowed = [result for result in results if refusals[result["host"]] is None]
        if not allowed and results:
            raise AddressRefused(str(next(iter(refusals.values()))))
        return allowed

    async def close(self) -> None:
        await self._resolver.close()


class AddressRefused(Unavailable):
    """The address of a host is outside of the borders."""
