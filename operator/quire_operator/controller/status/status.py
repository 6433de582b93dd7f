# SPDX-License-Identifier: Apache-2.0
"""The complete .status of a service, which is built from the service's desired state and observed state.

The module is pure: the current time is an argument.

The condition Ready summarizes the other conditions. It is True only if every pod has this generation and all adapters.
Every pod must also be ready according to the kubelet and according to its own status.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from quire_operator.api.disaggregation_spec import Role
from quire_operator.api.llmservice import Device, LLMService
from quire_operator.controller.status import adapters, kv_layouts, model_cache, ownership, roles
from quire_operator.controller.status.autoscaling import autoscaling_condition
from quire_operator.controller.status.conditions import (
    Condition,
    ConditionType,
    Reason,
    format_timestamp,
    to_conditions,
)
from quire_operator.controller.status.observed_state import ObservedState, PlanningResult, PodState
from quire_operator.controller.status.rollout import (
    RolloutState,
    available_condition,
    count_replicas,
    evaluate_rollout,
    ready_pods,
)
from quire_operator.controller.status.routes import route_conditions
from quire_operator.controller.template_revision import workload_template
from quire_operator.plan.gpu import GPU_RESOURCE
from quire_operator.plan.plan import Plan
from quire_operator.render import object_names
from quire_operator.render.manifests import container_ports

_PRESERVED_FIELDS = (
    "servedName",
    "selector",
    "address",
    "endpoints",
    "plan",
    "cache",
    "adapters",
    "adaptersReady",
    "groups",
)
"""Fields of the status that keep their values while the spec is invalid."""


def build_status(
    service: LLMService | None,
    generation: int,
    planning: PlanningResult,
    observed: ObservedState,
    previous: Mapping[str, Any],
    now: datetime,
) -> dict[str, Any]:
    """Build the complete .status. The caller writes it if it differs from the previous .status.

    If the spec cannot be parsed, `service` is None and planning.spec_error contains the reason. Each timestamp changes
    only if the value that it belongs to changes. Therefore, the status of a service that does not change stays the
    same.
    """
    if service is None:
        evaluated = _evaluate_unreadable_spec(planning, observed, previous)
    else:
        evaluated = _evaluate_spec(service, generation, planning, observed, previous, now)
    is_current = observed.applied_generation == generation
    role_statuses = roles.role_statuses(observed, is_current)
    existing, updated = (
        (sum(each[name] for each in role_statuses) for name in ("replicas", "updatedReplicas"))
        if role_statuses
        else count_replicas(observed)
    )
    ready = ready_pods(observed)
    differences = kv_layouts.find_differences(observed.pods, kv_layouts.differences_of(previous))
    return {
        **evaluated.fields,
        # Only ownership.py changes the mark.
        **({ownership.FIELD: previous[ownership.FIELD]} if ownership.FIELD in previous else {}),
        "observedGeneration": generation,
        "conditions": to_conditions(evaluated.conditions, generation, previous, now),
        "replicas": existing,
        "readyReplicas": len(ready),
        "updatedReplicas": updated if is_current else 0,
        **({"roles": role_statuses} if role_statuses else {}),
        **({"kvTransfer": {"differences": differences}} if differences else {}),
        "models": adapters.common_model_names(ready),
        **_parsers(ready),
        **_model_signature(ready),
    }


def _model_signature(ready: Sequence[PodState]) -> dict[str, Any]:
    """Return the signature of the base model, if all ready pods report the same one."""
    signatures = {pod.report.model_signatures.get("model") if pod.report else None for pod in ready}
    signature = signatures.pop() if len(signatures) == 1 else None
    if signature is None or not _is_short(signature.signer, 63) or not _is_short(signature.digest, 71):
        return {}
    return {"modelSignature": {"signer": signature.signer, "digest": signature.digest}}


def _is_short(text: str | None, limit: int) -> bool:
    """Return whether a text fits in the CRD. A faulty pod must not prevent the operator from writing the status."""
    return text is not None and len(text) <= limit and text.isascii()


@dataclass(frozen=True, slots=True)
class _EvaluatedSpec:
    """The parts of the status that depend on whether the spec is valid."""

    conditions: list[Condition]
    fields: dict[str, Any]


def _evaluate_unreadable_spec(
    planning: PlanningResult, observed: ObservedState, previous: Mapping[str, Any]
) -> _EvaluatedSpec:
    """Evaluate an invalid spec. The objects of the previous spec are kept, and they continue to serve."""
    config = _config_valid(planning, observed)
    conditions = [config, available_condition(observed, None)]
    for kind in (ConditionType.PROGRESSING, ConditionType.READY):
        conditions.append(Condition(kind, False, config.reason, config.message))
    for kind in (ConditionType.PLANNED, ConditionType.MODEL_CACHED, ConditionType.ADAPTERS_READY):
        message = "unknown: the spec is invalid, see ConfigValid"
        conditions.append(Condition(kind, None, config.reason, message))
    return _EvaluatedSpec(conditions, {key: previous[key] for key in _PRESERVED_FIELDS if key in previous})


def _evaluate_spec(
    service: LLMService,
    generation: int,
    planning: PlanningResult,
    observed: ObservedState,
    previous: Mapping[str, Any],
    now: datetime,
) -> _EvaluatedSpec:
    spec = service.spec
    config, planned = _config_valid(planning, observed), _planned_condition(planning)
    cached_condition, cache = model_cache.evaluate_model_cache(service, planning, observed, previous, now)
    gpu_resource = spec.gpu.resourceName if spec.gpu else GPU_RESOURCE
    groups = roles.groups_status(service, observed, previous, now)
    history = groups.get("history") or ()
    if service.roles:
        rollout_state = roles.evaluate_roles(service, observed, generation, now, history)
        available = roles.available_condition(service, observed)
    else:
        rollout_state = evaluate_rollout(
            observed, generation, spec.replicas, gpu_resource if spec.device is Device.GPU else None, now, history
        )
        available = available_condition(observed, spec.replicas)
    adapters_state = adapters.evaluate_adapters(
        observed.catalog or service.build_catalog(), observed.pods, ready_pods(observed)
    )
    # If the model cannot be read, planning waits for it.
    blocker = _first_blocker(
        service, [config, cached_condition, planned] if planning.read_error else [config, planned, cached_condition]
    )
    progressing = _progressing_condition(blocker, rollout_state)
    plan = _plan_fields(planning.plan, observed, rollout_state, previous)
    if note := _describe_drift(plan):
        planned = Condition(planned.type, planned.is_true, planned.reason, f"{planned.message}; {note}")
    conditions = [
        config, planned, cached_condition, available, progressing,
        adapters_state.condition,
        _ready_condition(service, blocker, rollout_state, adapters_state.condition),
        *([autoscaling_condition(spec.autoscaling, observed.autoscaler)] if spec.autoscaling else []),
        *route_conditions(spec.networking, observed),
    ]  # fmt: skip
    labels = object_names.selector_labels(service, object_names.SERVER)
    fields = {
        "servedName": service.served_name,
        "selector": ",".join(f"{key}={value}" for key, value in sorted(labels.items())),
        "cache": cache,
        "adapters": adapters_state.entries,
        "adaptersReady": adapters_state.ready_summary,
        **({"plan": plan} if plan else {}),
        **({"defaults": list(service.defaulted_fields)} if service.defaulted_fields else {}),
        **({"groups": groups} if groups else {}),
        **(_addresses(service, workload) if (workload := observed.workload or observed.replaced_workload) else {}),
    }
    return _EvaluatedSpec(conditions, fields)


# Conditions


def _config_valid(planning: PlanningResult, observed: ObservedState) -> Condition:
    if planning.spec_error:
        return Condition(ConditionType.CONFIG_VALID, False, Reason.INVALID, planning.spec_error)
    if observed.conflict:
        return Condition(ConditionType.CONFIG_VALID, False, Reason.CONFLICT, observed.conflict)
    if observed.apply_error:
        return Condition(ConditionType.CONFIG_VALID, False, Reason.APPLY_REJECTED, observed.apply_error)
    omissions = []
    if observed.unknown_fields:
        fields = ", ".join(observed.unknown_fields)
        omissions.append(
            f"the API server does not know {fields}, so the operator omitted it; correct it, remove it from the spec, "
            "or install a release that has it"
        )
    if observed.unavailable_kinds:
        kind_names = ", ".join(observed.unavailable_kinds)
        omissions.append(
            f"the API server does not serve {kind_names}, so the operator omitted it; install it, or remove it from "
            "the spec"
        )
    if observed.outdated_image:
        message = (
            f"spec.runtime.image: {observed.outdated_image!r} is older than the operator; its pods keep their "
            "configuration, and a change of the spec that replaces pods will be rejected; set an image of the "
            "operator's release, or remove the field"
        )
        return Condition(ConditionType.CONFIG_VALID, True, Reason.IMAGE_OUTDATED, "\n".join([message, *omissions]))
    omissions += observed.stuck_deletions
    if omissions:
        reason = Reason.FIELDS_LEFT_OUT if observed.unknown_fields else Reason.KINDS_LEFT_OUT
        reason = Reason.DELETION_STUCK if observed.stuck_deletions else reason
        return Condition(ConditionType.CONFIG_VALID, True, reason, "\n".join(omissions))
    return Condition(ConditionType.CONFIG_VALID, True, Reason.ACCEPTED, "every field can be used")


def _planned_condition(planning: PlanningResult) -> Condition:
    plan = planning.plan
    if planning.spec_error and plan is None:
        return Condition(ConditionType.PLANNED, None, Reason.INVALID, "the spec is invalid, see ConfigValid")
    if planning.unplannable is not None:
        return Condition(ConditionType.PLANNED, False, planning.unplannable.reason, str(planning.unplannable))
    if planning.waiting_for or plan is None:
        return Condition(ConditionType.PLANNED, None, Reason.PLANNING, planning.waiting_for or "not planned yet")
    message = "; ".join(filter(None, (plan.advice or _summarize_plan(plan), planning.note)))
    return Condition(ConditionType.PLANNED, True, plan.fit, message)


def _summarize_plan(plan: Plan) -> str:
    max_model_len = plan.maxModelLen.value
    devices = f"{plan.gpu.count} x {plan.gpu.product or 'GPU'}" if plan.gpu else "CPU"
    return f"{devices}: {plan.kvTokens} KV tokens are enough for {plan.concurrency:.1f} requests of {max_model_len}"


def _first_blocker(service: LLMService, conditions: Iterable[Condition]) -> Condition | None:
    """Return the condition that prevents this generation from being rolled out."""
    blocker = next((condition for condition in conditions if condition.is_true is not True), None)
    if service.spec.paused and (blocker is None or blocker.reason != Reason.INVALID):
        message = "spec.paused is true: the operator writes the status, but does not change other objects"
        return Condition(ConditionType.PROGRESSING, None, Reason.PAUSED, message)
    return blocker


def _progressing_condition(blocker: Condition | None, rollout_state: RolloutState) -> Condition:
    if blocker is None:
        return rollout_state.progressing_condition()
    in_progress = blocker.reason in (
        Reason.PLANNING,
        Reason.DOWNLOADING,
        Reason.DOWNLOAD_PENDING,
    )
    return Condition(ConditionType.PROGRESSING, in_progress, blocker.reason, blocker.message)


def _ready_condition(
    service: LLMService, blocker: Condition | None, rollout_state: RolloutState, adapters_ready: Condition
) -> Condition:
    if blocker is not None:
        is_true = None if blocker.reason == Reason.PAUSED else False
        return Condition(ConditionType.READY, is_true, blocker.reason, blocker.message)
    if not rollout_state.is_complete:
        return Condition(ConditionType.READY, False, rollout_state.reason, rollout_state.message)
    if rollout_state.desired_replicas == 0:
        message = roles.SCALED_TO_ZERO if service.roles else "spec.replicas is 0"
        return Condition(ConditionType.READY, False, Reason.SCALED_TO_ZERO, message)
    if adapters_ready.is_true is not True:
        return Condition(ConditionType.READY, adapters_ready.is_true, adapters_ready.reason, adapters_ready.message)
    return Condition(ConditionType.READY, True, Reason.READY, f"{rollout_state.message}; {adapters_ready.message}")


# The plan and the engine's measurements


def kv_token_drift(plan: Mapping[str, Any]) -> float | None:
    """Return how much the measured number of KV tokens differs from the planned number.

    The result is (measured - planned) / planned. If the tokens were not measured, it is None.
    """
    measured, planned = (plan.get("measured") or {}).get("kvTokens"), plan.get("kvTokens")
    if measured is None or not planned:
        return None
    if (plan.get("dtype") or {}).get("value") == "auto":
        # This is a plan for a CPU, and it assumes float32. If the engine selects a dtype of half the size, twice as
        # many KV tokens fit.
        planned = min(max(planned, measured), 2 * planned)
    return float(measured / planned - 1)


_MAX_KV_VALUE = 2**31
"""Larger values are not plausible and are ignored. An API server would reject integers of more than 64 bits."""
MAX_KV_TOKEN_DRIFT = 0.10
"""If the measured number of KV tokens differs from the planned number by more than this fraction, the condition reports
the difference.
"""


def _describe_drift(plan: Mapping[str, Any]) -> str:
    drift_ratio = kv_token_drift(plan)
    if drift_ratio is None or abs(drift_ratio) <= MAX_KV_TOKEN_DRIFT:
        return ""
    measured, comparison = plan["measured"]["kvTokens"], "fewer" if drift_ratio < 0 else "more"
    return (
        f"the engine has room for {measured} KV tokens, {abs(drift_ratio):.0%} {comparison} than the "
        f"plan's {plan['kvTokens']}"
    )


def _plan_fields(
    plan: Plan | None, observed: ObservedState, rollout_state: RolloutState, previous: Mapping[str, Any]
) -> dict[str, Any]:
    """Return status.plan. If there is no new plan, this is the previous plan, because the running pods still use it."""
    previous_plan = dict(previous.get("plan") or {})
    if plan is None:
        return previous_plan
    planned = plan.to_json()
    is_complete, prefill = rollout_state.is_complete, planned.get("prefill")
    of_clients = roles.of_role(observed, Role.DECODE) if prefill else observed
    _add_measurement(planned, previous_plan, of_clients, is_complete)
    if prefill:
        of_prefill = roles.of_role(observed, Role.PREFILL)
        _add_measurement(prefill, previous_plan.get("prefill") or {}, of_prefill, is_complete)
    return planned


def _add_measurement(
    planned: dict[str, Any], previous: Mapping[str, Any], observed: ObservedState, is_complete: bool
) -> None:
    """Add to a plan what its pods measured, or until they have, what was measured before."""
    measured = _measured_kv_cache(observed) if is_complete else None
    if measured is None and previous.get("inputsHash") == planned["inputsHash"]:
        measured = previous.get("measured")
    if measured:
        planned["measured"] = measured


def _measured_kv_cache(observed: ObservedState) -> dict[str, Any] | None:
    """Return what was measured in the pod that has the fewest KV tokens."""
    memories = [(p.report.memory, p.report.core_started_at) for p in ready_pods(observed) if p.report]
    measurements = [
        (memory.kv_tokens or memory.num_blocks * memory.block_size, memory.num_blocks, _format_time(started_at))
        for memory, started_at in memories
        if memory and 0 < memory.num_blocks < _MAX_KV_VALUE and 0 < memory.block_size < _MAX_KV_VALUE
    ]
    if not measurements:
        return None
    tokens, blocks, measured_at = min(measurements)
    return {"kvBlocks": blocks, "kvTokens": tokens} | ({"at": measured_at} if measured_at else {})


def _format_time(text: str | None) -> str:
    """Return a time in the RFC 3339 form that the schema requires. If `text` is not a time, the result is empty."""
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        return ""
    return format_timestamp(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


def _parsers(ready: tuple[PodState, ...]) -> dict[str, str]:
    """Return the fields toolCallParser and reasoningParser. A field is omitted if the ready pods report different
    values for it.
    """
    reports = [pod.report for pod in ready if pod.report]
    names = {
        "toolCallParser": {report.tool_call_parser for report in reports},
        "reasoningParser": {report.reasoning_parser for report in reports},
    }
    return {field: name for field, found in names.items() if len(found) == 1 and (name := next(iter(found)))}


def _addresses(service: LLMService, workload: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return two fields of the status: `address` and `endpoints`."""
    ports, host = service.ports, ".".join([service.name, *([service.namespace] if service.namespace else []), "svc"])
    forms = {"http": f"http://{host}:{ports.get('http')}", "grpc": f"{host}:{ports.get('grpc')}"}
    endpoints = {name: url for name, url in forms.items() if name in ports}
    grpc_scheme = "grpcs" if service.grpc_uses_tls else "grpc"
    address = {name: f"{grpc_scheme}://{url}" if name == "grpc" else url for name, url in endpoints.items()}
    if address:
        address["url"] = next(iter(address.values()))
    # Pods that an older release rendered do not have the port.
    if service.openai_port and object_names.OPENAI_PORT_NAME in container_ports(workload_template(workload["spec"])):
        scheme = "http" if service.spec.openai.tlsSecretRef is None else "https"
        address["url"] = address["openai"] = f"{scheme}://{host}:{service.openai_port}/v1"
    route = service.spec.networking.httpRoute
    if route is not None and route.hostnames:
        # If there is an InferencePool, the route leads to it.
        pool = service.spec.networking.inferencePool
        port = route.port if pool is None else pool.targetPort
        serves_openai = service.openai_port is not None and port == "openai"
        address["external"] = f"{route.scheme}://{route.hostnames[0]}{'/v1' if serves_openai else ''}"
    return {"address": address, "endpoints": endpoints}
