# SPDX-License-Identifier: Apache-2.0
"""The conditions Available and Progressing, which are evaluated from the workload and its pods. Pure. Called by
status.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from quire_operator.controller.status.conditions import Condition, ConditionType, Reason
from quire_operator.controller.status.groups import Group, crash_loop, groups_of, incomplete, lost_node, rank_loop
from quire_operator.controller.status.model_cache import describe_access
from quire_operator.controller.status.observed_state import ObservedState, PodState
from quire_operator.render import object_names
from quire_spec.constants import CONFIG_FILE

_REPLACEMENT_S = 60.0
_MAX_POD_MESSAGE = 400
"""Maximum number of characters in the message about one pod."""
_OMIT_MESSAGE_REASONS = ("CrashLoopBackOff",)
"""If one of these is the reason why a container is waiting, the kubelet's message is omitted. The message contains a
duration that changes, but it does not contain the cause.
"""
_GATED_REASONS = (Reason.WAITING_FOR_QUOTA, Reason.SCHEDULING_GATED)
_VAGUE_REASONS = (Reason.UPDATING, Reason.PODS_NOT_READY, Reason.PODS_STARTING)
"""If the rollout has one of these reasons and the API server rejects pods, the rejection is reported instead."""
_ACCESS_PROBLEMS = ("pod affinity rules", "Multi-Attach", "ReadWriteOncePod")
"""Parts of messages of the scheduler and of the volume controller, if a pod cannot mount a claim because of its access
mode.
"""
OLD_SUPERVISOR_ERROR = "the following arguments are required: --served-name"
"""Part of what a supervisor before pod.json prints if a pod of this release starts it."""

_MAX_DEGRADED = 3
"""Maximum number of pods whose missing cores a message contains."""


@dataclass(frozen=True, slots=True)
class PodProblem:
    """The reason why a pod is not ready."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class RolloutState:
    """How far the rollout of one generation of the service has progressed."""

    desired_replicas: int
    """Number of desired pods."""
    is_complete: bool
    """True if all desired pods have this generation and are ready, and if there are no other pods."""
    reason: Reason
    """Reason why the rollout is not complete. If it is complete, this is RolloutComplete."""
    message: str
    in_progress: bool
    """True if the rollout can still complete without any change by a user."""

    def progressing_condition(self) -> Condition:
        """Return the condition Progressing."""
        return Condition(
            ConditionType.PROGRESSING, self.in_progress and not self.is_complete, self.reason, self.message
        )


def ready_pods(observed: ObservedState) -> tuple[PodState, ...]:
    """Return the pods that are ready according to the kubelet.

    If a pod's own status is known, the pod must also be ready according to this status.
    """
    return tuple(pod for pod in observed.pods if is_ready(pod))


def available_condition(observed: ObservedState, desired_replicas: int | None) -> Condition:
    """Return the condition Available, which is True if pods of any generation can serve. If the spec is invalid,
    `desired_replicas` is None.
    """
    ready = ready_pods(observed)
    if ready:
        desired_text = f" of {desired_replicas}" if desired_replicas is not None else ""
        noun = "pods" if group_size(observed.workload) is None else "groups"
        degraded = [f"; {pod.name}: {pod.report.degraded}" for pod in ready if pod.report and pod.report.degraded]
        message = f"{len(ready)}{desired_text} {noun} serve{''.join(degraded[:_MAX_DEGRADED])}"
        return Condition(ConditionType.AVAILABLE, True, Reason.MINIMUM_REPLICAS, message)
    if desired_replicas == 0:
        return Condition(ConditionType.AVAILABLE, False, Reason.SCALED_TO_ZERO, "spec.replicas is 0")
    return Condition(ConditionType.AVAILABLE, False, Reason.NO_READY_PODS, "no pod is ready")


