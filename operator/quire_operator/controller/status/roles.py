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
from quire_operator.controller.status.observed_state import Body, ObservedState, PodState
from quire_operator.controller.status.rollout import RolloutState, evaluate_rollout, ready_pods
from quire_operator.plan.gpu import GPU_RESOURCE
from quire_operator.render import disaggregated_set, object_names

SCALED_TO_ZERO = "replicas of both roles of spec.disaggregation are 0"


def of_role(observed: ObservedState, role: Role) -> ObservedState:
    """Return the state with only the pods of a role, and with the Deployment that would make them."""
    pods = tuple(pod for pod in observed.pods if pod.role == role)
    workload = observed.workload
    return replace(observed, pods=pods, workload=None if workload is None else _as_deployment(workload, role, pods))


def evaluate_roles(service: LLMService, observed: ObservedState, generation: int, now: datetime) -> RolloutState:
    """Evaluate the rollout of `generation`. Its reason is that of a role that is not complete; a role that cannot
    complete by itself comes first."""
    states = {}
    for own in map(service.for_role, service.roles):
        assert own.role is not None, "the service is the one of a role"
        gpu = None if own.spec.device is not Device.GPU else own.spec.gpu.resourceName if own.spec.gpu else GPU_RESOURCE
        states[own.role] = evaluate_rollout(of_role(observed, own.role), generation, own.spec.replicas, gpu, now)
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
        counts = [
            f"{sum(pod.role == own.role for pod in ready)} of {own.spec.replicas} {own.role} pods"
            for own in service.pods
        ]
        message = f"{' and '.join(counts)} serve"
        return Condition(ConditionType.AVAILABLE, True, Reason.MINIMUM_REPLICAS, message)
    if service.num_replicas == 0:
        return Condition(ConditionType.AVAILABLE, False, Reason.SCALED_TO_ZERO, SCALED_TO_ZERO)
    return Condition(ConditionType.AVAILABLE, False, Reason.NO_READY_PODS, f"no pod of role {Role.DECODE} is ready")


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
    return {
        "name": role.value,
        "desiredReplicas": spec["replicas"],
        "replicas": status["replicas"],
        "readyReplicas": len(ready_pods(own)),
        "updatedReplicas": status["updatedReplicas"] if is_observed else 0,
    }


def _as_deployment(workload: Body, role: Role, pods: Sequence[PodState]) -> Body:
    """Return the part of a DisaggregatedSet that makes the pods of a role, in the form of a Deployment. The set does
    not report which pods are available, so those that are ready count."""
    (entry,) = (entry for entry in workload["spec"]["roles"] if entry["name"] == role)
    status: Mapping[str, Any] = workload.get("status") or {}
    counts: Mapping[str, Any] = next((each for each in status.get("roleStatuses") or () if each["name"] == role), {})
    template = disaggregated_set.template_of(workload, role)
    label = template["metadata"]["labels"].get(object_names.TEMPLATE_LABEL)
    # The status can be newer than the pods that were observed.
    seen = sum(pod.alive and pod.template_hash == label for pod in pods)
    ready = counts.get("readyReplicas") or 0
    return {
        "kind": workload["kind"],
        "metadata": workload["metadata"],
        "spec": {"replicas": entry["spec"].get("replicas", 1), "template": template},
        "status": {
            "observedGeneration": status.get("observedGeneration", 0),
            "replicas": counts.get("replicas") or 0,
            "updatedReplicas": min(counts.get("updatedReplicas") or 0, seen),
            "readyReplicas": ready,
            "availableReplicas": ready,
        },
    }
