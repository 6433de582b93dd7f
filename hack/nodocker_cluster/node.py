# SPDX-License-Identifier: Apache-2.0
"""One node for a control plane on this machine. containerd, kubelet and kube-proxy run in namespaces of the node.

The node has private namespaces for its mounts, its network and its processes. The first process in these namespaces is
node_init.py. When it ends for any reason, the kernel kills the other processes and removes the mounts and the network.
Only empty control groups remain, and `stop` removes them. A node can be started only by root. It needs Debian packages,
which `install_packages` installs.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from nodocker_cluster import cgroups, debian, network, processes
from nodocker_cluster.binaries import NODE_PROGRAMS, ProgressCallback, Unavailable
from nodocker_cluster.control_plane import NODE_NAME, ControlPlane, StartError

PROCESS_NAME = "node"
READY_TIMEOUT_S = 90.0
PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ip": "iproute2",
    "conntrack": "conntrack",
    "mount": "mount",
    "unshare": "util-linux",
    "busybox": "busybox-static",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
}
"""Debian package by program."""


@dataclass(frozen=True, slots=True)
class Node:
    """A running node."""

    plane: ControlPlane
    pid: int
    """Id of the node's first process. This process is in the namespaces of the node."""

    def run(self, *argv: str, timeout_s: float = 300) -> str:
        """Run a program such as ctr on the node, and return its output.

        Raises:
            subprocess.CalledProcessError: the program failed; the error contains its standard error.
        """
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--pid", "--"]
        done = subprocess.run([*enter, *argv], capture_output=True, text=True, timeout=timeout_s, check=True)
        return done.stdout

    def load(self, archive: Path) -> None:
        """Load the images of a Docker or OCI archive onto the node."""
        self.run("ctr", "--namespace=k8s.io", "images", "import", str(archive))


def install_packages(report_progress: ProgressCallback) -> None:
    """Install the Debian packages that a node needs.

    Raises:
        Unavailable: not root, or packages are missing and cannot be installed.
    """
    if os.geteuid() != 0:
        raise Unavailable("only root can start a node, because it needs mounts, a network and control groups")
    debian.install_packages(PACKAGES, report_progress)


def start(plane: ControlPlane, pause: Path, dies_with_us: bool = False) -> Node:
    """Start a node and wait until it has the condition Ready. `pause` is the archive with the pause image.

    Raises:
        StartError: a program of the node ended; the message contains the end of its log.
        Unavailable: the control plane's tools have no kubelet, or another cluster has a node.
    """
    for name in NODE_PROGRAMS:
        plane.programs.path(name)
    if network.is_connected():
        raise Unavailable("another cluster has a node on this machine; stop it first (make cluster-down)")
    cgroups.remove_stale()
    cgroups.create(plane.folder)
    unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
    init = [sys.executable, "-m", "nodocker_cluster.node_init"]
    init += map(str, (plane.folder, plane.programs.folder, pause))
    environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    process = processes.start(plane.folder, PROCESS_NAME, [*unshare, *init], environment, dies_with_us)
    try:
        node = Node(plane, _first_process(process))
        network.connect(node.pid)
        _wait_ready(plane, process)
    except BaseException:
        stop(plane.folder)
        raise
    return node


def stop(folder: Path) -> None:
    """Stop the node of the cluster in `folder`, together with its pods. The node can have been started by another
    process."""
    for process in processes.running_processes(folder):
        if process.name == PROCESS_NAME:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    processes.stop(folder, PROCESS_NAME)
    cgroups.remove(folder)
    deadline = time.monotonic() + processes.STOP_TIMEOUT_S
    while network.is_connected() and time.monotonic() < deadline:
        time.sleep(0.02)  # The kernel removes a network namespace only some time after its last process has ended.


def first_process(folder: Path) -> int | None:
    """Return the id of the first process of the node in `folder`; None if there is no node."""
    for process in processes.running_processes(folder):
        if process.name == PROCESS_NAME and os.readlink(f"/proc/{process.pid}/ns/net") != os.readlink(
            "/proc/self/ns/net"
        ):
            return process.pid
    return None


def _first_process(unshare: subprocess.Popen[bytes]) -> int:
    """Wait until the namespaces exist. Return the id of the process that `unshare` started in them."""
    deadline = time.monotonic() + 10
    while unshare.poll() is None and time.monotonic() < deadline:
        children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split()
        if children and os.readlink(f"/proc/{children[0]}/ns/net") != os.readlink("/proc/self/ns/net"):
            return int(children[0])
        time.sleep(0.01)
    raise StartError("unshare did not create namespaces; run this as root, on a kernel that allows namespaces")


def _wait_ready(plane: ControlPlane, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    kubectl = [plane.programs.path("kubectl"), f"--kubeconfig={plane.kubeconfig}", "get", "node", NODE_NAME, "--output"]
    kubectl.append('jsonpath={.status.conditions[?(@.type=="Ready")].status}')
    while subprocess.run(kubectl, capture_output=True, text=True, check=False).stdout != "True":
        if process.poll() is not None or time.monotonic() > deadline:
            logs = "\n".join(processes.tail(plane.folder, n) for n in (PROCESS_NAME, "containerd", "kubelet"))
            raise StartError(f"the node did not become ready:\n{logs}")
        time.sleep(0.1)
