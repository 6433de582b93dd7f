# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker of the Gateway API's inference extension as a process, with the rights that the docs give it."""

import contextlib
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from nodocker_cluster.controllers import PICKER
from nodocker_cluster.ports import free_ports
from support.cluster import ROOT, Cluster
from support.engine_processes import wait_for

ROUTERS = ROOT / "examples/routers"
_ROLE = ROUTERS / "endpoint-picker-role.yaml"
CRDS = ("InferencePool", "InferenceObjective", "InferenceModelRewrite")


@dataclass(frozen=True)
class Picker:
    """A running picker."""

    port: int
    """Port of its gRPC service for Envoy."""
    metrics_port: int
    process: subprocess.Popen[bytes]

    def value(self, metric: str) -> float | None:
        """Return the value of the first series of a metric; None if there is none."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as response:
            page = response.read().decode()
        found = re.search(rf"^{metric}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
        return float(found[1]) if found else None


@contextlib.contextmanager
def running_picker(cluster: Cluster, namespace: str, pool: str, config: Path, folder: Path) -> Iterator[Picker]:
    """Start the picker for an InferencePool; skip the test if it was not built."""
    if not PICKER.folder.exists():
        pytest.skip("no endpoint picker on this machine: run make cluster-tools (needs Go)")
    kubeconfig = _kubeconfig(cluster, namespace)
    port, health_port, metrics_port = free_ports(3)
    command = [PICKER.folder / "epp", f"--pool-namespace={namespace}", f"--pool-name={pool}", f"--config-file={config}"]
    command += [f"--grpc-port={port}", f"--grpc-health-port={health_port}", f"--metrics-port={metrics_port}"]
    command += ["--secure-serving=false", "--metrics-endpoint-auth=false", "--tracing=false", "--enable-pprof=false"]
    # The test compares its gauges with those of the pods.
    command += ["--refresh-prometheus-metrics-interval=100ms"]
    log_file = folder / "picker.log"

    def is_running() -> bool:
        assert process.poll() is None, log_file.read_text()[-3000:]
        with contextlib.suppress(OSError):
            return picker.value("inference_pool_ready_pods") is not None
        return False

    environment = {"KUBECONFIG": str(kubeconfig), "POD_NAME": "picker-0", "NAMESPACE": namespace}
    with log_file.open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process:
        picker = Picker(port, metrics_port, process)
        try:
            wait_for(is_running, 30, "the picker knows its pool")
            yield picker
        finally:
            process.terminate()


def _kubeconfig(cluster: Cluster, namespace: str) -> Path:
    """Return the kubeconfig of a ServiceAccount that has the Role of the examples."""
    role = yaml.safe_load(_ROLE.read_text())
    name = role["metadata"]["name"]
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    for manifest in (
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}},
        role,
        {
            "apiVersion": role["apiVersion"],
            "kind": "RoleBinding",
            "metadata": {"name": name},
            "roleRef": reference,
            "subjects": [subject],
        },
    ):
        cluster.apply(manifest, namespace)
    return cluster.token_kubeconfig(namespace, name)
