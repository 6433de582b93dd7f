# SPDX-License-Identifier: Apache-2.0
"""A cluster with real pods, and helpers for services on it: example volumes, answers, containers.

hack/nodocker_cluster starts the node on this machine. Or QUIRE_TEST_KUBECONFIG names an existing cluster with the
images of hack/nodocker_cluster/images.py and with examples/ at /examples on its node; hack/kind.sh creates such a
cluster.
"""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import yaml
from nodocker_cluster import archive, binaries, cgroups, control_plane, dns, images, network, node, processes
from nodocker_cluster.ports import free_ports
from support.cluster import KUBECONFIG_VARIABLE, ROOT, Cluster, running_cluster
from support.quire_serve import grpc_text

from quire_spec.net.addresses import format_for_url

KIND_EXAMPLES = ROOT / "examples/kind"
LLM_SERVICE_KIND = ("quire.dev/v1alpha1", "LLMService")
OPERATOR_NAMESPACE = "quire-system"
"""Namespace of the operator."""
OTHER_SERVER_IMAGE = f"{images.SERVER_IMAGE}-other"
"""Another name of the server's image on the node, for a change of the image."""

_KILL = """
import os, pathlib
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        parent = (process / "stat").read_text().rpartition(") ")[2].split()[1]
        if parent == "1" and b"quire_server" in (process / "cmdline").read_bytes():
            os.kill(int(process.name), 9)
    except (FileNotFoundError, ProcessLookupError):
        pass  # The process has ended.
"""


@contextlib.contextmanager
def cluster_with_node(folder: Path) -> Iterator[Cluster]:
    """Yield the cluster of QUIRE_TEST_KUBECONFIG, or start one with a node and load the images.

    Raises:
        Unavailable: this machine cannot run a node; the message contains the reason.
    """
    if os.environ.get(KUBECONFIG_VARIABLE):
        with running_cluster(folder) as cluster:
            yield cluster
        return
    archives = images.built_archives()
    programs = binaries.find_or_build(print)
    plane = control_plane.start(folder / "control-plane", programs, network.NETWORK.host, dies_with_us=True)
    try:
        running_node = node.start(plane, archive.write_pause_archive(folder / "pause.tar"), dies_with_us=True)
        dns.start(plane, print, dies_with_us=True)
        for file in archives:
            running_node.load(file)
        running_node.run("ctr", "--namespace=k8s.io", "images", "tag", images.SERVER_IMAGE, OTHER_SERVER_IMAGE)
        yield Cluster(plane.kubeconfig, folder, programs)
    finally:
        node.stop(plane.folder)
        dns.stop(plane.folder)
        plane.stop()
    assert_nothing_left(plane.folder)


def assert_nothing_left(folder: Path) -> None:
    """Assert that no process, mount, control group or network of the cluster in `folder` exists."""
    assert [*processes.running_processes(folder)] == []
    assert not cgroups.exists(folder)
    assert not network.is_connected()
    assert str(folder) not in Path("/proc/self/mounts").read_text()


def create_examples_volume(cluster: Cluster, namespace: str) -> None:
    """Create the volume of examples/kind/volume.yaml in this namespace, with the folder's path on the node."""
    volume, claim = yaml.safe_load_all((KIND_EXAMPLES / "volume.yaml").read_text())
    volume["metadata"]["name"] = f"examples-{namespace}"
    volume["spec"]["claimRef"]["namespace"] = namespace
    if cluster.programs:
        volume["spec"]["hostPath"]["path"] = str(ROOT / "examples")
    claim["metadata"]["namespace"] = namespace
    claim["spec"]["volumeName"] = volume["metadata"]["name"]
    cluster.apply(volume)
    cluster.apply(claim)


def example_service(**spec: Any) -> dict[str, Any]:
    """Return examples/kind/tales.yaml with some fields of the spec replaced."""
    document: dict[str, Any] = yaml.safe_load((KIND_EXAMPLES / "tales.yaml").read_text())
    document["spec"].update(spec)
    return document


def get_service(cluster: Cluster, namespace: str, name: str = "tales") -> dict[str, Any]:
    """Return the LLMService."""
    body = cluster.get(*LLM_SERVICE_KIND, name, namespace)
    assert body is not None, f"no LLMService {name}"
    return body


def current_condition(cluster: Cluster, namespace: str, kind: str) -> dict[str, Any]:
    """Return a condition if it was observed for the current generation; otherwise an empty one."""
    body = get_service(cluster, namespace)
    matching = {c["type"]: c for c in body.get("status", {}).get("conditions", [])}.get(kind, {})
    return matching if matching.get("observedGeneration") == body["metadata"]["generation"] else {}


