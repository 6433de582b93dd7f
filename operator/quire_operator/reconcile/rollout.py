# SPDX-License-Identifier: Apache-2.0
"""Available and Progressing: who serves, by the Deployment and the pods, and what holds up the others. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_operator.reconcile.conditions import Condition, Reason, Type
from quire_operator.reconcile.observed import Observed, Pod

_MAX_MAIN_CAUSE = 400
"""Characters of one pod's words."""
_STEADY = ("CrashLoopBackOff",)
"""Waiting for the next try: its message holds a duration that changes by itself, and not the cause."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What holds up a pod."""

    reason: Reason
    words: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """Where the Deployment is, for one generation of the service."""

    wanted: int
    """Pods that there should be."""
    complete: bool
    """Every wanted pod is of this generation and ready, and there is no other."""
    reason: Reason
    """Why it is not complete, or RolloutComplete."""
    message: str
    moving: bool
    """Something may still come of it by itself."""

    def progressing(self) -> Condition:
        """The condition Progressing."""
        return Condition(Type.PROGRESSING, self.moving and not self.complete, self.reason, self.message)


def ready_pods(observed: Observed) -> tuple[Pod, ...]:
    """Pods that clients are sent to and that serve them: by the kubelet, and by their own word where there is one."""
    return tuple(pod for pod in observed.pods if _ready(pod))


def available(observed: Observed, wanted: int | None) -> Condition:
    """The condition Available: somebody serves, whatever generation. `wanted` None: the spec cannot be read."""
    num_ready = len(ready_pods(observed))
    if num_ready:
        of = f" of {wanted}" if wanted is not None else ""
        return Condition(Type.AVAILABLE, True, Reason.MINIMUM_REPLICAS, f"{num_ready}{of} pods serve")
    if wanted == 0:
        return Condition(Type.AVAILABLE, False, Reason.SCALED_TO_ZERO, "spec.replicas is 0")
    return Condition(Type.AVAILABLE, False, Reason.NO_READY_PODS, "no pod is ready")


def rollout(observed: Observed, generation: int, wanted: int, gpu_resource: str | None) -> Rollout:
    """Where the rollout of `generation` is; `gpu_resource` is what the pods ask GPUs by, None on CPUs."""
    deployment = observed.deployment
    if observed.applied != generation or deployment is None:
        waits = f"; {observed.going}" if observed.going else ""
        message = f"the objects of this generation are being applied{waits}"
        return Rollout(wanted, False, Reason.UPDATING, message, True)
    numbers = _Numbers.of(deployment)
    if numbers.complete(wanted) and _agrees(observed, wanted):
        message = f"{wanted} of {wanted} pods are of this generation and ready"
        return Rollout(wanted, True, Reason.ROLLOUT_COMPLETE, message, False)
    reason, message = _held_up(observed, numbers, wanted, gpu_resource)
    conditions = {c["type"]: c for c in deployment.get("status", {}).get("conditions") or ()}
    if numbers.seen and conditions.get("Progressing", {}).get("reason") == "ProgressDeadlineExceeded":
        seconds = deployment["spec"].get("progressDeadlineSeconds")
        text = f"nothing has come of it for {seconds} s (spec.rollout.progressDeadlineSeconds): {message}"
        return Rollout(wanted, False, Reason.DEADLINE_EXCEEDED, text, False)
    failure = conditions.get("ReplicaFailure", {})
    if numbers.seen and failure.get("status") == "True" and reason in (Reason.UPDATING, Reason.PODS_NOT_READY):
        return Rollout(wanted, False, Reason.PODS_REFUSED, f"{_progress(numbers, wanted)}; {_words(failure)}", True)
    return Rollout(wanted, False, reason, message, True)


