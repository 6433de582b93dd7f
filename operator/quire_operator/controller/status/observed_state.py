# SPDX-License-Identifier: Apache-2.0
"""Observed state of one service in one pass.

It contains everything about the service's objects that the status depends on. Pure. state_observer.py builds it,
catalog_pusher.py adds the reports of the pods, and status.py evaluates it. The module also contains PlanningResult, the
result of planning in the same pass.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire_operator.plan.errors import Unplannable
from quire_operator.plan.plan import Plan
from quire_operator.render import model_storage, object_names
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.download_progress import DownloadProgress
from quire_spec.documents.download_result import DownloadReason
from quire_spec.documents.pod_status import PodStatus

Body = Mapping[str, Any]
"""A Kubernetes object in the form that the API server returns."""

TEMPLATE_HASH = "pod-template-hash"
HEALTH_PORT = "health"
KUEUE_PREFIX = "kueue.x-k8s.io/"
"""Prefix of the gates and labels of Kueue, which queues pods and Jobs."""
_MAIN_CONTAINERS = (object_names.SERVER, model_storage.DOWNLOAD_CONTAINER)


@dataclass(frozen=True, slots=True)
class TerminatedContainer:
    """Describes how a container last ended."""

    container: str
    exit_code: int
    reason: str
    """Reason that the kubelet reports, such as OOMKilled, Error or Completed."""
    message: str
    """Message that the container wrote when it terminated, or the end of its log."""


@dataclass(frozen=True, slots=True)
class PodState:
    """One pod of a service."""

    name: str
    uid: str
    ip: str
    """IP address. Empty until the pod gets one."""
    phase: str
    ready: bool
    """Whether the condition Ready, which the kubelet sets, is True."""
    deleting: bool
    started_at: str
    """Start time of the main container in the form of RFC 3339. Empty while the container is not running."""
    restarts: int
    """How often the main container was restarted."""
    template_hash: str
    """Value of the label that identifies the template: pod-template-hash, or quire.dev/template in a LeaderWorkerSet.
    """
    health_port: int | None
    """Number of the container port with the name `health`, which serves the admin API. None if the pod does not have
    this port.
    """
    created_at: str = ""
    """metadata.creationTimestamp"""
    ready_at: str = ""
    """Time at which `ready` last changed, in the form of RFC 3339."""
    ends_at: str = ""
    """Time at which the pod must have ended. Empty if it is not being deleted."""
    node: str = ""
    """Name of the pod's node. Empty until the pod has one."""
    group: int | None = None
    """Index of the group in a LeaderWorkerSet. None for a pod of a Deployment."""
    group_set: str = ""
    """Name of this LeaderWorkerSet. Empty for a pod of a Deployment."""
    rank: int = 0
    """Index of the pod in its group. The pod with index 0 serves."""
    role: str | None = None
    """Value of the label with the role. None if the pod has none."""
    unschedulable: str = ""
    """Message of the scheduler if it could not find a node for the pod. Empty if the pod has a node."""
    gates: tuple[str, ...] = ()
    """Names of the gates that keep the scheduler from looking at the pod."""
    gate_message: str = ""
    """Reason why Kueue does not remove its gate. Empty if it is not known."""
    failure: str = ""
    """Reason and message of a pod that has failed as a whole, such as Evicted. Empty if the pod has not failed."""
    failed_at: str = ""
    """Time of the last change of a condition of the pod, in the form of RFC 3339. For a pod that has failed, this is
    about the time when it failed.
    """
    waiting: str = ""
    """Reason and message of a container that is waiting. A container that only waits for an earlier container is
    ignored.
    """
    creating: bool = False
    """True if the pod waits for something that only events report. Either it has a node, but none of its containers has
    started, because volumes, network or images are not ready. Or the scheduler does not look at it yet, because a
    resource claim does not exist.
    """
    image: str = ""
    """Image of the main container."""
    terminated: TerminatedContainer | None = None
    """The last failed termination of a container. If no container has failed, this is the successful termination of the
    download container.
    """
    report: PodStatus | None = None
    """Response to GET /status. None if it was not requested, or if the pod did not respond."""
    report_error: str = ""
    """The reason why there is no report, or why the pod rejected the catalog. It never contains the key."""
    rank_error: str = ""
    """Why the rank of a worker that is not ready left its group again and again. Empty if it did not."""
    download_folders: tuple[str, ...] = ()
    """Folders to which the pod's download container writes weights before the pod serves. Their names depend on the
    sources.
    """
    downloading: bool = False
    """Whether the download container of the pod is running now."""
    progress: DownloadProgress | None = None
    """Response to GET /progress while the pod downloads. None if it was not requested, or if the pod did not
    respond.
    """

    @property
    def core_started_at(self) -> str | None:
        """Time at which the pod's engine core started. If only the engine core restarts, the pod loses its adapters."""
        return self.report.core_started_at if self.report else None

    @property
    def gated(self) -> str:
        """Text with the gates that keep the scheduler from looking at the pod. Empty if there are none."""
        if not self.gates:
            return ""
        message = f": {self.gate_message}" if self.gate_message else ""
        return f"the scheduler waits until gate {' and '.join(self.gates)} is removed{message}"

    @property
    def is_gated_by_kueue(self) -> bool:
        """Whether Kueue holds the pod back until its queue has quota."""
        return any(gate.startswith(KUEUE_PREFIX) for gate in self.gates)

    @property
    def alive(self) -> bool:
        """Whether the pod has not terminated and is not being deleted."""
        return not self.deleting and self.phase in ("Pending", "Running")


