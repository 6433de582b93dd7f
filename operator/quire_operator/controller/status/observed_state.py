# SPDX-License-Identifier: Apache-2.0
"""Observed state of one service in one pass: the values of its objects that the status depends on. Pure.

state_observer.py builds it, and catalog_pusher.py adds the reports of the pods; status.py evaluates it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire_operator.plan.errors import Unplannable
from quire_operator.plan.plan import Plan
from quire_operator.render import model_storage, object_names
from quire_spec.documents.download_progress import DownloadProgress
from quire_spec.documents.download_result import DownloadReason
from quire_spec.documents.pod_status import PodStatus

Body = Mapping[str, Any]
"""A Kubernetes object as the API server returns it."""

TEMPLATE_HASH = "pod-template-hash"
HEALTH_PORT = "health"


@dataclass(frozen=True, slots=True)
class TerminatedContainer:
    """The last termination of a container."""

    container: str
    exit_code: int
    reason: str
    """Reason from the kubelet, such as OOMKilled, Error or Completed."""
    message: str
    """Termination message of the container, or the end of its log."""


@dataclass(frozen=True, slots=True)
class PodState:
    """One pod of a service."""

    name: str
    uid: str
    ip: str
    """IP address; empty until the pod has one."""
    phase: str
    ready: bool
    """Whether the kubelet's condition Ready is True."""
    deleting: bool
    started_at: str
    """Start time of the main container, RFC 3339; empty while the container does not run."""
    restarts: int
    """Number of restarts of the main container."""
    template_hash: str
    """Label pod-template-hash, which identifies the ReplicaSet."""
    health_port: int | None
    """Number of the container port `health`, which serves the admin API; None if the pod has no such port."""
    created_at: str = ""
    """metadata.creationTimestamp"""
    unschedulable: str = ""
    """Message of the scheduler about a pod without a node; empty if the pod has a node."""
    waiting: str = ""
    """Reason and message of a waiting container. Containers that wait for an earlier container are ignored."""
    creating: bool = False
    """True if the pod has a node, but no container has started: volumes, network or images are not ready."""
    terminated: TerminatedContainer | None = None
    """Last failed termination of a container, or the successful termination of the download container."""
    report: PodStatus | None = None
    """Response to GET /status; None if it was not read or the pod did not respond."""
    report_error: str = ""
    """Why there is no report, or why the pod rejected the catalog; never contains the key."""
    download_folders: tuple[str, ...] = ()
    """Folders to which a container downloads weights before the pod serves; their names depend on the sources."""
    downloading: bool = False
    """Whether the download container of the pod is running."""
    progress: DownloadProgress | None = None
    """Response to GET /progress during a download; None if it was not read or the pod did not respond."""

    @property
    def core_started_at(self) -> str | None:
        """Start time of the pod's engine core. A restart of only the engine core loses its adapters."""
        return self.report.core_started_at if self.report else None

    @property
    def alive(self) -> bool:
        """Whether the pod is neither being deleted nor terminated."""
        return not self.deleting and self.phase in ("Pending", "Running")


@dataclass(frozen=True, slots=True)
class ServicePods:
    """The pods of a service in one pass."""

    server_pods: tuple[PodState, ...] = ()
    """Pods of the Deployment, sorted by name."""
    job: Body | None = None
    """Job that downloads the model of the spec."""
    job_pods: tuple[PodState, ...] = ()
    """Pods of `job`, sorted by name."""
    claim: Body | None = None
    """PersistentVolumeClaim with the model, from which `job` was chosen."""


@dataclass(frozen=True, slots=True)
class ObservedState:
    """All observations of a service in one pass."""

    deployment: Body | None = None
    """Deployment of the service, from the response to this pass's apply or from a later event. With an older version of
    the Deployment, the status would report a rollout as complete before its start."""
    pods: tuple[PodState, ...] = ()
    """Server pods of the service."""
    job: Body | None = None
    """Job that downloads the model of the spec."""
    job_pods: tuple[PodState, ...] = ()
    """Pods of the download Job."""
    claim: Body | None = None
    """PersistentVolumeClaim with the model."""
    applied_generation: int = 0
    """Last generation whose objects were all applied. If it is less than the generation of the spec, the apply is
    incomplete."""
    unavailable_kinds: tuple[str, ...] = ()
    """Kinds of objects that the spec requests but the API server does not serve."""
    unknown_fields: tuple[str, ...] = ()
    """Fields of the spec that the API server does not support."""
    apply_error: str = ""
    """Errors of applies that the API server rejected; empty if there is none."""
    conflict: str = ""
    """Message about an existing object that has the name of a manifest but another owner; empty if there is none."""
    pending_deletion: str = ""
    """Name of an object whose deletion must end before manifests are applied; empty if there is none."""


