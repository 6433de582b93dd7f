# SPDX-License-Identifier: Apache-2.0
"""Ports for programs that are told where to listen, and listen some seconds later.

One that the kernel picks may be an outgoing connection's by then: it gives those the same ones. So these are from below
its range, and none is given again, to whatever process of this user, before all others had their turn.
"""

import fcntl
import os
import socket
import tempfile
from pathlib import Path

PORTS = range(10_000, 30_000)
"""Above the usual ones of programs, below Kubernetes' NodePorts and the kernel's own choice."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, on any address of IPv4.

    Raises:
        OSError: there are not as many.
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
    """Whether somebody could listen there, on all addresses of IPv4."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