def evaluate_rollout(
    observed: ObservedState,
    generation: int,
    desired_replicas: int,
    gpu_resource: str | None,
    now: datetime,
    history: Sequence[Mapping[str, Any]] = (),
) -> RolloutState:
    """Evaluate the rollout of `generation`.

    `gpu_resource` is the resource name of the GPUs that the pods use. On a CPU, it is None. `history` contains the
    entries of groups.update_history.
    """
    workload = observed.workload
    if observed.applied_generation != generation or workload is None:
        message = "; ".join(["the objects of this generation are being applied", *observed.pending_deletions])
        return RolloutState(desired_replicas, False, Reason.UPDATING, message, True)
    counts = _ReplicaCounts.of(workload, observed)
    is_replaced = observed.replaced_workload is None
    if is_replaced and counts.is_complete(desired_replicas) and _pods_agree(observed, desired_replicas):
        message = f"{desired_replicas} of {desired_replicas} {counts.noun} have this generation and are ready"
        return RolloutState(desired_replicas, True, Reason.ROLLOUT_COMPLETE, message, False)
    reason, message = _blocking_reason(observed, counts, desired_replicas, gpu_resource, now, history)
    if reason in _GATED_REASONS:
        # Queueing takes as long as it takes, so no deadline applies.
        return RolloutState(desired_replicas, False, reason, message, True)
    conditions = {c["type"]: c for c in workload.get("status", {}).get("conditions") or ()}
    if counts.is_current and conditions.get("Progressing", {}).get("reason") == "ProgressDeadlineExceeded":
        seconds = workload["spec"].get("progressDeadlineSeconds")
        deadline_message = f"no progress for {seconds} s (spec.rollout.progressDeadlineSeconds): {message}"
        return RolloutState(desired_replicas, False, Reason.DEADLINE_EXCEEDED, deadline_message, False)
    failure = conditions.get("ReplicaFailure", {})
    if counts.is_current and failure.get("status") == "True" and reason in _VAGUE_REASONS:
        return RolloutState(
            desired_replicas,
            False,
            Reason.PODS_REFUSED,
            f"{_describe_progress(observed, counts, desired_replicas)}; {_format_condition(failure)}",
            True,
        )
    return RolloutState(desired_replicas, False, reason, message, True)


def diagnose_pod(pod: PodState, gpu_resource: str | None) -> PodProblem | None:
    """Return the problem of a pod that is not ready. If the pod is starting as expected, return None."""
    if pod.gated:
        return PodProblem(Reason.WAITING_FOR_QUOTA if pod.is_gated_by_kueue else Reason.SCHEDULING_GATED, pod.gated)
    if pod.phase == "Failed":
        return PodProblem(Reason.PODS_NOT_READY, f"the pod has failed: {pod.failure or _describe_end(pod)}")
    if pod.unschedulable:
        is_gpu_shortage = gpu_resource is not None and f"Insufficient {gpu_resource}" in pod.unschedulable
        return PodProblem(Reason.INSUFFICIENT_GPU if is_gpu_shortage else Reason.UNSCHEDULABLE, pod.unschedulable)
    terminated = pod.terminated if pod.terminated and pod.terminated.exit_code else None
    if pod.waiting:
        waiting = pod.waiting.partition(":")[0] if pod.waiting.startswith(_OMIT_MESSAGE_REASONS) else pod.waiting
        return PodProblem(Reason.PODS_NOT_READY, f"{waiting}; {_describe_termination(pod)}" if terminated else waiting)
    if terminated and not pod.started_at:
        return PodProblem(Reason.PODS_NOT_READY, _describe_termination(pod))
    if pod.report and pod.report.reason:
        restart_text = f" again after {_describe_termination(pod)}" if terminated else ""
        return PodProblem(Reason.PODS_NOT_READY, pod.report.reason + restart_text)
    if terminated:
        return PodProblem(Reason.PODS_NOT_READY, f"starting again after {_describe_termination(pod)}")
    return None


