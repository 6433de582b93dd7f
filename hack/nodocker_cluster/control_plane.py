# SPDX-License-Identifier: Apache-2.0
"""A control plane on this machine. It consists of etcd, the API server and, if they are available, the controller
manager and the scheduler.

Certificates, kubeconfigs, data and logs are in one folder. Pods also need a node (node.py).
"""

import json
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nodocker_cluster import processes
from nodocker_cluster.binaries import ClusterError, KubeBinaries
from nodocker_cluster.kubeconfig import ClusterAccess
from nodocker_cluster.network import NETWORK, format_for_url
from nodocker_cluster.pki import CertificateAuthority
from nodocker_cluster.ports import free_ports

NODE_NAME = "quire-node"
START_TIMEOUT_S = 60.0
AUDIT_LOG = "audit.log"
"""The API server logs the requests of service accounts to this file, one JSON object per line."""
_STOP_ORDER = ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd")
_FEATURE_GATES = "--feature-gates=HPAScaleToZero=true"
"""On by default from Kubernetes 1.37."""
_API_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")


class StartError(ClusterError):
    """A program of the cluster did not start; the message contains the end of its log."""


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """A running control plane."""

    folder: Path
    programs: KubeBinaries
    address: str
    """Address of this machine. Pods reach the API server at this address."""
    access: ClusterAccess
    """The administrator's access."""

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.folder / "admin.kubeconfig"

    def stop(self) -> None:
        """Stop the programs of the control plane. Its data and logs remain in the folder."""
        stop(self.folder)


def stop(folder: Path) -> None:
    """Stop the control plane in `folder`, even if another process started it."""
    for name in _STOP_ORDER:
        processes.stop(folder, name)


def start(folder: Path, programs: KubeBinaries, address: str = "127.0.0.1", dies_with_us: bool = False) -> ControlPlane:
    """Start a control plane on free ports and wait until it is ready. On an idle machine, this takes 4 s.

    Raises:
        StartError: a program ended or did not answer in time.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    _write_certificates(folder / "pki", address)
    api, client, peer, controllers, scheduler = free_ports(5)
    plane = ControlPlane(folder, programs, address, _write_kubeconfigs(folder, api, address))
    starter = _Starter(folder, programs, dies_with_us)
    try:
        starter.start("etcd", *_etcd_flags(folder, client, peer))
        starter.wait_ready("etcd", lambda: _is_healthy(f"http://127.0.0.1:{client}/health"))
        starter.start("kube-apiserver", *_api_server_flags(folder, api, f"http://127.0.0.1:{client}", address))
        starter.wait_ready(
            "kube-apiserver", lambda: _is_healthy(f"{plane.access.server}/readyz", plane.access.ssl_context())
        )
        if programs.has("kube-controller-manager", "kube-scheduler"):
            starter.start("kube-controller-manager", *_controller_manager_flags(folder, controllers))
            starter.start("kube-scheduler", *_client_flags(folder, "scheduler", scheduler))
    except BaseException:
        plane.stop()
        raise
    return plane


class _Starter:
    """Starts programs one after the other. If a program does not become ready, the error contains the end of its
    log."""

    def __init__(self, folder: Path, programs: KubeBinaries, dies_with_us: bool) -> None:
        self.folder, self.programs, self.dies_with_us = folder, programs, dies_with_us
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *flags: str) -> None:
        argv = [self.programs.path(name), *flags]
        self.started[name] = processes.start(self.folder, name, argv, die_with_parent=self.dies_with_us)

    def wait_ready(self, name: str, is_ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_ready():
            ended = self.started[name].poll()
            if ended is not None or time.monotonic() > deadline:
                reason = f"ended with {ended}" if ended is not None else f"did not answer in {START_TIMEOUT_S:.0f} s"
                raise StartError(f"{name} {reason}:\n{processes.tail(self.folder, name)}")
            time.sleep(0.05)


def _write_certificates(folder: Path, address: str) -> None:
    if (folder / "ca.crt").exists():
        return
    authority = CertificateAuthority(folder)
    hosts = [*_API_NAMES, *sorted({"127.0.0.1", NETWORK.api_service, address})]
    authority.issue("apiserver", "kube-apiserver", hosts=hosts)
    authority.issue("admin", "admin", "system:masters")
    authority.issue("controllers", "system:kube-controller-manager")
    authority.issue("scheduler", "system:kube-scheduler")
    authority.issue("proxy", "system:kube-proxy")
    authority.issue("kubelet", f"system:node:{NODE_NAME}", "system:nodes", [NODE_NAME, NETWORK.node])
    authority.issue("apiserver-kubelet", "apiserver-kubelet", "system:masters")
    authority.issue("front-proxy", "front-proxy")
    authority.write_service_account_key()


def _write_kubeconfigs(folder: Path, port: int, address: str) -> ClusterAccess:
    """Write a kubeconfig for each client; return the administrator's access."""
    pki = folder / "pki"
    ca = (pki / "ca.crt").read_text()
    accesses = {}
    loopback = "127.0.0.1"
    for name, host in (
        ("controllers", loopback),
        ("scheduler", loopback),
        ("admin", loopback),
        ("kubelet", address),
        ("proxy", address),
    ):
        certificate, key = (pki / f"{name}.crt").read_text(), (pki / f"{name}.key").read_text()
        accesses[name] = ClusterAccess(f"https://{format_for_url(host)}:{port}", ca, certificate, key)
        accesses[name].write(folder / f"{name}.kubeconfig")
    return accesses["admin"]


