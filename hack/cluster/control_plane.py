# SPDX-License-Identifier: Apache-2.0
"""A control plane on this machine: etcd, API server and, where they are there, controller-manager and scheduler.

Certificates, kubeconfigs, data and logs are in one folder. Pods need a node beside it (node.py).
"""

import json
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster import definitions, processes
from cluster.kubeconfig import Access
from cluster.network import HERE, in_url
from cluster.pki import Authority
from cluster.ports import free_ports
from cluster.tools import Tools

NODE_NAME = "quire-node"
START_S = 60.0
AUDIT_LOG = "audit.log"
"""One JSON object a line: what service accounts asked the API server for."""
_STOPPED_IN_ORDER = ("kube-scheduler", "kube-controller-manager", "kube-apiserver", definitions.PROGRAM, "etcd")
_API_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")


class StartError(Exception):
    """A program of the cluster did not start; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """A running control plane."""

    folder: Path
    tools: Tools
    address: str
    """Of this machine; pods reach the API server there."""
    access: Access
    """Everything is allowed."""

    @property
    def kubeconfig(self) -> Path:
        """Of the administrator."""
        return self.folder / "admin.kubeconfig"

    def stop(self) -> None:
        """End its programs; data and logs stay."""
        stop(self.folder)


def stop(folder: Path) -> None:
    """End the control plane in `folder`, whoever started it."""
    for name in _STOPPED_IN_ORDER:
        processes.stop(folder, name)


def start(folder: Path, tools: Tools, address: str = "127.0.0.1", dies_with_us: bool = False) -> ControlPlane:
    """Start it on free ports and wait until it answers: 4 s on an idle machine.

    Raises:
        StartError: a program ended or did not answer in time.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    _certificates(folder / "pki", address)
    api, client, peer, controllers, scheduler = free_ports(5)
    plane = ControlPlane(folder, tools, address, _kubeconfigs(folder, api, address))
    starter = _Starter(folder, tools, dies_with_us)
    try:
        starter.start("etcd", *_etcd(folder, client, peer))
        starter.wait("etcd", lambda: _answers(f"http://127.0.0.1:{client}/health"))
        starter.start("kube-apiserver", *_api_server(folder, api, f"http://127.0.0.1:{client}", address))
        starter.wait("kube-apiserver", lambda: _answers(f"{plane.access.server}/readyz", plane.access.ssl_context()))
        if tools.has("kube-controller-manager", "kube-scheduler"):
            starter.start("kube-controller-manager", *_controllers(folder, controllers, tools))
            starter.start("kube-scheduler", *_scheduler(folder, scheduler, tools))
    except BaseException:
        plane.stop()
        raise
    return plane


def start_definitions(folder: Path, tools: Tools, program: Path, cluster: Path) -> ControlPlane:
    """Start the API server of definitions (definitions.py) on an etcd of `tools` and wait until it answers: 2 s.

    It ends with this thread.

    Args:
        folder: of its own.
        tools: they have etcd.
        program: what is to be started.
        cluster: kubeconfig of the cluster that has the namespaces, and all else that it asks for.

    Raises:
        StartError: a program ended or did not answer in time.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    _certificates(folder / "pki", "127.0.0.1")
    api, client, peer = free_ports(3)
    plane = ControlPlane(folder, tools, "127.0.0.1", _kubeconfigs(folder, api, "127.0.0.1"))
    starter = _Starter(folder, tools, dies_with_us=True)
    try:
        starter.start("etcd", *_etcd(folder, client, peer))
        starter.wait("etcd", lambda: _answers(f"http://127.0.0.1:{client}/health"))
        flags = _definitions(folder, api, f"http://127.0.0.1:{client}", cluster)
        starter.start(program.name, *flags, program=str(program))
        starter.wait(program.name, lambda: _answers(f"{plane.access.server}/readyz", plane.access.ssl_context()))
    except BaseException:
        plane.stop()
        raise
    return plane


class _Starter:
    """Starts programs one after another, and fails with the log of the one that does not come up."""

    def __init__(self, folder: Path, tools: Tools, dies_with_us: bool) -> None:
        self.folder, self.tools, self.dies_with_us = folder, tools, dies_with_us
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *flags: str, program: str = "") -> None:
        argv = [program or self.tools.path(name), *flags]
        self.started[name] = processes.start(self.folder, name, argv, dies_with_us=self.dies_with_us)

    def wait(self, name: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not ready():
            ended = self.started[name].poll()
            if ended is not None or time.monotonic() > deadline:
                how = f"ended with {ended}" if ended is not None else f"did not answer in {START_S:.0f} s"
                raise StartError(f"{name} {how}:\n{processes.tail(self.folder, name)}")
            time.sleep(0.05)


def _certificates(folder: Path, address: str) -> None:
    if (folder / "ca.crt").exists():
        return
    authority = Authority(folder)
    hosts = [*_API_NAMES, *sorted({"127.0.0.1", HERE.api_service, address})]
    authority.issue("apiserver", "kube-apiserver", hosts=hosts, client=False)
    authority.issue("admin", "admin", "system:masters")
    authority.issue("controllers", "system:kube-controller-manager")
    authority.issue("scheduler", "system:kube-scheduler")
    authority.issue("proxy", "system:kube-proxy")
    authority.issue("kubelet", f"system:node:{NODE_NAME}", "system:nodes", [NODE_NAME, HERE.node])
    authority.issue("apiserver-kubelet", "apiserver-kubelet", "system:masters")
    authority.issue("front-proxy", "front-proxy")
    authority.service_account_keys()


def _kubeconfigs(folder: Path, port: int, address: str) -> Access:
    """One for each of its clients; the administrator's access."""
    pki = folder / "pki"
    ca = (pki / "ca.crt").read_text()
    found = {}
    here = "127.0.0.1"
    for name, host in (
        ("controllers", here),
        ("scheduler", here),
        ("admin", here),
        ("kubelet", address),
        ("proxy", address),
    ):
        certificate, key = (pki / f"{name}.crt").read_text(), (pki / f"{name}.key").read_text()
        found[name] = Access(f"https://{in_url(host)}:{port}", ca, certificate, key)
        found[name].write(folder / f"{name}.kubeconfig")
    return found["admin"]