@dataclass(frozen=True, slots=True)
class PlanningResult:
    """Result of planning. At most one of `spec_error`, `unplannable` and `waiting_for` is set; `plan` is then the
    previous valid plan, which stays deployed."""

    plan: Plan | None = None
    spec_error: str = ""
    """Reasons why the spec is invalid, one line for each problem; empty if the spec is valid."""
    unplannable: Unplannable | None = None
    waiting_for: str = ""
    """Event or result for which planning waits, as text; empty if planning does not wait."""
    read_error: DownloadReason | None = None
    """Reason why the model could not be read; None if it was read or no read was tried."""
    needs_backoff: bool = False
    """True if no event reports the end of the wait, so that planning must be retried with backoff."""


def parse_pod(body: Body) -> PodState:
    """Convert a pod."""
    meta, spec, state = body["metadata"], body.get("spec", {}), body.get("status", {})
    conditions = {c["type"]: c for c in state.get("conditions", ())}
    containers = spec.get("containers", ())
    main = containers[0]["name"] if containers else object_names.SERVER
    main_state: Mapping[str, Any] = next((c for c in state.get("containerStatuses", ()) if c["name"] == main), {})
    ports = {p.get("name"): p["containerPort"] for c in containers for p in c.get("ports", ())}
    scheduled = conditions.get("PodScheduled", {})
    unschedulable = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    return PodState(
        name=meta["name"],
        uid=meta["uid"],
        ip=state.get("podIP", ""),
        phase=state.get("phase", "Pending"),
        ready=conditions.get("Ready", {}).get("status") == "True",
        deleting="deletionTimestamp" in meta,
        started_at=main_state.get("state", {}).get("running", {}).get("startedAt", ""),
        restarts=main_state.get("restartCount", 0),
        template_hash=meta.get("labels", {}).get(TEMPLATE_HASH, ""),
        health_port=ports.get(HEALTH_PORT),
        created_at=meta.get("creationTimestamp", ""),
        unschedulable=scheduled.get("message", "") if unschedulable else "",
        waiting=next(_waiting_messages(state), ""),
        creating="deletionTimestamp" not in meta and _is_creating(state),
        terminated=next(_terminated_containers(state), None),
        download_folders=tuple(_download_folders(spec)),
        downloading=any(
            c["name"] == model_storage.DOWNLOAD_CONTAINER and c.get("state", {}).get("running")
            for c in _container_statuses(state)
        ),
    )


def _download_folders(spec: Mapping[str, Any]) -> Iterator[str]:
    for container in spec.get("initContainers") or ():
        if container["name"] == model_storage.DOWNLOAD_CONTAINER:
            yield from (a.removeprefix("--into=") for a in container.get("args") or () if a.startswith("--into="))


_CREATING_REASONS = ("ContainerCreating", "PodInitializing")
"""Waiting reasons of containers that wait for volumes, the network or an earlier container."""


def _container_statuses(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from state.get("initContainerStatuses") or ()
    yield from state.get("containerStatuses") or ()


def _waiting_messages(state: Mapping[str, Any]) -> Iterator[str]:
    for container in _container_statuses(state):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting and waiting.get("reason", "") not in _CREATING_REASONS:
            yield ": ".join(part for part in (waiting.get("reason", ""), waiting.get("message", "")) if part)


def _is_creating(state: Mapping[str, Any]) -> bool:
    reasons = [container.get("state", {}).get("waiting", {}).get("reason") for container in _container_statuses(state)]
    return bool(reasons) and all(reason in _CREATING_REASONS for reason in reasons)


def _terminated_containers(state: Mapping[str, Any]) -> Iterator[TerminatedContainer]:
    """Return an iterator over the terminations of containers, failed ones first."""
    terminated = [
        TerminatedContainer(c["name"], end.get("exitCode", 0), end.get("reason", ""), end.get("message", ""))
        for c in _container_statuses(state)
        for end in (c.get("state", {}).get("terminated"), c.get("lastState", {}).get("terminated"))
        if end
    ]
    return iter(sorted(terminated, key=lambda end: end.exit_code == 0))
