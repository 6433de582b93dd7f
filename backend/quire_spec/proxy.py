# SPDX-License-Identifier: Apache-2.0
"""Which proxy a URL is asked through, by the environment: one rule for everything that reads sources, whose libraries
have several. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from urllib.parse import SplitResult, urlsplit

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Proxy:
    """What leads to a URL."""

    url: str = field(repr=False)
    """May hold its password."""
    variable: str
    """Of the environment, which names it."""

    def __str__(self) -> str:
        scheme, _, rest = self.url.partition("://")
        # Of a password that is no part of a URL, too, as one with a slash in it.
        return f"the proxy {scheme}://{rest.rpartition('@')[2]}, which {self.variable} names"


def proxy_of(url: str, environment: Mapping[str, str]) -> Proxy | None:
    """The proxy that HTTPS_PROXY, HTTP_PROXY or ALL_PROXY names for a URL, unless NO_PROXY names its host.

    Of a variable in both cases, the one in lower case counts, as it does for curl and for Python's own library.
    """
    try:
        parts = urlsplit(url)
        if _is_near(parts, _value("no_proxy", environment)[1]):
            return None
    except ValueError:
        # No URL that can be asked, by whichever way.
        return None
    for name in (f"{parts.scheme}_proxy", "all_proxy"):
        variable, value = _value(name, environment)
        if value:
            return Proxy(value if "://" in value else f"http://{value}", variable)
    return None


def by_way_of(url: str, environment: Mapping[str, str], words: str) -> str:
    """What to add to the words of an error of no answer: the host that was asked, where it is not among them, and the
    proxy, as nobody else says that it was one's answer that was missing."""
    found = proxy_of(url, environment)
    try:
        host = urlsplit(url).netloc.rpartition("@")[2]
    except ValueError:
        host = ""
    if found is not None:
        return f"; {'it' if host in words else host} was asked through {found}"
    return "" if host in words else f"; {host} was asked"


def _value(name: str, environment: Mapping[str, str]) -> tuple[str, str]:
    variable = name if name in environment else name.upper()
    return variable, environment.get(variable, "").strip()


def _is_near(parts: SplitResult, no_proxy: str) -> bool:
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or _PORTS.get(parts.scheme, 0)
    return any(_names(entry.strip().lower(), host, port) for entry in no_proxy.split(","))


def _names(entry: str, host: str, port: int) -> bool:
    """Whether an entry of NO_PROXY, a host, domain, address or network, with a port or without, names a host."""
    if entry in ("", "*"):
        return entry == "*"
    name, colon, its_port = entry.rpartition(":")
    if colon and its_port.isdecimal() and (":" not in name or name.endswith("]")):
        if int(its_port) != port:
            return False
        entry = name
    try:
        return ip_address(host) in ip_network(entry.strip("[]"), strict=False)
    except ValueError:
        return f".{host}".endswith(f".{entry.lstrip('*').lstrip('.')}")