@dataclass(frozen=True, slots=True)
class ServicePods:
    """The pods of a service, as they were observed in one pass."""

    server_pods: tuple[PodState, ...] = ()
    """The pods that serve: those of the Deployment, and the leaders of groups; sorted by name."""
    job: Body | None = None
    """The Job that downloads the model of the spec."""
    job_pods: tuple[PodState, ...] = ()
    """The pods of `job`, sorted by name."""
    claim: Body | None = None
    """The PersistentVolumeClaim that stores the model. `job` was selected for this claim."""
    job_warning: str = ""
    """Latest warning about `job`, if it has no pod. Empty if there is none."""
    worker_pods: tuple[PodState, ...] = ()
    """The pods of groups that do not serve, sorted by name."""


@dataclass(frozen=True, slots=True)
class ObservedState:
    """Everything that was observed about a service in one pass."""

    workload: Body | None = None
    """Deployment or LeaderWorkerSet of the service. It comes from the response to the apply in this pass, or from a
    later event. An older version must not be used. Otherwise, the status could report a rollout as complete before the
    rollout has started.
    """
    replaced_workload: Body | None = None
    """The workload of the other kind, if `workload` replaces it."""
    pods: tuple[PodState, ...] = ()
    """The server pods of the service."""
    worker_pods: tuple[PodState, ...] = ()
    """The pods of groups that do not serve."""
    catalog: AdapterCatalog | None = None
    """The adapters that the pods should have. None: those of the spec."""
    job: Body | None = None
    """The Job that downloads the model of the spec."""
    job_pods: tuple[PodState, ...] = ()
    """The pods of the download Job."""
    job_warning: str = ""
    """Latest warning about the download Job, if it has no pod. Empty if there is none."""
    claim: Body | None = None
    """PersistentVolumeClaim with the model."""
    autoscaler: Body | None = None
    """HorizontalPodAutoscaler or ScaledObject of the service."""
    inference_pool: Body | None = None
    http_route: Body | None = None
    applied_generation: int = 0
    """The last generation of which all objects were applied. If it is less than the generation of the spec, some
    objects are not applied yet.
    """
    unavailable_kinds: tuple[str, ...] = ()
    """Kinds that the spec requests, but that the API server does not serve."""
    unknown_fields: tuple[str, ...] = ()
    """Fields of the spec, or of the workload, that the API server does not know."""
    outdated_image: str = ""
    """The image in spec.runtime.image, if it is older than the operator. Otherwise empty."""
    apply_error: str = ""
    """The errors of objects that the API server rejected. Empty if there are none."""
    conflict: str = ""
    """Message about an existing object that has the same name as a manifest, but another owner. Empty if there is
    none.
    """
    pending_deletions: tuple[str, ...] = ()
    """Messages about objects that must first be deleted completely, before their manifests can be applied."""
    stuck_deletions: tuple[str, ...] = ()
    """Those of `pending_deletions` whose objects wait for finalizers."""
    claim_rejection: str = ""
    """Answer of the API server if the claim cannot grow. Empty if it can, or need not."""


