# SPDX-License-Identifier: Apache-2.0
"""Real controllers of other projects as processes beside a real API server: KEDA, Prometheus, Kueue and
LeaderWorkerSet."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from nodocker_cluster import prometheus
from nodocker_cluster.controllers import KEDA, KUEUE, LWS, Controller
from nodocker_cluster.pki import CertificateAuthority
from nodocker_cluster.ports import free_ports
from support.cluster import Cluster
from support.engine_processes import wait_for
from support.pod_cluster import is_open

Manifest = dict[str, Any]
_API_SERVICE = ("apiregistration.k8s.io/v1", "APIService")
_EXTERNAL_METRICS = "v1beta1.external.metrics.k8s.io"
_STOP_S = 20


@contextlib.contextmanager
def running_prometheus(cluster: Cluster, namespace: str, targets: list[str], folder: Path) -> Iterator[str]:
    """Start Prometheus, which reads the health ports of a namespace's pods, as with the operator's PodMonitor, and the
    addresses `targets`; yield its URL."""
    program = prometheus.find()
    if program is None:
        pytest.skip("no Prometheus on this machine: run make test-controllers")
    pods = folder / "pods.json"
    jobs = [
        {"job_name": "pods", "file_sd_configs": [{"files": [str(pods)], "refresh_interval": "1s"}]},
        {"job_name": "picker", "static_configs": [{"targets": targets}]},
    ]
    config = folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
    (port,) = free_ports(1)
    flags = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'prometheus'}"]
    flags += [f"--web.listen-address=127.0.0.1:{port}"]
    stop = threading.Event()

    def discover() -> None:
        """Write the health ports of the pods, since Debian's Prometheus cannot ask the API server for them."""
        while not stop.wait(0.5):
            found = [pod for pod in cluster.items("v1", "Pod", namespace) if pod["status"].get("podIP")]
            entries = [
                {
                    "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
                    "labels": {"namespace": namespace, "pod": pod["metadata"]["name"]},
                }
                for pod in found
                for port in pod["spec"]["containers"][0].get("ports", ())
                if port["name"] == "health"
            ]
            new = pods.with_suffix(".new")
            new.write_text(json.dumps(entries))
            new.rename(pods)

    thread = threading.Thread(target=discover)
    thread.start()
    try:
        with _running(folder / "prometheus.log", [program, *flags], port):
            yield f"http://127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def running_keda(cluster: Cluster, namespace: str, folder: Path) -> Iterator[None]:
    """Start KEDA's operator and its external metrics API, with KEDA's own CRDs."""
    programs = _programs(KEDA)
    for file in sorted((KEDA.source() / "config/crd/bases").glob("*.yaml")):
        cluster.apply_crd(yaml.safe_load(file.read_text()))
    service = "keda-metrics"
    certificates = _certificates(folder / "keda", f"{service}.{namespace}.svc")
    grpc, health, api, metrics = free_ports(4)
    environment = {"KUBECONFIG": str(cluster.kubeconfig), "WATCH_NAMESPACE": namespace}
    environment |= {"POD_NAMESPACE": namespace, "KEDA_CLUSTER_OBJECT_NAMESPACE": namespace}
    operator = [programs / "operator", f"--cert-dir={certificates}", f"--metrics-service-bind-address=127.0.0.1:{grpc}"]
    operator += [f"--health-probe-bind-address=127.0.0.1:{health}", "--metrics-bind-address=0"]
    adapter = [programs / "adapter", f"--secure-port={api}", f"--port={metrics}", f"--cert-dir={certificates}"]
    adapter += [f"--tls-cert-file={certificates}/tls.crt", f"--tls-private-key-file={certificates}/tls.key"]
    adapter += [f"--metrics-service-address=localhost:{grpc}"]
    adapter += [f"--{name}kubeconfig={cluster.kubeconfig}" for name in ("lister-", "authentication-", "authorization-")]
    with (
        _running(folder / "keda.log", operator, health, environment),
        _running(folder / "keda-adapter.log", adapter, api, environment),
    ):
        spec: Manifest = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": api}]}
        cluster.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": service}, "spec": spec}, namespace)
        manifest = yaml.safe_load((KEDA.source() / "config/metrics-server/api_service.yaml").read_text())
        manifest["spec"]["service"] = {"name": service, "namespace": namespace, "port": api}
        manifest["spec"]["caBundle"] = _ca_bundle(certificates)
        cluster.apply(manifest)
        try:
            wait_for(lambda: _is_available(cluster, _EXTERNAL_METRICS), 60, "the external metrics API")
            yield
        finally:
            cluster.delete(*_API_SERVICE, _EXTERNAL_METRICS)


