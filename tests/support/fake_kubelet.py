# SPDX-License-Identifier: Apache-2.0
"""A node without a kubelet: its objects in the API server are written by a thread, and no container runs.

Scheduler and controllers are real and see a node with GPUs; starting real containers is for the end-to-end tests,
because GPUs cannot be had here and a pod takes seconds. Pods get addresses 127.x.y.z, where tests may serve (see
admin_port.py). Claims get a volume, as a storage class would make one.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from kubernetes.dynamic.exceptions import DynamicApiError
from support.cluster import Cluster

Manifest = dict[str, Any]
PodPredicate = Callable[[Manifest], bool]

_PAUSE_S = 0.1
_HEARTBEAT_S = 10.0
_USED_ADDRESSES: set[str] = set()
"""Addresses of the pods of all nodes of this process."""
_MERGE = "application/merge-patch+json"
GPU_LABELS = {
    "nvidia.com/gpu.product": "NVIDIA-L4",
    "nvidia.com/gpu.memory": "23034",
    "nvidia.com/gpu.count": "8",
    "nvidia.com/gpu.replicas": "1",
}


@dataclass(frozen=True)
class FakeContainer:
    """Behavior of a pod's main container."""

    ready: bool = True
    waiting: tuple[str, str] | None = None
    """Reason and message, if it does not run."""
    exit_code: int | None = None
    """Exit code, if it has ended and is not restarted."""
    reason: str = ""
    message: str = ""
    """Termination message."""
    restarts: int = 0
    last_termination: tuple[int, str, str] | None = None
    """Exit code, reason and message of the previous run."""


class FailedMount(Exception):
    """An object that the pod mounts does not exist yet: its containers wait."""


RUNNING = FakeContainer()
COMPLETED = FakeContainer(exit_code=0, reason="Completed")


