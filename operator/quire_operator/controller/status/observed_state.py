# SPDX-License-Identifier: Apache-2.0
"""Observed state of one service in one pass: its objects, reduced to the inputs of the status. Pure.

Built by state_observer.py and pod_admin_client.py, evaluated by status.py.
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
    """OOMKilled, Error, Completed, ..."""
    message: str
    """Its termination message, or the end of its log."""


@dataclass(frozen=True, slots=True)
class PodState:
    """One pod of a service."""

    name: str
    uid: str
    ip: str
    """Empty before the pod has one."""
    phase: str
    ready: bool
    """By the kubelet's Ready condition."""
    deleting: bool
    started_at: str
    """When the main container started, RFC 3339; empty while it does not run."""
    restarts: int
    """Restarts of the main container."""
    template_hash: str
    """Label of its ReplicaSet."""
    health_port: int | None
    """Container port named health, with the admin API; None: the pod has none."""
    created_at: str = ""
    """metadata.creationTimestamp"""
    unschedulable: str = ""
    """The scheduler's message; empty when the pod has a node."""
    waiting: str = ""
    """Reason and message of a waiting container, unless it waits for an earlier one."""
    creating: bool = False
    """It has a node, but no container has started: volumes, network or images are not ready."""
    terminated: TerminatedContainer | None = None
    """The last failed termination of a container, or the successful one of a download."""
    report: PodStatus | None = None
    """Response to GET /status; None: not read, or no response."""
    report_error: str = ""
    """Why there is no report, or why the pod rejected the catalog; never contains the key."""
    download_folder: str = ""
    """Folder to which a container downloads the model before the pod serves; its name depends on the source."""
    downloading: bool = False
    """Whether its download container runs."""
    progress: DownloadProgress | None = None
    """Response to GET /progress during a download; None: not read, or no response."""

    @property
    def core_started_at(self) -> str | None:
        """When its engine core started: a restart of the core alone loses its adapters."""
        return self.report.core_started_at if self.report else None

    @property
    def alive(self) -> bool:
        """Whether it is neither being deleted nor terminated."""
        return not self.deleting and self.phase in ("Pending", "Running")


@dataclass(frozen=True, slots=True)
class ObservedState:
    """Everything observed of a service in one pass."""

    deployment: Body | None = None
    """At least as new as this pass's apply: its response or a later event. With an older one the status would report a
    rollout as complete that has not started."""
    pods: tuple[PodState, ...] = ()
    """Server pods."""
    job: Body | None = None
    """The download Job of the spec's source."""
    job_pods: tuple[PodState, ...] = ()
    """Its pods."""
    claim: Body | None = None
    """The claim with the model."""
    applied_generation: int = 0
    """Generation for which all objects were applied; if older than the spec's, the apply is incomplete."""
    unavailable_kinds: tuple[str, ...] = ()
    """Kinds that the spec requests and the API server does not serve."""
    unknown_fields: tuple[str, ...] = ()
    """Fields of the spec that the API server does not know."""
    apply_error: str = ""
    """Errors of rejected applies; empty: none."""
    conflict: str = ""
    """An existing object with the name of a manifest but another owner; empty: none."""
    pending_deletion: str = ""
    """An object that must be deleted before anything is applied; empty: none."""


@dataclass(frozen=True, slots=True)
class PlanningResult:
    """Result of planning. At most one of `spec_error`, `unplannable` and `waiting_for` is set. If one is, `plan` is the
    previous valid plan, which stays deployed."""

    plan: Plan | None = None
    spec_error: str = ""
    """Why the spec is invalid, one line for each problem; empty: it is valid."""
    unplannable: Unplannable | None = None
    waiting_for: str = ""
    """What planning waits for; empty: nothing."""
    read_error: DownloadReason | None = None
    """Why the model could not be read, if `waiting_for` is set because of that; None: it was read, or not tried."""
    needs_backoff: bool = False
    """No event reports the end of waiting: retry with backoff."""


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
        download_folder=next(_download_folders(spec), ""),
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
"""Reasons of containers that wait for volumes, the network or an earlier container."""


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