@contextlib.contextmanager
def running_kueue(cluster: Cluster, folder: Path, *frameworks: str) -> Iterator[None]:
    """Start Kueue for pods, Deployments, Jobs and `frameworks`, with its own CRDs and webhooks."""
    programs, source = _programs(KUEUE), KUEUE.source() / "config/components"
    for file in sorted((source / "crd/bases").glob("*.yaml")):
        cluster.apply_crd(yaml.safe_load(file.read_text()))
    certificates = _certificates(folder / "kueue", "127.0.0.1")
    webhook, health, visibility = free_ports(3)
    config = yaml.safe_load((source / "manager/controller_manager_config.yaml").read_text())
    config |= {
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": webhook, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "integrations": {"frameworks": ["batch/job", "pod", "deployment", *frameworks]},
    }
    file = folder / "kueue.yaml"
    file.write_text(yaml.safe_dump(config))
    flags = [f"--config={file}", "--feature-gates=VisibilityOnDemand=false", f"--visibility-server-port={visibility}"]
    environment = {"KUBECONFIG": str(cluster.kubeconfig)}
    # Kueue also reads a certificate in /etc/kueue.
    etc = folder / "etc"
    shutil.copytree(certificates, etc / "kueue/metrics/certs")
    shutil.copy("/etc/hosts", etc)
    command = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc && exec "$@"', etc, programs / "kueue", *flags]
    with _running(folder / "kueue.log", command, webhook, environment):
        hooks = [*yaml.safe_load_all((source / "webhook/manifests.yaml").read_text())]
        kinds = [(hook["apiVersion"], hook["kind"], f"kueue-{hook['kind'].lower()}") for hook in hooks]
        for hook, (_, _, name) in zip(hooks, kinds, strict=True):
            hook["metadata"]["name"] = name
            for entry in hook["webhooks"]:
                path = entry["clientConfig"]["service"]["path"]
                entry["clientConfig"] = {
                    "url": f"https://127.0.0.1:{webhook}{path}",
                    "caBundle": _ca_bundle(certificates),
                }
                # Only what the test starts, not the control plane's own objects.
                entry["namespaceSelector"] = {"matchLabels": {"kueue": "true"}}
            cluster.apply(hook)
        try:
            yield
        finally:
            for kind in kinds:
                cluster.delete(*kind)


@contextlib.contextmanager
def running_lws(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Start LeaderWorkerSet's controller with its own CRD and webhooks; delete them at the end."""
    program, source = _programs(LWS) / "cmd", LWS.source() / "config"
    certificates = _certificates(folder / "lws", "127.0.0.1")
    webhook, health = free_ports(2)
    config = yaml.safe_load((source / "manager/controller_manager_config.yaml").read_text())
    config |= {
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": webhook, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
    }
    file = folder / "lws.yaml"
    file.write_text(yaml.safe_dump(config))
    environment = {"KUBECONFIG": str(cluster.kubeconfig)}
    with (
        cluster.optional_kind("LeaderWorkerSet"),
        _running(folder / "lws.log", [program, f"--config={file}"], webhook, environment),
    ):
        kinds = []
        for hook in yaml.safe_load_all((source / "webhook/manifests.yaml").read_text()):
            hook["metadata"]["name"] = f"lws-{hook['kind'].lower()}"
            for entry in hook["webhooks"]:
                url = f"https://127.0.0.1:{webhook}{entry['clientConfig']['service']['path']}"
                entry["clientConfig"] = {"url": url, "caBundle": _ca_bundle(certificates)}
                if entry["name"].endswith("pod.kb.io"):
                    # As in LeaderWorkerSet's own patches of this file.
                    key = "leaderworkerset.sigs.k8s.io/name"
                    entry["objectSelector"] = {"matchExpressions": [{"key": key, "operator": "Exists"}]}
            kinds.append((hook["apiVersion"], hook["kind"], hook["metadata"]["name"]))
            cluster.apply(hook)
        try:
            yield
        finally:
            for kind in kinds:
                cluster.delete(*kind)


def _programs(controller: Controller) -> Path:
    if not controller.folder.exists():
        target = "cluster-tools" if controller is LWS else "test-controllers"
        pytest.skip(f"{controller.name} is not built on this machine: run make {target}")
    return controller.folder


def _certificates(folder: Path, host: str) -> Path:
    """Write ca.crt, tls.crt and tls.key, and return their folder."""
    CertificateAuthority(folder).issue("tls", "tls", hosts=["localhost", host])
    return folder


def _ca_bundle(folder: Path) -> str:
    return base64.b64encode((folder / "ca.crt").read_bytes()).decode()


def _is_available(cluster: Cluster, name: str) -> bool:
    conditions = (cluster.get(*_API_SERVICE, name) or {}).get("status", {}).get("conditions", [])
    return any(c["type"] == "Available" and c["status"] == "True" for c in conditions)


@contextlib.contextmanager
def _running(log: Path, command: list[Any], port: int, environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Run a program, and wait until it listens on a port of this machine."""
    env = {**os.environ, **(environment or {})}
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file, env=env) as process:

        def listens() -> bool:
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            return is_open(port)

        try:
            wait_for(listens, 60, f"{log.stem} listens")
            yield
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
