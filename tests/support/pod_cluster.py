# SPDX-License-Identifier: Apache-2.0
"""A cluster that runs real pods, and what tests do with a service there: its examples, its tokens, its containers.

The node is one of hack/nodocker_cluster's, on this machine; or the cluster is given (QUIRE_TEST_KUBECONFIG), has the
images of
hack/nodocker_cluster/images.py and examples/ at /examples on its node, as hack/kind.sh sets it up.
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
from nodocker_cluster import archive, binaries, cgroups, control_plane, images, network, node, processes
from nodocker_cluster.ports import free_ports
from support.cluster import KUBECONFIG_VARIABLE, ROOT, Cluster, running_cluster
from support.quire_serve import grpc_text

from quire_spec.net.addresses import format_for_url

KIND_EXAMPLES = ROOT / "examples/kind"
LLM_SERVICE_KIND = ("quire.dev/v1alpha1", "LLMService")
OPERATOR_NAMESPACE = "quire-system"
"""Namespace of the operator."""


@contextlib.contextmanager
def cluster_with_node(folder: Path) -> Iterator[Cluster]:
    """The cluster that was given, or one of our own with a node that has the images.

    Raises:
        Unavailable: no node can be had here; the message says what is missing.
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
        for file in archives:
            running_node.load(file)
        cluster = Cluster(plane.access, plane.kubeconfig, folder, programs)
        with cluster.http:
            yield cluster
    finally:
        node.stop(plane.folder)
        plane.stop()
    assert_nothing_left(plane.folder)


def assert_nothing_left(folder: Path) -> None:
    """No process, mount, control group or network of the cluster in `folder`."""
    assert [*processes.running_processes(folder)] == []
    assert not cgroups.exists(folder)
    assert not network.is_connected()
    assert str(folder) not in Path("/proc/self/mounts").read_text()


def create_examples_volume(cluster: Cluster, namespace: str) -> None:
    """examples/kind/volume.yaml in this namespace, with the folder where the node has it."""
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
    """examples/kind/tales.yaml, with other fields of the spec."""
    document: dict[str, Any] = yaml.safe_load((KIND_EXAMPLES / "tales.yaml").read_text())
    document["spec"].update(spec)
    return document


def get_service(cluster: Cluster, namespace: str, name: str = "tales") -> dict[str, Any]:
    """The LLMService."""
    body = cluster.get(*LLM_SERVICE_KIND, name, namespace)
    assert body is not None, f"no LLMService {name}"
    return body


def current_condition(cluster: Cluster, namespace: str, kind: str) -> dict[str, Any]:
    """A condition, once it is about the spec as it is now; empty before."""
    body = get_service(cluster, namespace)
    matching = {c["type"]: c for c in body.get("status", {}).get("conditions", [])}.get(kind, {})
    return matching if matching.get("observedGeneration") == body["metadata"]["generation"] else {}


def serving_pods(cluster: Cluster, namespace: str, service: str = "tales") -> list[dict[str, Any]]:
    """The pods that serve and are not on their way out."""
    selector = f"app.kubernetes.io/instance={service},app.kubernetes.io/component=server"
    bodies = cluster.items("v1", "Pod", namespace, labelSelector=selector)
    return [pod for pod in bodies if "deletionTimestamp" not in pod["metadata"]]


def is_ready(pod: dict[str, Any]) -> bool:
    """Whether the kubelet says so."""
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


def server_container(pod: dict[str, Any]) -> dict[str, Any]:
    """Status of the container that serves."""
    return next(c for c in pod["status"]["containerStatuses"] if c["name"] == "server")


def diagnostics(cluster: Cluster, namespace: str) -> str:
    """Why pods are not ready: their containers, the last events, the ends of their logs."""
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
    """Where clients of a Service go in."""

    host: str
    ports: dict[str, int]
    """By the Service's names of them."""

    def text(self, model: str, prompt: str, max_tokens: int = 16) -> str:
        """What a model answers by gRPC, greedily, without the prompt."""
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
    """The Service: by its own address where this machine has a route to it, else through kubectl port-forward."""
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
            while not all(_is_open(port) for port in local_ports.values()):
                assert time.monotonic() < deadline and forward.poll() is None, "kubectl port-forward does not listen"
                time.sleep(0.05)
            yield ServiceEndpoint("127.0.0.1", local_ports)
        finally:
            forward.terminate()


def _is_open(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0