def serving_pods(cluster: Cluster, namespace: str, service: str = "tales") -> list[dict[str, Any]]:
    """Return the server pods that are not being deleted."""
    selector = f"app.kubernetes.io/instance={service},app.kubernetes.io/component=server"
    bodies = cluster.items("v1", "Pod", namespace, labelSelector=selector)
    return [pod for pod in bodies if "deletionTimestamp" not in pod["metadata"]]


def is_ready(pod: dict[str, Any]) -> bool:
    """Return whether the pod's Ready condition is true."""
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


def server_container(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the status of the server container."""
    return next(c for c in pod["status"]["containerStatuses"] if c["name"] == "server")


def kill_supervisor(cluster: Cluster, namespace: str, pod: str) -> None:
    """Kill the supervisor, as the OOM killer does; tini ends too, and the kubelet restarts the container."""
    try:
        cluster.kubectl("exec", pod, "--", "python3", "-c", _KILL, namespace=namespace)
    except AssertionError as ended:
        # If the container ends first, the exec process is killed with it.
        assert "exit code 137" in str(ended)


def diagnostics(cluster: Cluster, namespace: str) -> str:
    """Return container states, recent events and ends of logs, to explain why pods are not ready."""
    lines = []
    for pod in cluster.items("v1", "Pod", namespace):
        states = [{c["name"]: c["state"]} for c in pod["status"].get("containerStatuses", [])]
        lines.append(f"{pod['metadata']['name']}: {pod['status'].get('phase')} {states}")
        with contextlib.suppress(AssertionError):
            lines.append(cluster.kubectl("logs", pod["metadata"]["name"], "--tail=20", namespace=namespace))
    events = cluster.items("v1", "Event", namespace)
    lines += [f"{e['involvedObject']['name']}: {e['reason']}: {e['message']}" for e in events[-20:]]
    return "\n".join(lines)


@dataclass(frozen=True)
class ServiceEndpoint:
    """Address and ports of a Service."""

    host: str
    ports: dict[str, int]
    """Ports by name."""

    def text(self, model: str, prompt: str, max_tokens: int = 16) -> str:
        """Return a model's greedy answer over gRPC, without the prompt."""
        client = grpcclient.InferenceServerClient(f"{format_for_url(self.host)}:{self.ports['grpc']}")
        exclude = grpcclient.InferInput("exclude_input_in_output", [1], "BOOL")
        exclude.set_data_from_numpy(np.array([True]))
        answers: list[Any] = []
        with client:
            client.start_stream(lambda result, error: answers.append(error or result))
            parameters = {"max_tokens": max_tokens, "temperature": 0}
            client.async_stream_infer(model, [grpc_text(prompt), exclude], parameters=parameters)
            client.stop_stream()
        (answer,) = answers
        if isinstance(answer, Exception):
            raise answer
        return str(answer.as_numpy("text_output")[0].decode())


@contextlib.contextmanager
def service_endpoint(cluster: Cluster, namespace: str, service: str = "tales") -> Iterator[ServiceEndpoint]:
    """Yield the Service's own address if this machine has a route to it, else a kubectl port-forward."""
    body = cluster.get("v1", "Service", service, namespace)
    assert body is not None, f"no Service {service}"
    ports = {port["name"]: port["port"] for port in body["spec"]["ports"]}
    if cluster.programs:
        yield ServiceEndpoint(body["spec"]["clusterIP"], ports)
        return
    local_ports = dict(zip(ports, free_ports(len(ports)), strict=True))
    pairs = [f"{local_ports[name]}:{ports[name]}" for name in ports]
    kubectl = ["kubectl", f"--kubeconfig={cluster.kubeconfig}", f"--namespace={namespace}"]
    with subprocess.Popen(
        [*kubectl, "port-forward", f"service/{service}", *pairs], stdout=subprocess.DEVNULL
    ) as forward:
        try:
            deadline = time.monotonic() + 20
            while not all(is_open(port) for port in local_ports.values()):
                assert time.monotonic() < deadline and forward.poll() is None, "kubectl port-forward does not listen"
                time.sleep(0.05)
            yield ServiceEndpoint("127.0.0.1", local_ports)
        finally:
            forward.terminate()


def is_open(port: int) -> bool:
    """Return whether a program listens on a port of this machine."""
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0
