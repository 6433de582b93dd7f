# SPDX-License-Identifier: Apache-2.0
"""Kubernetes events of a service.

There is one event for each transition of its status. Pure. Called by the status writer.

A transition occurs if a condition gets another status or reason, if an adapter gets another state, if the plan
changes, or if pods differ in a further field of their KV blocks. If only the message of a condition changes, no event
is created.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from quire_operator.controller.status import kv_layouts
from quire_operator.controller.status.conditions import ConditionType, Reason, to_single_line
from quire_operator.controller.status.status import MAX_KV_TOKEN_DRIFT, kv_token_drift

MAX_MESSAGE = 1024
"""Maximum number of characters in the note of an event. The API server rejects longer notes."""
_MAX_ADAPTERS = 10
"""When a status changes, at most this many events about adapters are created. A catalog can contain up to 1,024
adapters.
"""
_SILENT_REASONS = frozenset(
    {
        Reason.ACCEPTED,
        Reason.PLANNING,
        Reason.ON_CLAIM,
        Reason.NO_ADAPTERS,
        Reason.LOADING,
        Reason.NO_READY_PODS,
        Reason.PODS_STARTING,
        Reason.AUTOSCALER_PENDING,
        Reason.PARENT_PENDING,
    }
)
"""No event is created for these reasons, because another event already reports the cause or the result."""
_SILENT_INITIAL_REASONS = frozenset({Reason.UPDATING})
"""No event is created for these reasons if the service is new. The Deployment's own events report its pods."""
_BLOCKING_CONDITIONS = (ConditionType.CONFIG_VALID, ConditionType.PLANNED, ConditionType.MODEL_CACHED)

_REPORTED_CONDITIONS = (
    *_BLOCKING_CONDITIONS, ConditionType.PROGRESSING, ConditionType.AVAILABLE, ConditionType.READY,
    ConditionType.AUTOSCALING, ConditionType.INFERENCE_POOL, ConditionType.HTTP_ROUTE,
)  # fmt: skip


class EventReason(StrEnum):
    """Reasons that only events have. The other reasons of events are reasons of conditions."""

    REPLANNED = "Replanned"
    PLAN_DIFFERS = "PlanDiffers"
    ADAPTER_READY = "AdapterReady"
    ADAPTER_FAILED = "AdapterFailed"
    MORE_ADAPTERS = "MoreAdapters"
    KV_LAYOUTS_DIFFER = "KVLayoutsDiffer"


@dataclass(frozen=True, slots=True)
class ServiceEvent:
    """A Kubernetes event about the service."""

    type: str
    """Normal or Warning."""
    reason: str
    """Reason of the event, which is a single word of at most 128 characters."""
    message: str
    """At most 1,024 characters."""


def build_events(previous: Mapping[str, Any], status: Mapping[str, Any]) -> list[ServiceEvent]:
    """Return an event for each transition from the previous to the new status."""
    condition_events = _condition_events(_conditions_by_type(previous), _conditions_by_type(status))
    plan_events, adapter_events = _plan_events(previous, status), _adapter_events(previous, status)
    return [*condition_events, *plan_events, *adapter_events, *_kv_layout_events(previous, status)]