@dataclass(frozen=True, slots=True)
class _ReplicaCounts:
    """The numbers of replicas of a workload: pods of a Deployment, or groups of a LeaderWorkerSet."""

    is_current: bool
    """True if the numbers are those of the newest generation of the workload."""
    desired: int
    replicas: int
    updated: int
    ready: int
    available: int
    noun: str = "pods"

    @classmethod
    def of(cls, workload: Mapping[str, Any], observed: ObservedState) -> "_ReplicaCounts":
        size = group_size(workload)
        return cls.from_deployment(workload) if size is None else cls.from_groups(workload, size, observed)

    @classmethod
    def from_groups(cls, workload: Mapping[str, Any], size: int, observed: ObservedState) -> "_ReplicaCounts":
        groups = groups_of((*observed.pods, *observed.worker_pods), size)
        alive = [group for group in groups if group.is_alive]
        updated = [group for group in newest_groups(observed, size) if group.is_alive]
        ready = sum(group.is_ready for group in alive)
        return cls(True, workload["spec"].get("replicas", 1), len(alive), len(updated), ready, ready, "groups")

    @classmethod
    def from_deployment(cls, deployment: Mapping[str, Any]) -> "_ReplicaCounts":
        status = deployment.get("status") or {}
        is_current = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
        names = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
        replicas, updated, ready, available = (status.get(name) or 0 for name in names)
        return cls(is_current, deployment["spec"].get("replicas", 1), replicas, updated, ready, available)

    def is_complete(self, desired: int) -> bool:
        return self.is_current and {self.desired, self.replicas, self.updated, self.ready, self.available} == {desired}


def count_replicas(observed: ObservedState) -> tuple[int, int]:
    """Return the number of replicas that exist, and of those that have the newest template. If the workload does not
    tell the second number yet, it is 0."""
    workload, replaced = observed.workload, observed.replaced_workload
    counts = None if workload is None else _ReplicaCounts.of(workload, observed)
    old = 0 if replaced is None else _ReplicaCounts.of(replaced, observed).replicas
    if counts is None:
        return old, 0
    return counts.replicas + old, counts.updated if counts.is_current else 0


def _pods_agree(observed: ObservedState, desired_replicas: int) -> bool:
    """Whether the pods confirm that the rollout is complete. This is checked because events of pods and events of
    Deployments come from different watches and can arrive in any order.
    """
    hashes = {pod.template_hash for pod in observed.pods if pod.alive}
    alive = sum(pod.alive for pod in observed.pods)
    return alive == desired_replicas == len(ready_pods(observed)) and len(hashes) <= 1


