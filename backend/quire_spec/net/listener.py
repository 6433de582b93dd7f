# SPDX-License-Identifier: Apache-2.0
"""A TCP socket that listens on a port of the configuration."""

import socket

from quire_spec.errors import ConfigError
from quire_spec.net.addresses import is_ipv6

_BACKLOG = 64


def listen(host: str, port: int, field: str) -> socket.socket:
    """Return a socket that listens on an address. `field` is the name of the port in the configuration.

    Raises:
        ConfigError: the port cannot be used.
    """
    listener = socket.socket(socket.AF_INET6 if is_ipv6(host) else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{field} {port}: cannot listen on {host} ({error.strerror or error}); use another port"
        ) from error
    return listener
