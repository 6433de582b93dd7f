# SPDX-License-Identifier: Apache-2.0
"""The environment of a chaos test: a namespace with LLMServices, pods, one operator, and a proxied API server.

operations.py changes it; invariants.py checks the statuses.
"""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from support.chaos.downloads import DownloadTracker, is_download
from support.chaos.invariants import LLM_SERVICE_KIND, StatusInvariants
from support.chaos.recorders import OperatorKilled, RecordingFakePods, RecordingPod, recording_client
from support.cluster import Cluster
from support.controller_harness import ControllerHarness, llm_service, make_claim
from support.fault_proxy import FaultInjectingProxy

from quire_operator.kube.reflector import WatchTimeouts
from quire_operator.render import object_names

Manifest = dict[str, Any]
CLAIM_NAMES = ("models", "more")
_APPLY_PATCH = "application/apply-patch+yaml"


class ChaosEnvironment:
    """A context manager."""

    def __init__(self, cluster: Cluster, namespace: str, fake_pods: RecordingFakePods, folder: Path) -> None:
        self.cluster, self.namespace, self.fake_pods, self.kubelet = cluster, namespace, fake_pods, fake_pods.kubelet
        self.proxy = FaultInjectingProxy(cluster, folder)
        self.downloads = DownloadTracker(cluster, namespace, fake_pods.kubelet)
        self.invariants = StatusInvariants(cluster, namespace, fake_pods.started_pods, self.downloads)
        self.operator: ControllerHarness | None = None
        self.num_writes_of_stopped = 0
        """Writes of the operators that were stopped."""
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
        """Start the operator, without anything that an earlier one remembered."""
        assert self.operator is None
        operator_state: dict[str, Any] = {}
        settings = {"secret_ttl_s": 1.0, "resync_s": 2.0, "watch_timeouts": WatchTimeouts(5.0, max_backoff_s=1.0)}
        client = recording_client(self.invariants.recorded, operator_state)
        harness = ControllerHarness(self.cluster, self.namespace, settings, self.proxy.kubeconfig, client, with_kopf)
        harness.__enter__()
        operator_state["queue"] = harness.controller.queue
        pod_admin_client = harness.controller._pod_admin
        pod_admin_client._total_timeout_s, pod_admin_client._unresponsive_timeout_s = 2.0, 0.5
        self.operator = harness

    def stop_operator(self) -> None:
        """Stop the operator as abruptly as a kill does, if it runs."""
        harness, self.operator = self.operator, None
        if harness is None:
            return
        harness.stop()
        assert harness.failure is None or isinstance(harness.failure, OperatorKilled), repr(harness.failure)
        self.num_writes_of_stopped += len(harness.recorded_writes)

    def total_writes(self) -> int:
        """Return the number of writes of all operators so far."""
        return self.num_writes_of_stopped + (len(self.operator.recorded_writes) if self.operator else 0)

    # Services

    def get_service(self, name: str) -> Manifest:
        """A service as it is; empty when there is none."""
        return self.cluster.get(*LLM_SERVICE_KIND, name, self.namespace) or {}

    def create_service(self, name: str, spec: Manifest) -> None:
        self.cluster.apply(llm_service(name, **spec), self.namespace)

    def patch_service(self, name: str, spec: Manifest) -> None:
        self.cluster.merge(*LLM_SERVICE_KIND, name, {"spec": spec}, self.namespace)

    def apply_service(self, name: str, spec: Manifest, field_manager: str) -> None:
        """Server-side apply of a part of a spec, which is then that manager's."""
        body = {
            "apiVersion": LLM_SERVICE_KIND[0],
            "kind": LLM_SERVICE_KIND[1],
            "metadata": {"name": name},
            "spec": spec,
        }
        path = self.cluster.path(*LLM_SERVICE_KIND, self.namespace, name)
        self.cluster.request("PATCH", path, body, _APPLY_PATCH, fieldManager=field_manager, force="true")

    def running_pods(self, name: str) -> list[tuple[Manifest, RecordingPod]]:
        """Those that run, by name."""
        running = [
            (entry.pod, entry.fake_pod)
            for entry in self.fake_pods.running_in(self.namespace)
            if entry.pod["metadata"]["uid"] not in self.ended_pod_uids
        ]
        return [
            (pod, fake_pod) for pod, fake_pod in running if pod["metadata"]["labels"][object_names.INSTANCE] == name
        ]  # type: ignore[misc]

    def download_pods(self, name: str) -> list[Manifest]:
        """Pods that download a service's model, by name."""
        pods = self.cluster.items("v1", "Pod", self.namespace, labelSelector=f"{object_names.INSTANCE}={name}")
        running = [pod for pod in pods if is_download(pod) and pod["status"].get("phase") == "Running"]
        return sorted(running, key=lambda pod: str(pod["metadata"]["name"]))

    def delete_pods_of(self, name: str) -> None:
        """Delete all pods of a service, which hold its claim, also those that have ended."""
        for pod in self.cluster.items("v1", "Pod", self.namespace, labelSelector=f"{object_names.INSTANCE}={name}"):
            self.cluster.delete("v1", "Pod", pod["metadata"]["name"], self.namespace)