@dataclass(frozen=True, slots=True)
class PlanningResult:
    """Result of planning. At most one of `spec_error`, `unplannable` and `waiting_for` is set. If one of them is set,
    `plan` is the previous valid plan, which stays deployed.
    """

    plan: Plan | None = None
    spec_error: str = ""
    """Reasons why the spec is invalid, with one line for each problem. Empty if the spec is valid."""
    unplannable: Unplannable | None = None
    waiting_for: str = ""
    """Text that describes what planning is waiting for. Empty if planning is not waiting."""
    read_error: DownloadReason | None = None
    """Reason why the model could not be read. None if it was read, or if nothing tried to read it."""
    note: str = ""
    """Text about nodes for which `plan` would be another one, if it were not kept. Empty if there are none."""
    needs_backoff: bool = False
    """True if no event reports when the wait is over. Planning must then be repeated, with delays that grow."""


def parse_pod(body: Body) -> PodState:
    """Convert a pod."""
    meta, spec, state = body["metadata"], body.get("spec", {}), body.get("status", {})
    conditions = {c["type"]: c for c in state.get("conditions", ())}
    containers = spec.get("containers", ())
    # A sidecar can be the first container, for example the proxy of a mesh.
    main_container: Mapping[str, Any] = next(
        (c for c in containers if c["name"] in _MAIN_CONTAINERS), next(iter(containers), {})
    )
    main = main_container.get("name", object_names.SERVER)
    main_state: Mapping[str, Any] = next((c for c in state.get("containerStatuses", ()) if c["name"] == main), {})
    ports = {p.get("name"): p["containerPort"] for c in containers for p in c.get("ports", ())}
    labels: Mapping[str, str] = meta.get("labels", {})
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
        template_hash=labels.get(object_names.TEMPLATE_LABEL) or labels.get(TEMPLATE_HASH, ""),
        ready_at=conditions.get("Ready", {}).get("lastTransitionTime") or "",
        ends_at=meta.get("deletionTimestamp") or "",
        node=spec.get("nodeName") or "",
        group=_to_index(labels.get(object_names.LWS_GROUP)),
        group_set=labels.get(object_names.LWS_NAME, ""),
        rank=_to_index(labels.get(object_names.LWS_WORKER)) or 0,
        role=labels.get(object_names.ROLE_LABEL),
        health_port=ports.get(HEALTH_PORT),
        image=main_container.get("image", ""),
        created_at=meta.get("creationTimestamp", ""),
        unschedulable=scheduled.get("message", "") if unschedulable else "",
        gates=tuple(gate["name"] for gate in spec.get("schedulingGates") or ()),
        failure=": ".join(filter(None, (state.get("reason", ""), state.get("message", ""))))
        if state.get("phase") == "Failed"
        else "",
        failed_at=max((c.get("lastTransitionTime") or "" for c in conditions.values()), default=""),
        waiting=next(_waiting_messages(state), ""),
        creating="deletionTimestamp" not in meta and (_is_creating(state) or _is_unprocessed(spec, state)),
        terminated=next(_terminated_containers(state), None),
        download_folders=tuple(_download_folders(spec)),
        downloading=any(
            c["name"] == model_storage.DOWNLOAD_CONTAINER and c.get("state", {}).get("running")
            for c in _container_statuses(state)
        ),
    )


def _to_index(label: str | None) -> int | None:
    return int(label) if label is not None and label.isdecimal() else None


def _download_folders(spec: Mapping[str, Any]) -> Iterator[str]:
    for container in spec.get("initContainers") or ():
        if container["name"] == model_storage.DOWNLOAD_CONTAINER:
            yield from (a.removeprefix("--into=") for a in container.get("args") or () if a.startswith("--into="))


_CREATING_REASONS = ("ContainerCreating", "PodInitializing")
"""Reasons that the kubelet reports for a container that waits for volumes, for the network or for an earlier
container.
"""


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


def _is_unprocessed(spec: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether the scheduler has not looked at a pod. It ignores pods whose resource claims do not exist."""
    is_scheduled = any(condition["type"] == "PodScheduled" for condition in state.get("conditions") or ())
    return state.get("phase", "Pending") == "Pending" and not is_scheduled and not spec.get("schedulingGates")


def _terminated_containers(state: Mapping[str, Any]) -> Iterator[TerminatedContainer]:
    """Return an iterator over the terminations of containers. Failed containers come first."""
    terminated = [
        TerminatedContainer(c["name"], end.get("exitCode", 0), end.get("reason", ""), end.get("message", ""))
        for c in _container_statuses(state)
        for end in (c.get("state", {}).get("terminated"), c.get("lastState", {}).get("terminated"))
        if end
    ]
    return iter(sorted(terminated, key=lambda end: end.exit_code == 0))