def trouble(pod: Pod, gpu_resource: str | None) -> Trouble | None:
    """What holds up a pod that is not ready; None for one that is just starting."""
    if pod.unschedulable:
        scarce = gpu_resource is not None and f"Insufficient {gpu_resource}" in pod.unschedulable
        return Trouble(Reason.INSUFFICIENT_GPU if scarce else Reason.UNSCHEDULABLE, pod.unschedulable)
    ended = pod.ended if pod.ended and pod.ended.exit_code else None
    if pod.waiting:
        words = pod.waiting.partition(":")[0] if pod.waiting.startswith(_STEADY) else pod.waiting
        return Trouble(Reason.PODS_NOT_READY, f"{words}; {_end(pod)}" if ended else words)
    if ended and not pod.started_at:
        return Trouble(Reason.PODS_NOT_READY, _end(pod))
    if pod.report and pod.report.reason:
        again = f" again after {_end(pod)}" if ended else ""
        return Trouble(Reason.PODS_NOT_READY, pod.report.reason + again)
    if ended:
        return Trouble(Reason.PODS_NOT_READY, f"starting again after {_end(pod)}")
    if pod.phase == "Failed":
        return Trouble(Reason.PODS_NOT_READY, "the pod has failed")
    return None


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Of a Deployment's status."""

    seen: bool
    """The status is of the Deployment's newest generation."""
    wanted: int
    replicas: int
    updated: int
    ready: int
    available: int

    @classmethod
    def of(cls, deployment: Mapping[str, Any]) -> "_Numbers":
        status = deployment.get("status") or {}
        seen = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
        return cls(
            seen,
            deployment["spec"].get("replicas", 1),
            *(status.get(name) or 0 for name in ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")),
        )

    def complete(self, wanted: int) -> bool:
        return self.seen and {self.wanted, self.replicas, self.updated, self.ready, self.available} == {wanted}


def _agrees(observed: Observed, wanted: int) -> bool:
    """The pods themselves say the same: their events and the Deployment's come in no order."""
    hashes = {pod.template_hash for pod in observed.pods if pod.alive}
    alive = sum(pod.alive for pod in observed.pods)
    return alive == wanted == len(ready_pods(observed)) and len(hashes) <= 1


def _held_up(observed: Observed, numbers: _Numbers, wanted: int, gpu_resource: str | None) -> tuple[Reason, str]:
    """What the rollout waits for: the scheduler before the pods' own words before plain waiting."""
    found = [
        (pod.name, cause)
        for pod in sorted(observed.pods, key=lambda pod: pod.name)
        if pod.alive and not _ready(pod) and (cause := trouble(pod, gpu_resource))
    ]
    order = (Reason.INSUFFICIENT_GPU, Reason.UNSCHEDULABLE, Reason.PODS_NOT_READY)
    progress = _progress(numbers, wanted)
    if found:
        name, cause = min(found, key=lambda item: order.index(item[1].reason))
        words = cause.words if len(cause.words) <= _MAX_MAIN_CAUSE else cause.words[:_MAX_MAIN_CAUSE] + "…"
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return cause.reason, f"{progress}; pod {name}: {words}{more}"
    if numbers.seen and numbers.updated >= wanted == numbers.replicas:
        return Reason.PODS_NOT_READY, f"{progress}; the others are starting"
    return Reason.UPDATING, progress


def _progress(numbers: _Numbers, wanted: int) -> str:
    updated = numbers.updated if numbers.seen else 0
    old = f", {numbers.replicas - updated} are of one before" if numbers.replicas > updated else ""
    return f"{updated} of {wanted} pods are of this generation, {numbers.ready} are ready{old}"


def _ready(pod: Pod) -> bool:
    return pod.ready and pod.alive and (pod.report is None or pod.report.ready)


def _end(pod: Pod) -> str:
    assert pod.ended is not None
    lines = [line for line in pod.ended.message.strip().splitlines() if line.strip()]
    last = f": {lines[-1].strip()}" if lines else ""
    times = f", {pod.restarts} restarts" if pod.restarts else ""
    return (
        f"{pod.ended.container} ended with {pod.ended.reason or 'Error'} (exit code {pod.ended.exit_code}{times}){last}"
    )


def _words(condition: Mapping[str, Any]) -> str:
    return ": ".join(part for part in (condition.get("reason", ""), condition.get("message", "")) if part)