def _etcd_flags(folder: Path, client: int, peer: int) -> list[str]:
    client_url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    return [
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={client_url}",
        f"--advertise-client-urls={client_url}",
        f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
        f"--initial-cluster=default={peer_url}",
        "--unsafe-no-fsync",  # The data is only for tests, and waiting for the disk takes most of the time of a write.
    ]


def _api_server_flags(folder: Path, port: int, etcd: str, address: str) -> list[str]:
    pki = folder / "pki"
    return [
        f"--etcd-servers={etcd}",
        f"--bind-address={'127.0.0.1' if address == '127.0.0.1' else NETWORK.any_address}",
        # The API server does not accept a loopback address for the Service `kubernetes`. Without a node, no program
        # uses this address.
        f"--advertise-address={'192.0.2.1' if address == '127.0.0.1' else address}",
        f"--secure-port={port}",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--service-cluster-ip-range={NETWORK.services}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-signing-key-file={pki}/sa.key",
        f"--service-account-key-file={pki}/sa.key",
        f"--kubelet-client-certificate={pki}/apiserver-kubelet.crt",
        f"--kubelet-client-key={pki}/apiserver-kubelet.key",
        "--kubelet-preferred-address-types=InternalIP",
        f"--requestheader-client-ca-file={pki}/ca.crt",
        "--requestheader-allowed-names=front-proxy",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={pki}/front-proxy.crt",
        f"--proxy-client-key-file={pki}/front-proxy.key",
        "--allow-privileged=true",
        _FEATURE_GATES,
        f"--audit-policy-file={_write_audit_policy(folder)}",
        f"--audit-log-path={folder / AUDIT_LOG}",
    ]


def _write_audit_policy(folder: Path) -> Path:
    """Write an audit policy that logs the requests of service accounts, without their bodies. Tests use the log to
    compare the permissions that were granted with those that were used."""
    logged = {"level": "Metadata", "userGroups": ["system:serviceaccounts"], "omitStages": ["RequestReceived"]}
    # Kubernetes' own controllers also use service accounts, and they send many requests.
    ignored = {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]}
    policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": [ignored, logged, {"level": "None"}]}
    path = folder / "audit-policy.json"
    path.write_text(json.dumps(policy))
    return path


def _controller_manager_flags(folder: Path, port: int) -> list[str]:
    pki = folder / "pki"
    return [
        *_client_flags(folder, "controllers", port),
        f"--service-account-private-key-file={pki}/sa.key",
        f"--root-ca-file={pki}/ca.crt",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        "--use-service-account-credentials=true",
        "--allocate-node-cidrs=false",
        f"--service-cluster-ip-range={NETWORK.services}",
        # Many tests share this program. The default limit of 20 requests per second would slow them down.
        "--kube-api-qps=200",
        "--kube-api-burst=400",
        # Tests wait for this interval, whose default is 15 s.
        "--horizontal-pod-autoscaler-sync-period=2s",
        _FEATURE_GATES,
    ]


def _client_flags(folder: Path, name: str, port: int) -> list[str]:
    kubeconfig = folder / f"{name}.kubeconfig"
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        "--leader-elect=false",
    ]


def _is_healthy(url: str, context: ssl.SSLContext | None = None) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:  # URLError and HTTPError are
        return False