def newest_groups(observed: ObservedState, size: int) -> list[Group]:
    """Return the groups of a LeaderWorkerSet whose leaders have its newest template."""
    assert observed.workload is not None, "the set exists"
    labels = observed.workload["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["labels"]
    newest = labels.get(object_names.TEMPLATE_LABEL)
    groups = groups_of((*observed.pods, *observed.worker_pods), size)
    return [group for group in groups if group.leader and group.leader.template_hash == newest]


def group_size(workload: Mapping[str, Any] | None) -> int | None:
    """Return the number of pods of a group of a LeaderWorkerSet, or of the roles of a DisaggregatedSet. None for a
    Deployment, for roles whose replicas are single pods, or no workload."""
    spec = (workload or {}).get("spec") or {}
    if roles := spec.get("roles"):
        size = max(role["spec"]["leaderWorkerTemplate"].get("size", 1) for role in roles)
        return None if size == 1 else int(size)
    group = spec.get("leaderWorkerTemplate")
    return None if group is None else int(group.get("size", 1))


def _group_problem(
    observed: ObservedState, now: datetime, history: Sequence[Mapping[str, Any]]
) -> tuple[Reason, str] | None:
    """Return what only the pods of a group together show."""
    size = group_size(observed.workload)
    if size is None:
        return None
    groups = groups_of((*observed.pods, *observed.worker_pods), size)
    if message := next(filter(None, (lost_node(group, now) for group in groups)), ""):
        return Reason.GROUP_NODE_LOST, message
    if any(pod.gates for group in groups for pod in group.pods):
        return None  # Kueue admits all pods of a group together.
    if message := next(filter(None, (incomplete(group, now) for group in groups)), ""):
        return Reason.GANG_INCOMPLETE, message
    message = crash_loop(history) or next(filter(None, map(rank_loop, groups)), "")
    return (Reason.GROUP_CRASH_LOOPING, message) if message else None


def _blocking_reason(
    observed: ObservedState,
    counts: _ReplicaCounts,
    desired_replicas: int,
    gpu_resource: str | None,
    now: datetime,
    history: Sequence[Mapping[str, Any]],
) -> tuple[Reason, str]:
    """Return the reason and the message of a rollout that is not complete.

    Pods that cannot be scheduled come first. Other problems of pods come after them.
    """
    progress = _describe_progress(observed, counts, desired_replicas)
    if (group_problem := _group_problem(observed, now, history)) is not None:
        return group_problem[0], f"{progress}; {group_problem[1]}"
    problems = [
        (pod.name, cause)
        for pod in sorted((*observed.pods, *observed.worker_pods), key=lambda pod: pod.name)
        if pod.alive and not is_ready(pod) and (cause := diagnose_pod(pod, gpu_resource))
    ] or [(pod.name, cause) for pod in _newly_failed_pods(observed) if (cause := diagnose_pod(pod, gpu_resource))]
    order = (*_GATED_REASONS, Reason.INSUFFICIENT_GPU, Reason.UNSCHEDULABLE, Reason.PODS_NOT_READY)
    if problems:
        name, cause = min(problems, key=lambda item: order.index(item[1].reason))
        message = cause.message if len(cause.message) <= _MAX_POD_MESSAGE else cause.message[:_MAX_POD_MESSAGE] + "…"
        more_text = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        access_text = describe_access(observed.claim) if any(w in message for w in _ACCESS_PROBLEMS) else ""
        return cause.reason, "; ".join(filter(None, (progress, f"pod {name}: {message}{more_text}", access_text)))
    is_replaced = observed.replaced_workload is None
    if is_replaced and counts.is_current and counts.updated >= desired_replicas == counts.replicas:
        if counts.available < counts.ready == desired_replicas:
            return Reason.UPDATING, f"{progress}; they must stay ready for spec.rollout.minReadySeconds"
        return Reason.PODS_STARTING, f"{progress}; the others are starting"
    return Reason.UPDATING, progress


def _newly_failed_pods(observed: ObservedState) -> list[PodState]:
    """Return the pods that were rejected or evicted since the pods that are not ready were created, the newest first.

    The kubelet or a controller ended them as a whole. Their objects stay, and other pods replace them.
    """
    starting = [pod.created_at for pod in observed.pods if pod.alive and not is_ready(pod)]
    failed = [pod for pod in observed.pods if pod.phase == "Failed" and not pod.deleting]
    newest = sorted(failed, key=lambda pod: (pod.failed_at, pod.name), reverse=True)
    if starting:
        # The replacement of a pod is created within seconds after the pod has failed.
        since = datetime.fromisoformat(min(starting)) - timedelta(seconds=_REPLACEMENT_S)
        return [pod for pod in newest if pod.failed_at and datetime.fromisoformat(pod.failed_at) >= since]
    return newest


def _describe_end(pod: PodState) -> str:
    return _describe_termination(pod) if pod.terminated else "no reason given"


def _describe_progress(observed: ObservedState, counts: _ReplicaCounts, desired_replicas: int) -> str:
    updated = counts.updated if counts.is_current else 0
    # The pods' own reports are newer than the status of the Deployment.
    num_ready = min(counts.ready, len(ready_pods(observed)))
    old_text = f", {counts.replicas - updated} have an older one" if counts.replicas > updated else ""
    if (replaced := observed.replaced_workload) is not None:
        kind, count = replaced["kind"], replaced["spec"].get("replicas", 1)
        old_text += f"; the {kind} that is being replaced has {count}"
    return f"{updated} of {desired_replicas} {counts.noun} have this generation, {num_ready} are ready{old_text}"


def is_ready(pod: PodState) -> bool:
    return pod.ready and pod.alive and (pod.report is None or pod.report.ready)


def _describe_termination(pod: PodState) -> str:
    assert pod.terminated is not None
    lines = [line for line in pod.terminated.message.strip().splitlines() if line.strip()]
    last = f": {lines[-1].strip()}" if lines else ""
    restarts_text = f", {pod.restarts} restarts" if pod.restarts else ""
    if OLD_SUPERVISOR_ERROR in pod.terminated.message:
        last = (
            f": image {pod.image} is older than the operator and cannot read {CONFIG_FILE}; set spec.runtime.image to "
            "an image of the operator's release, or remove it"
        )
    return (
        f"{pod.terminated.container} ended with {pod.terminated.reason or 'Error'} (exit code "
        f"{pod.terminated.exit_code}{restarts_text}){last}"
    )


def _format_condition(condition: Mapping[str, Any]) -> str:
    return ": ".join(part for part in (condition.get("reason", ""), condition.get("message", "")) if part)
