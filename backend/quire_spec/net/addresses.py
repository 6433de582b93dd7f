# SPDX-License-Identifier: Apache-2.0
"""IPv4 and IPv6 addresses on which a process listens, and host names in URLs. Pure functions."""

from collections.abc import Mapping

POD_IP_VARIABLE = "POD_IP"
"""Environment variable that contains the address of the pod. If the pod has both an IPv4 and an IPv6 address, it
contains the first of them."""
ANY_ADDRESS = "0.0.0.0"
_ANY_ADDRESS_V6 = "::"


def listen_address(host: str, environment: Mapping[str, str]) -> str:
    """Return the address on which a process must listen if its option `host` has this value.

    In a pod that has an IPv6 address, 0.0.0.0 becomes ::.

    The server can listen on only one address family. Probes, Services and the operator use the first address of a pod.
    """
    return _ANY_ADDRESS_V6 if host == ANY_ADDRESS and is_ipv6(environment.get(POD_IP_VARIABLE, "")) else host


def advertised_address(host: str, environment: Mapping[str, str]) -> str:
    """Return the address at which other pods reach a process whose option `host` has this value; empty if it is not
    known."""
    return environment.get(POD_IP_VARIABLE, "") or ("" if host in (ANY_ADDRESS, _ANY_ADDRESS_V6) else host)


def is_ipv6(host: str) -> bool:
    """Return whether `host` is an IPv6 address. The result is False for a host name."""
    return ":" in host


def format_for_url(host: str) -> str:
    """Return `host` in the form that URLs require. An IPv6 address is put in brackets."""
    return f"[{host}]" if is_ipv6(host) else host
