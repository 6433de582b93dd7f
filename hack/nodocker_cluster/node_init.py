# SPDX-License-Identifier: Apache-2.0
"""The init process of a node.

It creates the mounts and the network of the node, starts its programs, and reaps orphans. When a program ends, the init
process ends the node. node.py starts the init process in new namespaces for mounts, network and processes.

    python -m nodocker_cluster.node_init FOLDER TOOLS PAUSE
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from nodocker_cluster import cgroups, network
from nodocker_cluster.control_plane import NODE_NAME
from nodocker_cluster.network import NETWORK

SOCKET = "/run/containerd/containerd.sock"
_START_TIMEOUT_S = 30.0
_PRIVATE_FOLDERS = ("/run", "/var/lib", "/var/log")
"""Folders that only the node can see. They disappear when the node ends."""


def main() -> NoReturn:
    """Start the node and run until it ends."""
    folder, programs, pause = map(Path, sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _make_mounts(folder)
    _configure_network()
    node = _NodePrograms(folder, programs)
    node.start_containerd(pause)
    node.start_kubelet()
    node.start_kube_proxy()
    node.reap_until_failure()


class _NodePrograms:
    """The node's programs."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self.programs = folder, programs
        self.names: dict[int, str] = {}

    def start_containerd(self, pause: Path) -> None:
        config = self.folder / "containerd.toml"
        config.write_text(_containerd_config(self.folder))
        (self.folder / "cni").mkdir(exist_ok=True)
        (self.folder / "cni/10-bridge.conflist").write_text(json.dumps(_CNI))
        self._start("containerd", "containerd", f"--config={config}")
        ctr = ["ctr", f"--address={SOCKET}", "--namespace=k8s.io"]
        _wait_until(lambda: subprocess.run([*ctr, "version"], capture_output=True).returncode == 0, "containerd")
        subprocess.run([*ctr, "images", "import", str(pause)], check=True)

    def start_kubelet(self) -> None:
        config = self.folder / "kubelet.json"
        config.write_text(json.dumps(_kubelet_config(self.folder)))
        self._start(
            "kubelet",
            str(self.programs / "kubelet"),
            f"--config={config}",
            f"--kubeconfig={self.folder}/kubelet.kubeconfig",
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={NETWORK.node}",
            f"--root-dir={self.folder}/kubelet",
        )

    def start_kube_proxy(self) -> None:
        config = self.folder / "kube-proxy.json"
        config.write_text(json.dumps(_kube_proxy_config(self.folder)))
        self._start("kube-proxy", str(self.programs / "kube-proxy"), f"--config={config}")

    def reap_until_failure(self) -> NoReturn:
        """Reap ended processes. When a process of the node ends, its children become children of the init process."""
        while True:
            pid, status = os.wait()
            if name := self.names.get(pid):
                sys.exit(f"{name} ended with {os.waitstatus_to_exitcode(status)}")

    def _start(self, name: str, *argv: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.names[subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL).pid] = name


def _make_mounts(folder: Path) -> None:
    # unshare made every mount private. Containers must see the mounts of the kubelet, so mounts are shared again, but
    # only within this namespace.
    for path in _PRIVATE_FOLDERS:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "node", path], check=True)
    subprocess.run(["mount", "--make-rshared", "/"], check=True)
    (folder / "kubelet").mkdir(exist_ok=True)


def _configure_network() -> None:
    _wait_until(lambda: subprocess.run(["ip", "link", "show", "eth0"], capture_output=True).returncode == 0, "the link")
    network.add_address(f"{NETWORK.node}/{NETWORK.link_bits}", "eth0")
    for arguments in ("link set lo up", "link set eth0 up", f"route add default via {NETWORK.host} dev eth0"):
        subprocess.run(["ip", *arguments.split()], check=True)
    for setting in NETWORK.sysctls:
        file = Path("/proc/sys", setting)
        if file.exists():  # The settings of the bridge exist only if a kernel module is loaded.
            file.write_text("1")


def _wait_until(is_ready: Callable[[], bool], description: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not is_ready():
        if time.monotonic() > deadline:
            sys.exit(f"{description} did not come up in {_START_TIMEOUT_S:.0f} s")
        time.sleep(0.05)


_CNI = {
    "cniVersion": "0.4.0",
    "name": "quire",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": NETWORK.pods}]],
                "routes": [{"dst": NETWORK.any_cidr}],
            },
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}


def _containerd_config(folder: Path) -> str:
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""\
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
[grpc]
  address = "{SOCKET}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
[{cri}]
  sandbox_image = "localhost/pause:1"
  # Containers and sandboxes lack CAP_SYS_RESOURCE; without this, setting the OOM score of every pod would fail.
  restrict_oom_score_adj = true
  [{cri}.containerd]
    default_runtime_name = "runc"
    [{cri}.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [{cri}.containerd.runtimes.runc.options]
        SystemdCgroup = false
  [{cri}.cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
"""


def _kubelet_config(folder: Path) -> dict[str, object]:
    pki = folder / "pki"
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{pki}/kubelet.crt",
        "tlsPrivateKeyFile": f"{pki}/kubelet.key",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroups.tree_name(folder)}",
        "failSwapOn": False,
        "clusterDNS": [NETWORK.host],
        "clusterDomain": network.DNS_DOMAIN,
        "makeIPTablesUtilChains": False,
        "volumePluginDir": f"{folder}/plugins",
        # A test machine's disk may be nearly full for other reasons.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "nodeStatusUpdateFrequency": "1s",
        # Pods see a changed Secret after this time. The default is a minute, for which a test would wait.
        "syncFrequency": "10s",
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "failCgroupV1": False,
    }


def _kube_proxy_config(folder: Path) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clusterCIDR": NETWORK.pods,
        "bindAddress": NETWORK.node,  # kube-proxy handles Services that have the same address family as this address.
        "hostnameOverride": NODE_NAME,
        "clientConnection": {"kubeconfig": f"{folder}/proxy.kubeconfig"},
        # These limits apply to the whole machine, so the values 0 prevent kube-proxy from changing them.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


if __name__ == "__main__":
    main()