def _condition_events(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[ServiceEvent]:
    for kind in _REPORTED_CONDITIONS:
        old, new = before.get(kind.value, {}), after.get(kind.value, {})
        if not new or (old.get("status"), old.get("reason")) == (new["status"], new["reason"]):
            continue
        if new["reason"] in _SILENT_REASONS and not (kind is ConditionType.AVAILABLE and old.get("status") == "True"):
            continue
        if not old and new["reason"] in _SILENT_INITIAL_REASONS:
            continue
        if not _is_reported_elsewhere(kind, new, after):
            yield _make_event(_is_warning(kind, old, new), new["reason"], f"{kind.value}: {new['message']}")


def _is_reported_elsewhere(kind: ConditionType, new: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether the event of another condition already reports the cause.

    Ready and Progressing repeat the reasons of other conditions.
    """
    if kind is ConditionType.READY:
        # Adapters have events of their own.
        return bool(new["status"] != "True" and new["reason"] != Reason.PODS_UNREACHABLE)
    if kind in (ConditionType.PLANNED, ConditionType.MODEL_CACHED) and new["status"] == "Unknown":
        return bool(new["reason"] == after[ConditionType.CONFIG_VALID.value]["reason"])
    if kind is ConditionType.PROGRESSING:
        return any(after.get(other.value, {}).get("reason") == new["reason"] for other in _BLOCKING_CONDITIONS)
    return False


def _is_warning(kind: ConditionType, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    reason = new["reason"]
    if kind in (ConditionType.READY, ConditionType.AVAILABLE):
        return bool(new["status"] != "True" and reason != Reason.SCALED_TO_ZERO)
    if kind is ConditionType.PROGRESSING:
        return reason not in (
            Reason.ROLLOUT_COMPLETE,
            Reason.UPDATING,
            Reason.PAUSED,
            Reason.PODS_NOT_READY,
            Reason.WAITING_FOR_QUOTA,
            Reason.SCHEDULING_GATED,
        )
    waiting_reasons = (Reason.DOWNLOADING, Reason.DOWNLOAD_PENDING)
    warning_reasons = (Reason.KINDS_LEFT_OUT, Reason.FIELDS_LEFT_OUT, Reason.IMAGE_OUTDATED, Reason.DELETION_STUCK)
    return reason in warning_reasons or (new["status"] != "True" and reason not in waiting_reasons)


def _plan_events(previous: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[ServiceEvent]:
    old, new = previous.get("plan") or {}, status.get("plan") or {}
    if not new:
        return
    if old.get("inputsHash") and old["inputsHash"] != new["inputsHash"]:
        yield _make_event(
            False, EventReason.REPLANNED, f"the spec, the model or the GPUs changed: {_format_plan_sizes(new)}"
        )
    drift = kv_token_drift(new) or 0.0
    previous_drift = (kv_token_drift(old) or 0.0) if old.get("inputsHash") == new["inputsHash"] else 0.0
    if abs(drift) > MAX_KV_TOKEN_DRIFT >= abs(previous_drift):
        comparison = f"{abs(drift):.0%} {'fewer' if drift < 0 else 'more'} than the {new['kvTokens']} in the plan"
        gpu_cause = "another process uses the GPU's memory, or " if new.get("gpu") else ""
        message = (
            f"the engine has room for {new['measured']['kvTokens']} KV tokens, {comparison}; {gpu_cause}the plan is "
            "wrong for this model"
        )
        yield _make_event(True, EventReason.PLAN_DIFFERS, message)


def _adapter_events(previous: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[ServiceEvent]:
    previous_by_name = {entry["name"]: entry for entry in previous.get("adapters") or ()}
    adapter_events = [
        event for entry in status.get("adapters") or () if (event := _adapter_event(previous_by_name, entry))
    ]
    yield from adapter_events[:_MAX_ADAPTERS]
    if len(adapter_events) > _MAX_ADAPTERS:
        omitted = adapter_events[_MAX_ADAPTERS:]
        num_failed = sum(event.type == "Warning" for event in omitted)
        yield _make_event(
            bool(num_failed),
            EventReason.MORE_ADAPTERS,
            f"{len(omitted)} more adapters changed, {num_failed} of them failed",
        )


def _adapter_event(previous_by_name: Mapping[str, Any], entry: Mapping[str, Any]) -> ServiceEvent | None:
    old = previous_by_name.get(entry["name"], {})
    if entry["state"] == "Failed" and old.get("state") != "Failed":
        return _make_event(
            True, EventReason.ADAPTER_FAILED, f"adapter {entry['name']}: {entry.get('message') or 'it has failed'}"
        )
    is_ready, was_ready = _is_ready_everywhere(entry), _is_ready_everywhere(old)
    if is_ready and (not was_ready or old.get("digest") != entry.get("digest")):
        digest = f", {entry['digest']}" if entry.get("digest") else ""
        warning = f"; {entry['message']}" if entry.get("message") else ""
        return _make_event(
            bool(warning),
            EventReason.ADAPTER_READY,
            f"adapter {entry['name']} is on all {entry['total']} ready pods{digest}{warning}",
        )
    return None


def _kv_layout_events(previous: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[ServiceEvent]:
    known = kv_layouts.differences_of(previous)
    for name in kv_layouts.differences_of(status):
        if name not in known:
            yield _make_event(True, EventReason.KV_LAYOUTS_DIFFER, kv_layouts.describe(name))


def _is_ready_everywhere(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("state") == "Ready" and entry.get("total") and entry.get("ready") == entry["total"])


def _format_plan_sizes(plan: Mapping[str, Any]) -> str:
    values = {name: plan[name]["value"] for name in ("tensorParallelSize", "maxModelLen", "maxNumSeqs") if name in plan}
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _conditions_by_type(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {condition["type"]: condition for condition in status.get("conditions") or ()}


def _make_event(is_warning: bool, reason: str, message: str) -> ServiceEvent:
    return ServiceEvent("Warning" if is_warning else "Normal", str(reason), to_single_line(message, MAX_MESSAGE))