def _etcd(folder: Path, client: int, peer: int) -> list[str]:
    here, there = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    return [
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={here}",
        f"--advertise-client-urls={here}",
        f"--listen-peer-urls={there}",
        f"--initial-advertise-peer-urls={there}",
        f"--initial-cluster=default={there}",
        "--unsafe-no-fsync",  # the data is for tests, and a disk that syncs is most of a write's time
    ]


def _api_server(folder: Path, port: int, etcd: str, address: str) -> list[str]:
    pki = folder / "pki"
    return [
        f"--etcd-servers={etcd}",
        f"--bind-address={'127.0.0.1' if address == '127.0.0.1' else HERE.all}",
        # Loopback is refused as the address of the service `kubernetes`. With no node, nobody goes there.
        f"--advertise-address={'192.0.2.1' if address == '127.0.0.1' else address}",
        f"--secure-port={port}",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--service-cluster-ip-range={HERE.services}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-signing-key-file={pki}/sa.key",
        f"--service-account-key-file={pki}/sa.pub",
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
        f"--audit-policy-file={_audit_policy(folder)}",
        f"--audit-log-path={folder / AUDIT_LOG}",
    ]


def _definitions(folder: Path, port: int, etcd: str, kubeconfig: Path) -> list[str]:
    pki = folder / "pki"
    return [
        f"--etcd-servers={etcd}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        # Who the administrator is, the certificate says by this authority; nobody else asks.
        "--authentication-skip-lookup",
        # What an older cluster does not have, it would wait for.
        "--enable-priority-and-fairness=false",
        "--disable-admission-plugins=ValidatingAdmissionPolicy,MutatingAdmissionPolicy",
    ]


def _audit_policy(folder: Path) -> Path:
    """What service accounts ask for, without bodies, so that granted rights can be compared with used ones."""
    asked = {"level": "Metadata", "userGroups": ["system:serviceaccounts"], "omitStages": ["RequestReceived"]}
    # Kubernetes' own controllers are service accounts too, and busy.
    own = {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]}
    policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": [own, asked, {"level": "None"}]}
    path = folder / "audit-policy.json"
    path.write_text(json.dumps(policy))
    return path


def _controllers(folder: Path, port: int, tools: Tools) -> list[str]:
    pki = folder / "pki"
    return [
        *_client_flags(folder, "controllers", port, tools),
        f"--service-account-private-key-file={pki}/sa.key",
        f"--root-ca-file={pki}/ca.crt",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        "--use-service-account-credentials=true",
        "--allocate-node-cidrs=false",
        f"--service-cluster-ip-range={HERE.services}",
        # Many tests share it; what it may send by default, 20 requests a second, would be what they wait for.
        "--kube-api-qps=200",
        "--kube-api-burst=400",
    ]


def _scheduler(folder: Path, port: int, tools: Tools) -> list[str]:
    return _client_flags(folder, "scheduler", port, tools)


def _client_flags(folder: Path, name: str, port: int, tools: Tools) -> list[str]:
    kubeconfig = folder / f"{name}.kubeconfig"
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        "--leader-elect=false",
        *(["--port=0"] if tools.version < (1, 23, 0) else []),  # a second port, without TLS, which later releases lack
    ]


def _answers(url: str, context: ssl.SSLContext | None = None) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:  # URLError and HTTPError are
        return False
