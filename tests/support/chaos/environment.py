# SPDX-License-Identifier: Apache-2.0
"""The environment of a chaos test: a namespace with LLMServices, pods, one operator, and a proxied API server.

operations.py changes it; invariants.py checks the statuses.
"""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, cast

from support.chaos.downloads import ChaosDownloads, is_download
from support.chaos.invariants import LLM_SERVICE_KIND, StatusInvariants
from support.chaos.recorders import ChaosPod, RecordingFakePods
from support.cluster import Cluster
from support.controller_harness import ControllerHarness, llm_service, make_claim
from support.fault_proxy import FaultInjectingProxy

from quire_operator.kube.reflector import WatchTimeouts
from quire_operator.render import object_names

Manifest = dict[str, Any]
CLAIM_NAMES = ("models", "more")


class ChaosEnvironment:
    """A context manager."""

    def __init__(self, cluster: Cluster, namespace: str, fake_pods: RecordingFakePods, folder: Path) -> None:
        self.cluster, self.namespace, self.fake_pods, self.kubelet = cluster, namespace, fake_pods, fake_pods.kubelet
        self.proxy = FaultInjectingProxy(cluster, folder)
        self.downloads = ChaosDownloads(namespace, fake_pods.kubelet)
        self.invariants = StatusInvariants(cluster, namespace, fake_pods.started_pods, self.downloads)
        self.operator: ControllerHarness | None = None
        self.ended_pod_uids: set[str] = set()
        """Pods that will never run again, by uid."""
        self.step_log: list[str] = []
        """What happened."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name in CLAIM_NAMES:
                self.cluster.apply(make_claim(name), self.namespace)
            stack.enter_context(self.proxy)
            stack.enter_context(self.downloads)
            stack.enter_context(self.invariants)
            stack.callback(self.stop_operator)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def log_step(self, text: str) -> None:
        """Add to the history."""
        self.step_log.append(f"{time.monotonic():.2f} {text}")

    # The operator

    def start_operator(self, with_kopf: bool = False) -> None:
        """Start the operator, without the state of an earlier one."""
        assert self.operator is None
        settings = {"secret_ttl_s": 1.0, "resync_s": 2.0, "watch_timeouts": WatchTimeouts(5.0, max_backoff_s=1.0)}
        harness = ControllerHarness(
            self.cluster, self.namespace, settings, self.proxy.kubeconfig, with_kopf=with_kopf
        ).__enter__()
        pod_admin_client = harness.controller._pod_admin
        pod_admin_client._total_timeout_s, pod_admin_client._unresponsive_timeout_s = 2.0, 0.5
        self.operator = harness

    def stop_operator(self) -> None:
        """Stop the operator as abruptly as a kill does, if it runs."""
        harness, self.operator = self.operator, None
        if harness is not None:
            harness.stop()
            assert harness.failure is None, repr(harness.failure)

    # Services

    def get_service(self, name: str) -> Manifest:
        """Return a service; empty if it does not exist."""
        return self.cluster.get(*LLM_SERVICE_KIND, name, self.namespace) or {}

    def create_service(self, name: str, spec: Manifest) -> None:
        self.cluster.apply(llm_service(name, **spec), self.namespace)

    def patch_service(self, name: str, spec: Manifest) -> None:
        self.cluster.merge(*LLM_SERVICE_KIND, name, {"spec": spec}, self.namespace)

    def running_pods(self, name: str) -> list[tuple[Manifest, ChaosPod]]:
        """Return the running server pods of a service, by name."""
        return [
            (entry.pod, cast(ChaosPod, entry.fake_pod))
            for entry in self.fake_pods.running_in(self.namespace)
            if entry.pod["metadata"]["uid"] not in self.ended_pod_uids
            and entry.pod["metadata"]["labels"][object_names.INSTANCE] == name
        ]

    def pods_of(self, name: str) -> list[Manifest]:
        """Return all pods of a service."""
        return self.cluster.items("v1", "Pod", self.namespace, labelSelector=f"{object_names.INSTANCE}={name}")

    def download_pods(self, name: str) -> list[Manifest]:
        """Return the running pods that download a service's model, by name."""
        running = [p for p in self.pods_of(name) if is_download(p) and p["status"].get("phase") == "Running"]
        return sorted(running, key=lambda pod: str(pod["metadata"]["name"]))

    def delete_pods_of(self, name: str) -> None:
        """Delete all pods of a service, which hold its claim, also those that have ended."""
        for pod in self.pods_of(name):
            self.cluster.delete("v1", "Pod", pod["metadata"]["name"], self.namespace)
