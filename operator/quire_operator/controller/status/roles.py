# SPDX-License-Identifier: Apache-2.0
"""The rollout of a DisaggregatedSet, whose pods have roles. Pure. Called by status.py.

Each role is evaluated as a Deployment would be, from the numbers that the set reports for it and from its pods. A
rollout is complete if it is complete in both roles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from quire_operator.api.disaggregation_spec import Role
from quire_operator.api.llmservice import Device, LLMService
from quire_operator.controller.status.conditions import Condition, ConditionType, Reason
from quire_operator.controller.status.groups import groups_of, update_history
from quire_operator.controller.status.observed_state import Body, ObservedState, PodState
from quire_operator.controller.status.rollout import (
    RolloutState,
    count_replicas,
    evaluate_rollout,
    group_size,
    newest_groups,
    ready_pods,
)
from quire_operator.plan.gpu import GPU_RESOURCE
from quire_operator.render import disaggregated_set, object_names
from quire_operator.render.disaggregated_set import RoleTemplates

SCALED_TO_ZERO = "replicas of both roles of spec.disaggregation are 0"
_MAX_HISTORY = 64


def of_role(observed: ObservedState, role: Role) -> ObservedState:
    """Return the state with only the pods of a role, and with the Deployment or LeaderWorkerSet that would make
    them."""
    pods, workers = (tuple(p for p in found if p.role == role) for found in (observed.pods, observed.worker_pods))
    workload = None if observed.workload is None else _as_workload(observed.workload, role, pods)
    return replace(observed, pods=pods, worker_pods=workers, workload=workload)


def evaluate_roles(
    service: LLMService,
    observed: ObservedState,
    generation: int,
    now: datetime,
    history: Sequence[Mapping[str, Any]] = (),
) -> RolloutState:
    """Evaluate the rollout of `generation`. Its reason is that of a role that is not complete; a role that cannot
    complete by itself comes first. `history` contains the entries of `groups_status`."""
    states = {}
    for own in map(service.for_role, service.roles):
        assert own.role is not None, "the service is the one of a role"
        gpu = None if own.spec.device is not Device.GPU else own.spec.gpu.resourceName if own.spec.gpu else GPU_RESOURCE
        state, of_own = of_role(observed, own.role), [entry for entry in history if entry.get("role") == own.role]
        states[own.role] = evaluate_rollout(state, generation, own.spec.replicas, gpu, now, of_own)
    first = min(states.values(), key=lambda state: (state.is_complete, state.in_progress))
    # Before the objects are applied, the messages of both roles are the same.
    messages = dict.fromkeys(state.message for state in states.values())
    message = first.message if len(messages) == 1 else "; ".join(f"{role}: {s.message}" for role, s in states.items())
    return RolloutState(service.num_replicas, first.is_complete, first.reason, message, first.in_progress)


def available_condition(service: LLMService, observed: ObservedState) -> Condition:
    """Return the condition Available. Pods of the role prefill do not serve clients, but pods of the role decode can
    also compute prompts."""
    ready = ready_pods(observed)
    if any(pod.role != Role.PREFILL for pod in ready):
        noun = "pods" if group_size(observed.workload) is None else "groups"
        counts = [
            f"{sum(pod.role == own.role for pod in ready)} of {own.spec.replicas} {own.role} {noun}"
            for own in service.pods
        ]
        message = f"{' and '.join(counts)} serve"
        return Condition(ConditionType.AVAILABLE, True, Reason.MINIMUM_REPLICAS, message)
    if service.num_replicas == 0:
        return Condition(ConditionType.AVAILABLE, False, Reason.SCALED_TO_ZERO, SCALED_TO_ZERO)
    return Condition(ConditionType.AVAILABLE, False, Reason.NO_READY_PODS, f"no pod of role {Role.DECODE} is ready")


def groups_status(
    service: LLMService, observed: ObservedState, previous: Mapping[str, Any], now: datetime
) -> dict[str, Any]:
    """Return status.groups. It is empty if the pods are not in groups."""
    size = group_size(observed.workload)
    if size is None:
        return {}
    before = (previous.get("groups") or {}).get("history") or ()
    if not service.roles:
        groups = groups_of((*observed.pods, *observed.worker_pods), size)
        history = update_history(before, groups, now)
    else:
        groups, history = [], []
        for role in service.roles:
            own = newest_groups(of_role(observed, role), size)
            entries = update_history([entry for entry in before if entry.get("role") == role], own, now)
            history += [{**entry, "role": role.value} for entry in entries]
            groups += own
    ready = sum(group.is_alive and group.is_ready for group in groups)
    fields = {"size": size, "wanted": service.num_replicas, "ready": ready}
    return fields | ({"history": history[:_MAX_HISTORY]} if history else {})


def role_statuses(observed: ObservedState, is_current: bool) -> list[dict[str, Any]]:
    """Return status.roles. It is empty if the pods have no roles. `is_current` is True if the objects of the newest
    generation were applied."""
    if observed.workload is None or observed.workload.get("kind") != disaggregated_set.KIND:
        return []
    return [_role_status(observed, role, is_current) for role in Role]


def _role_status(observed: ObservedState, role: Role, is_current: bool) -> dict[str, Any]:
    own = of_role(observed, role)
    assert own.workload is not None, "the set exists"
    spec, status = own.workload["spec"], own.workload["status"]
    is_observed = is_current and status["observedGeneration"] >= own.workload["metadata"].get("generation", 0)
    existing, updated = status["replicas"], status["updatedReplicas"] if is_observed else 0
    if group_size(own.workload) is not None:
        existing, updated = count_replicas(own)
    return {
        "name": role.value,
        "desiredReplicas": spec["replicas"],
        "replicas": existing,
        "readyReplicas": len(ready_pods(own)),
        "updatedReplicas": updated if is_current else 0,
    }


def _as_workload(workload: Body, role: Role, pods: Sequence[PodState]) -> Body:
    """Return the part of a DisaggregatedSet that makes the pods of a role, in the form of a Deployment, or of a
    LeaderWorkerSet if they are in groups. The set does not report which pods are available, so those that are ready
    count."""
    (entry,) = (entry for entry in workload["spec"]["roles"] if entry["name"] == role)
    status: Mapping[str, Any] = workload.get("status") or {}
    counts: Mapping[str, Any] = next((each for each in status.get("roleStatuses") or () if each["name"] == role), {})
    templates = RoleTemplates.from_set(workload, role)
    template = templates.leader
    own = {"template": template}
    if templates.worker is not None:
        own = {"leaderWorkerTemplate": entry["spec"]["leaderWorkerTemplate"]}
    label = template["metadata"]["labels"].get(object_names.TEMPLATE_LABEL)
    # The status can be newer than the pods that were observed.
    seen = sum(pod.alive and pod.template_hash == label for pod in pods)
    ready = counts.get("readyReplicas") or 0
    return {
        "kind": workload["kind"],
        "metadata": workload["metadata"],
        "spec": {"replicas": entry["spec"].get("replicas", 1), **own},
        "status": {
            "observedGeneration": status.get("observedGeneration", 0),
            "replicas": counts.get("replicas") or 0,
            "updatedReplicas": min(counts.get("updatedReplicas") or 0, seen),
            "readyReplicas": ready,
            "availableReplicas": ready,
        },
    }
