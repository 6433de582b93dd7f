# SPDX-License-Identifier: Apache-2.0
"""What a pass of the reconciler saw of one service: its objects, reduced to what the status follows from. Pure.

Filled by the reconciler and pods.py, judged by status.py.
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
"""A Kubernetes object as the API server gives it."""

TEMPLATE_HASH = "pod-template-hash"
HEALTH_PORT = "health"


@dataclass(frozen=True, slots=True)
class TerminatedContainer:
    """How a container of a pod ended last."""

    container: str
    exit_code: int
    reason: str
    """OOMKilled, Error, Completed, ..."""
    message: str
    """What it wrote to its termination message, or the end of its log."""


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
    """Of the main container."""
    template_hash: str
    """Label of the ReplicaSet that it is of."""
    health_port: int | None
    """Container port named health, which answers whoever asks how the pod is; None: the pod has none."""
    created_at: str = ""
    """metadata.creationTimestamp"""
    unschedulable: str = ""
    """The scheduler's message; empty when the pod has a node."""
    waiting: str = ""
    """Reason and message of a container that waits for something other than its turn."""
    creating: bool = False
    """It has a node, and none of its containers has started there: volumes, network or images are not ready yet."""
    terminated: TerminatedContainer | None = None
    """The last end of a container that did not end well, or of a download that did."""
    report: PodStatus | None = None
    """What GET /status answered; None: not asked, or no answer."""
    report_error: str = ""
    """Why there is no report, or why the pod refused the catalogue; never holds the key."""
    download_folder: str = ""
    """Folder that a container of it downloads the model to, before it serves; it is named by the source."""
    downloading: bool = False
    """A container of it that downloads the model runs."""
    progress: DownloadProgress | None = None
    """What GET /progress answered, while it does; None: not asked, or no answer."""

    @property
    def core_started_at(self) -> str | None:
        """When its core started: what a core holds is gone with it, also where pod and container live on."""
        return self.report.core_started_at if self.report else None

    @property
    def alive(self) -> bool:
        """Neither on its way out nor ended."""
        return not self.deleting and self.phase in ("Pending", "Running")


@dataclass(frozen=True, slots=True)
class ObservedState:
    """Everything of a service that was seen in one pass."""

    deployment: Body | None = None
    """At least as new as this pass's own apply of it: the apply's answer, or a later event. An older one would have
    the status call a rollout done that has not begun."""
    pods: tuple[PodState, ...] = ()
    """Pods that serve."""
    job: Body | None = None
    """The download Job of the source that the spec has now."""
    job_pods: tuple[PodState, ...] = ()
    """Its pods."""
    claim: Body | None = None
    """The claim that the model is downloaded to."""
    applied_generation: int = 0
    """Generation that all objects were applied for; an older one than the spec's: something of it is still missing."""
    unavailable_kinds: tuple[str, ...] = ()
    """Kinds that the spec asks for and the API server does not have."""
    unknown_fields: tuple[str, ...] = ()
    """Fields of the spec that the API server does not know."""
    apply_error: str = ""
    """What the API server said to an apply that it refused for good; empty: nothing was."""
    conflict: str = ""
    """Object of somebody else that has the name of one of ours; empty: none."""
    pending_deletion: str = ""
    """Object that has to be gone before anything is applied, in a sentence; empty: none."""


@dataclass(frozen=True, slots=True)
class PlanningResult:
    """What planning said. At most one of the last three is set; `plan` beside `invalid` or `unplannable` is the last
    good one, which keeps serving."""

    plan: Plan | None = None
    spec_error: str = ""
    """Why the spec cannot be used, a line for each problem; empty: it can."""
    unplannable: Unplannable | None = None
    waiting_for: str = ""
    """What planning waits for, in a sentence; empty: for nothing."""
    read_error: DownloadReason | None = None
    """Why the model could not be read for it, beside `pending`; None: it could, or nobody tried."""
    needs_backoff: bool = False
    """Nobody will say when that is there: it has to be tried again and again."""


def parse_pod(body: Body) -> PodState:
    """A pod as the status needs it."""
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
"""What every container waits for, once."""


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
    """Ends of containers, what failed before what ended well."""
    terminated = [
        TerminatedContainer(c["name"], end.get("exitCode", 0), end.get("reason", ""), end.get("message", ""))
        for c in _container_statuses(state)
        for end in (c.get("state", {}).get("terminated"), c.get("lastState", {}).get("terminated"))
        if end
    ]
    return iter(sorted(terminated, key=lambda end: end.exit_code == 0))
