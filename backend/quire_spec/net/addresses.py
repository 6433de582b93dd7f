# SPDX-License-Identifier: Apache-2.0
"""Addresses of machines and pods, of both families."""

from collections.abc import Mapping

POD_IP_VARIABLE = "POD_IP"
"""Environment variable in which a pod is told its address, the first where it has one of each family."""
ANY_ADDRESS = "0.0.0.0"
_ANY_ADDRESS_V6 = "::"


def listen_address(host: str, environment: Mapping[str, str]) -> str:
    """Where to listen when asked to at `host`: there; but all addresses are all of the pod's family.

    The server listens on one family only, and what asks a pod (probes, Services, the operator) takes its first address.
    """
    return _ANY_ADDRESS_V6 if host == ANY_ADDRESS and is_ipv6(environment.get(POD_IP_VARIABLE, "")) else host


def is_ipv6(host: str) -> bool:
    """Whether it is an address of IPv6; a name is not."""
    return ":" in host


def format_for_url(host: str) -> str:
    """As it is written before a port."""
    return f"[{host}]" if is_ipv6(host) else host