@dataclass
class FakeKubelet:
    """One node. A context manager. By default pods of Jobs succeed and other pods serve."""

    cluster: Cluster
    name: str = "node-0"
    gpus: int = 8
    resource: str = "nvidia.com/gpu"
    labels: Mapping[str, str] = field(default_factory=lambda: dict(GPU_LABELS))
    on_start: Callable[[Manifest, str], None] = lambda pod, address: None
    """Called with a pod and its address before the pod first runs, and at each restart of its container; raises
    FailedMount if that is not possible."""
    probe: PodPredicate = lambda pod: True
    """The readiness probe of running pods."""
    on_end: Callable[[Manifest], None] = lambda pod: None
    """Called when a pod is being deleted."""
    errors: list[str] = field(default_factory=list)
    """Errors of the thread; checked at the end."""

    def __post_init__(self) -> None:
        self._behaviors: list[tuple[PodPredicate, FakeContainer]] = []
        self._lock = threading.Lock()
        self._hooks_lock = threading.Lock()
        self._addresses: dict[str, str] = {}
        self._last_written: dict[str, Any] = {}
        self._started_at: dict[str, str] = {}
        self._started_containers: dict[str, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kubelet {self.name}", daemon=True)
        self._last_heartbeat_s = 0.0

    # What tests say

    def set_behavior(self, predicate: PodPredicate, container: FakeContainer) -> None:
        """Set the behavior of matching pods from now on; the last call counts."""
        with self._lock:
            self._behaviors.insert(0, (predicate, container))

    def restart(self, pod: Manifest, message: str = "") -> None:
        """Restart the container of a pod, as after a crash."""
        uid = pod["metadata"]["uid"]
        with self._lock:
            current = self._behavior_of(pod)
            self._started_at[uid] = _timestamp(1)
            restarted = replace(current, restarts=current.restarts + 1, last_termination=(1, "Error", message))
            self._behaviors.insert(0, (lambda body: body["metadata"]["uid"] == uid, restarted))

    def address(self, pod: Manifest) -> str:
        """Return the pod's address on this machine, which no other pod gets."""
        uid = pod["metadata"]["uid"]
        with self._lock:
            if uid not in self._addresses:
                # Others may run these tests on the same machine.
                prefix = f"127.{os.getpid() % 250 + 1}"
                candidates = (f"{prefix}.{i // 250}.{i % 250 + 1}" for i in range(1, 62000))
                self._addresses[uid] = next(address for address in candidates if address not in _USED_ADDRESSES)
                _USED_ADDRESSES.add(self._addresses[uid])
            return self._addresses[uid]

    def set_hooks(
        self,
        on_start: Callable[[Manifest, str], None] = lambda pod, address: None,
        probe: PodPredicate = lambda pod: True,
        on_end: Callable[[Manifest], None] = lambda pod: None,
    ) -> None:
        """Replace the hooks. When this returns, none of those before is still being called."""
        with self._hooks_lock:
            self.on_start, self.probe, self.on_end = on_start, probe, on_end

    # The node

    def __enter__(self) -> Self:
        meta = {
            "name": self.name,
            "labels": {"kubernetes.io/hostname": self.name, "kubernetes.io/os": "linux", **self.labels},
        }
        self.cluster.request("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": meta})
        self._send_heartbeat()
        # The taint of a node that has just come is taken away by a controller within 5 s; not waited for.
        self.cluster.request("PATCH", f"/api/v1/nodes/{self.name}", {"spec": {"taints": None}}, _MERGE)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        self.cluster.request("DELETE", f"/api/v1/nodes/{self.name}")
        assert not self.errors, self.errors

    def _send_heartbeat(self) -> None:
        self._last_heartbeat_s = time.monotonic()
        capacity = {
            "cpu": "1000",
            "memory": "4000Gi",
            "pods": "1000",
            "ephemeral-storage": "4000Gi",
            self.resource: str(self.gpus),
        }
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "no kubelet",
            "lastHeartbeatTime": _timestamp(),
            "lastTransitionTime": _timestamp(),
        }
        status = {"capacity": capacity, "allocatable": capacity, "conditions": [ready]}
        self.cluster.request("PATCH", f"/api/v1/nodes/{self.name}/status", {"status": status}, _MERGE)

    def _run(self) -> None:
        while not self._stop.wait(_PAUSE_S):
            try:
                if time.monotonic() - self._last_heartbeat_s > _HEARTBEAT_S:
                    self._send_heartbeat()
                self._provision_volumes()
                pods = self.cluster.request("GET", "/api/v1/pods", fieldSelector=f"spec.nodeName={self.name}")
                for pod in pods["items"]:
                    with self._hooks_lock:
                        self._sync_pod(pod)
            except DynamicApiError as error:
                # Objects go while we look at them.
                if error.status not in (404, 409, 429):
                    self.errors.append(str(error.summary()))
            except Exception:
                if not self._stop.is_set():
                    self.errors.append(traceback.format_exc())

    def _sync_pod(self, pod: Manifest) -> None:
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        if "deletionTimestamp" in meta:
            with self._lock:
                self._addresses.pop(meta["uid"], None)
            if self._started_containers.pop(meta["uid"], None) is not None:
                self.on_end(pod)
            self._request_tolerating_conflicts("DELETE", path, gracePeriodSeconds=0)
            return
        if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            return  # A pod that has ended never starts again.
        address = self.address(pod)
        with self._lock:
            container = self._behavior_of(pod)
            started_at = self._started_at.setdefault(meta["uid"], _timestamp())
        is_running = container.waiting is None and container.exit_code is None
        if is_running and self._started_containers.get(meta["uid"]) != started_at:
            try:
                self.on_start(pod, address)
                self._started_containers[meta["uid"]] = started_at
            except FailedMount:
                is_running, container = False, FakeContainer(waiting=("ContainerCreating", ""))
        if is_running and container.ready:
            container = replace(container, ready=self.probe(pod))
        status = _pod_status(pod, container, address, started_at)
        if self._last_written.get(meta["uid"]) != status:
            self._request_tolerating_conflicts("PATCH", f"{path}/status", {"status": status}, _MERGE)
            self._last_written[meta["uid"]] = status

    def _behavior_of(self, pod: Manifest) -> FakeContainer:
        default = COMPLETED if pod["spec"]["restartPolicy"] == "Never" else RUNNING
        return next((container for predicate, container in self._behaviors if predicate(pod)), default)

    def _provision_volumes(self) -> None:
        """Create a volume for each pending claim; the real controller binds them."""
        for claim in self.cluster.request("GET", "/api/v1/persistentvolumeclaims")["items"]:
            meta, spec = claim["metadata"], claim["spec"]
            if claim.get("status", {}).get("phase") != "Pending" or meta["uid"] in self._last_written:
                continue
            volume = {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": f"pv-{meta['uid']}"},
                "spec": {
                    "capacity": {"storage": spec["resources"]["requests"]["storage"]},
                    "accessModes": spec["accessModes"],
                    "persistentVolumeReclaimPolicy": "Delete",
                    "storageClassName": spec.get("storageClassName", ""),
                    "hostPath": {"path": "/nowhere"},
                    "claimRef": {"namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]},
                },
            }
            self._last_written[meta["uid"]] = "a volume"
            self._request_tolerating_conflicts("POST", "/api/v1/persistentvolumes", volume)

    def _request_tolerating_conflicts(
        self, method: str, path: str, body: Any = None, content_type: str = "", **params: Any
    ) -> None:
        try:
            self.cluster.request(method, path, body, content_type, **params)
        except DynamicApiError as error:
            if error.status not in (404, 409):
                raise


def _pod_status(pod: Manifest, container: FakeContainer, address: str, started_at: str) -> Manifest:
    """Return a pod's status as a kubelet writes it."""
    main_container = pod["spec"]["containers"][0]
    is_terminated, is_running = (
        container.exit_code is not None,
        container.waiting is None and container.exit_code is None,
    )
    phase = (
        ("Failed" if container.exit_code else "Succeeded") if is_terminated else "Running" if is_running else "Pending"
    )
    ready = is_running and container.ready
    conditions = {"PodScheduled": True, "Initialized": True, "ContainersReady": ready, "Ready": ready}
    container_status = {
        "name": main_container["name"],
        "image": main_container.get("image", ""),
        "imageID": "",
        "ready": ready,
        "restartCount": container.restarts,
        "state": _container_state(container, started_at),
        "lastState": {"terminated": _terminated_state(*container.last_termination, started_at)}
        if container.last_termination
        else {},
    }
    return {
        "phase": phase,
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": started_at,
        "conditions": [
            # Long ago, so that no test waits for minReadySeconds. Without a time, a pod never becomes available.
            {"type": condition_type, "status": str(is_true), "lastTransitionTime": "2020-01-01T00:00:00Z"}
            for condition_type, is_true in conditions.items()
        ],
        "containerStatuses": [container_status],
    }


def _container_state(container: FakeContainer, started_at: str) -> Manifest:
    if container.waiting is not None:
        reason, message = container.waiting
        return {"waiting": {"reason": reason, "message": message}, "running": None, "terminated": None}
    if container.exit_code is not None:
        terminated = _terminated_state(
            container.exit_code,
            container.reason or ("Error" if container.exit_code else "Completed"),
            container.message,
            started_at,
        )
        return {"terminated": terminated, "running": None, "waiting": None}
    return {"running": {"startedAt": started_at}, "waiting": None, "terminated": None}


def _terminated_state(exit_code: int, reason: str, message: str, started_at: str) -> Manifest:
    return {
        "exitCode": exit_code,
        "reason": reason,
        "message": message,
        "startedAt": started_at,
        "finishedAt": started_at,
    }


def _timestamp(offset_s: float = 0.0) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + offset_s))
