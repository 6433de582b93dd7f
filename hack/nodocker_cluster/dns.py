# SPDX-License-Identifier: Apache-2.0
"""CoreDNS for a cluster with a node. It runs on this machine, at the address where pods reach this machine, and answers
for the names of Services and pods. It forwards other names to the servers of this machine's /etc/resolv.conf.
"""

import re
import socket
import time
from pathlib import Path

from nodocker_cluster import controllers, processes
from nodocker_cluster.binaries import ProgressCallback
from nodocker_cluster.control_plane import ControlPlane, StartError
from nodocker_cluster.network import DNS_DOMAIN, NETWORK

PORT = 53
_NAME = "coredns"
_START_TIMEOUT_S = 60.0
_RESOLV_CONF = Path("/etc/resolv.conf")


def start(plane: ControlPlane, report_progress: ProgressCallback, dies_with_us: bool = False) -> None:
    """Start CoreDNS for the control plane, after the node's network exists. The first call builds CoreDNS.

    Raises:
        StartError: CoreDNS ended or did not answer in time.
        Unavailable: CoreDNS cannot be built; the message contains the reason.
    """
    program = controllers.DNS.find_or_build(report_progress) / _NAME
    config = plane.folder / "Corefile"
    config.write_text(_corefile(plane.kubeconfig))
    process = processes.start(plane.folder, _NAME, [str(program), f"-conf={config}"], None, dies_with_us)
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not _is_listening():
        if process.poll() is not None or time.monotonic() > deadline:
            raise StartError(f"CoreDNS did not start:\n{processes.tail(plane.folder, _NAME)}")
        time.sleep(0.05)


def stop(folder: Path) -> None:
    """Stop CoreDNS of the cluster in `folder`, even if another process started it."""
    processes.stop(folder, _NAME)


def _corefile(kubeconfig: Path) -> str:
    has_servers = _RESOLV_CONF.exists() and re.search(r"^\s*nameserver\s", _RESOLV_CONF.read_text(), re.MULTILINE)
    return f"""\
.:{PORT} {{
  bind {NETWORK.host}
  errors
  kubernetes {DNS_DOMAIN} in-addr.arpa ip6.arpa {{
    kubeconfig {kubeconfig}
  }}
  {f"forward . {_RESOLV_CONF}" if has_servers else ""}
}}
"""


def _is_listening() -> bool:
    try:
        with socket.create_connection((NETWORK.host, PORT), timeout=1.0):
            return True
    except OSError:
        return False
