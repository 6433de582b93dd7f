# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a core meet to create their process groups: a folder, or the first node's store if there are
several nodes. The first node creates it, and sends it to all ranks as JSON."""

import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

_LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = timedelta(seconds=60)
"""Time limit for the connection to a store. It listens before any rank connects."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where one rank meets the others."""

    folder: str = ""
    """Folder of the rendezvous files, on one machine. The files do not exist yet."""
    store_host: str = ""
    """Address of the store, if there are several nodes."""
    store_port: int = 0
    generation: int = 0
    """Number of the group of nodes. Ranks of different generations never meet, because their keys in the store
    differ."""
    address: str = _LOOPBACK
    """Address at which the other ranks reach this one."""

    def open_store(self, name: str, size: int) -> Any:
        """Return the store by which `size` ranks create the process group `name`."""
        if not self.store_host:
            return dist.FileStore(str(Path(self.folder, name)), size)  # type: ignore[attr-defined]
        store = dist.TCPStore(self.store_host, self.store_port, timeout=_STORE_TIMEOUT)  # type: ignore[attr-defined]
        return dist.PrefixStore(f"generation-{self.generation}/{name}", store)  # type: ignore[attr-defined]


def serve_store(listener: socket.socket) -> Any:
    """Return a store that accepts connections on a listening socket until it is dropped. It takes over the socket.

    It asks for no key. So the network must admit only the nodes of the group, as for gloo and NCCL.
    """
    host, port = listener.getsockname()[:2]
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT, master_listen_fd=listener.detach()
    )
