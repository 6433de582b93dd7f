# SPDX-License-Identifier: Apache-2.0
"""Chooses free TCP ports for programs that start to listen on their port only some seconds later.

The kernel uses the ports of its ephemeral range for outgoing connections. Such a port could be taken before the program
listens on it. Therefore, this module chooses ports below that range. It chooses the same port again only after all
other ports have been chosen; for this purpose, the choices of all processes of one user are counted together.
"""

import fcntl
import os
import socket
import tempfile
from pathlib import Path

PORTS = range(10_000, 30_000)
"""Range of ports that are chosen. It is above the ports that programs usually have, and below Kubernetes' NodePorts and
the kernel's ephemeral range."""


def free_ports(count: int) -> list[int]:
    """Return ports on which no program listens at any IPv4 address.

    Raises:
        OSError: fewer ports are free.
    """
    ports: list[int] = []
    with (Path(tempfile.gettempdir()) / f"quire-ports-{os.getuid()}").open("a+") as state_file:
        fcntl.flock(state_file, fcntl.LOCK_EX)
        state_file.seek(0)
        last = int(state_file.read() or PORTS.start - 1)
        for number in range(last + 1, last + 1 + len(PORTS)):
            if len(ports) == count:
                break
            port = PORTS[(number - PORTS.start) % len(PORTS)]
            if is_free(port):
                ports.append(port)
        if len(ports) < count:
            raise OSError(f"{len(ports)} of {count} ports from {PORTS.start} to {PORTS.stop - 1} are free")
        state_file.truncate(0)
        state_file.write(str(ports[-1]))
    return ports


def is_free(port: int) -> bool:
    """Return whether the port can be bound on all IPv4 addresses."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
