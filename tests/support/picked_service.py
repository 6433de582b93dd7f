# SPDX-License-Identifier: Apache-2.0
"""A service of real servers behind the endpoint picker and Envoy, with the InferencePool that the operator applies."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.cluster import Cluster
from support.controller_harness import ControllerHarness, make_claim
from support.engine_processes import wait_for
from support.envoy import running_envoy
from support.fake_kubelet import FakeKubelet
from support.picker import CRDS, ROUTERS, Picker, running_picker
from support.quire_serve import EXAMPLES
from support.served_pods import ServedPods


@dataclass
class PickedService:
    """A ready service."""

    operator: ControllerHarness
    pods: ServedPods
    picker: Picker
    port: int
    """Port of Envoy on this machine."""


@contextlib.contextmanager
def picked_service(
    cluster: Cluster, kubelet: FakeKubelet, document: dict[str, Any], folder: Path, claim: Path = EXAMPLES
) -> Iterator[PickedService]:
    """Apply a service, whose name is `tales` and whose models are on the claim `models`, and wait until it is ready."""
    with contextlib.ExitStack() as stack:
        for kind in CRDS:
            stack.enter_context(cluster.optional_kind(kind))
        namespace = stack.enter_context(cluster.namespace())
        cluster.apply(make_claim(), namespace)
        pods = stack.enter_context(ServedPods(kubelet, document, folder, claim))
        operator = stack.enter_context(ControllerHarness(cluster, namespace))
        cluster.apply(document, namespace)
        wait_for(lambda: operator.condition("Ready").get("status") == "True", 120, operator.status)
        config = ROUTERS / "endpoint-picker.yaml"
        picker = stack.enter_context(running_picker(cluster, namespace, "tales", config, folder))
        hosts = [(address, pod.ports["openai"]) for address, pod in pods.running.items()]
        port = stack.enter_context(running_envoy(hosts, folder, picker.port))
        yield PickedService(operator, pods, picker, port)
