# SPDX-License-Identifier: Apache-2.0
"""IPv4 and IPv6 addresses on which a process listens, and hosts in URLs. Pure functions."""

from collections.abc import Mapping

POD_IP_VARIABLE = "POD_IP"
"""Environment variable with the pod's address. If the pod has an IPv4 and an IPv6 address, the variable contains the
first address."""
ANY_ADDRESS = "0.0.0.0"
_ANY_ADDRESS_V6 = "::"


def listen_address(host: str, environment: Mapping[str, str]) -> str:
    """Return the address on which a process with the option `host` listens; 0.0.0.0 becomes :: in a pod with an IPv6
    address.

    The server listens on one address family only. Probes, Services and the operator use a pod's first address.
    """
    return _ANY_ADDRESS_V6 if host == ANY_ADDRESS and is_ipv6(environment.get(POD_IP_VARIABLE, "")) else host


def is_ipv6(host: str) -> bool:
    """Return whether `host` is a literal IPv6 address. Return False for a host name."""
    return ":" in host


def format_for_url(host: str) -> str:
    """Return `host` in the form that a URL requires: an IPv6 address in brackets."""
    return f"[{host}]" if is_ipv6(host) else host
