# SPDX-License-Identifier: Apache-2.0
"""status(): the whole .status of a service, from what is wanted and what was seen. Pure: the clock is an argument.

Ready sums up the rest and is never claimed for an older generation: every pod is of this one, ready by the kubelet and
by its own word, and holds every adapter.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from quire_operator.plan.gpu import GPU_RESOURCE
from quire_operator.plan.plan import Plan
from quire_operator.reconcile import adapters, model_cache
from quire_operator.reconcile.conditions import Condition, Reason, Type, settled, timestamp
from quire_operator.reconcile.observed import Observed, Verdict
from quire_operator.reconcile.rollout import Rollout, available, ready_pods, rollout
from quire_operator.render import names
from quire_operator.service import Device, LLMService

_KEPT = ("servedName", "selector", "endpoints", "plan", "cache", "adapters", "adaptersReady")
"""What stays as it was while the spec cannot be read."""


def status(
    service: LLMService | None,
    generation: int,
    verdict: Verdict,
    observed: Observed,
    previous: Mapping[str, Any],
    now: datetime,
) -> dict[str, Any]:
    """The whole .status, to be written over the previous one when it differs.

    `service` is None when the spec could not be read at all (verdict.invalid says why). Times stay what they were
    while nothing they stand for changes, so an unchanged service gives an unchanged status.
    """
    if service is None:
        found = _unread(verdict, observed, previous)
    else:
        found = _read(service, generation, verdict, observed, previous, now)
    deployment = (observed.deployment or {}).get("status") or {}
    meta = (observed.deployment or {}).get("metadata") or {}
    seen = deployment.get("observedGeneration", 0) >= meta.get("generation", 0) and observed.applied == generation
    ready = ready_pods(observed)
    return {
        **found.fields,
        "observedGeneration": generation,
        "conditions": settled(found.conditions, generation, previous, now),
        "replicas": deployment.get("replicas") or 0,
        "readyReplicas": len(ready),
        "updatedReplicas": (deployment.get("updatedReplicas") or 0) if seen else 0,
        "models": adapters.models(ready),
    }


@dataclass(frozen=True, slots=True)
class _Found:
    """What differs between a spec that can be read and one that cannot."""

    conditions: list[Condition]
    fields: dict[str, Any]


def _unread(verdict: Verdict, observed: Observed, previous: Mapping[str, Any]) -> _Found:
    """Nothing is known of what is wanted; what was there keeps serving."""
    config = _config(verdict, observed)
    judged = [config, available(observed, None), _blocked(Type.PROGRESSING, config), _blocked(Type.READY, config)]
    judged += [_unjudged(kind, config) for kind in (Type.PLANNED, Type.MODEL_CACHED, Type.ADAPTERS_READY)]
    return _Found(judged, {key: previous[key] for key in _KEPT if key in previous})


def _read(
    service: LLMService,
    generation: int,
    verdict: Verdict,
    observed: Observed,
    previous: Mapping[str, Any],
    now: datetime,
) -> _Found:
    spec = service.spec
    config, planned = _config(verdict, observed), _planned(verdict)
    cached, cache = model_cache.judge(service, verdict, observed, previous, now)
    gpu = spec.gpu.resourceName if spec.gpu else GPU_RESOURCE
    found = rollout(observed, generation, spec.replicas, gpu if spec.device is Device.GPU else None)
    loaded = adapters.judge(service.catalogue(), observed.pods, ready_pods(observed))
    # A model that cannot be read is what planning waits for.
    blocker = _blocker(service, [config, cached, planned] if verdict.unread else [config, planned, cached])
    progressing = _progressing(blocker, found)
    plan = _plan(verdict.plan, observed, found, previous)
    if note := _drift_note(plan):
        planned = Condition(planned.type, planned.holds, planned.reason, f"{planned.message}; {note}")
    conditions = [
        config, planned, cached, available(observed, spec.replicas), progressing, loaded.condition,
        _ready(blocker, found, loaded.condition),
    ]  # fmt: skip
    labels = names.selector(service, names.SERVER)
    fields = {
        "servedName": service.served_name,
        "selector": ",".join(f"{key}={value}" for key, value in sorted(labels.items())),
        "cache": cache,
        "adapters": loaded.entries,
        "adaptersReady": loaded.ready,
        **({"plan": plan} if plan else {}),
        **({"endpoints": _endpoints(service)} if observed.deployment is not None else {}),
    }
    return _Found(conditions, fields)


# Conditions


def _config(verdict: Verdict, observed: Observed) -> Condition:
    if verdict.invalid:
        return Condition(Type.CONFIG_VALID, False, Reason.INVALID, verdict.invalid)
    if observed.conflict:
        return Condition(Type.CONFIG_VALID, False, Reason.CONFLICT, observed.conflict)
    if observed.rejected:
        return Condition(Type.CONFIG_VALID, False, Reason.APPLY_REJECTED, observed.rejected)
    lacks = []
    if observed.fields_left_out:
        fields = ", ".join(observed.fields_left_out)
        lacks.append(f"the API server knows no {fields}, so that was left out; correct it, or take it out of the spec")
    if observed.left_out:
        kinds = ", ".join(observed.left_out)
        lacks.append(f"the API server has no {kinds}, so that was left out; install it, or take it out of the spec")
    if lacks:
        reason = Reason.FIELDS_LEFT_OUT if observed.fields_left_out else Reason.KINDS_LEFT_OUT
        return Condition(Type.CONFIG_VALID, True, reason, "\n".join(lacks))
    return Condition(Type.CONFIG_VALID, True, Reason.ACCEPTED, "every field can be used")


def _planned(verdict: Verdict) -> Condition:
    plan = verdict.plan
    if verdict.invalid and plan is None:
        return Condition(Type.PLANNED, None, Reason.INVALID, "the spec cannot be used, see ConfigValid")
    if verdict.unplannable is not None:
        return Condition(Type.PLANNED, False, verdict.unplannable.why, str(verdict.unplannable))
    if verdict.pending or plan is None:
        return Condition(Type.PLANNED, None, Reason.PLANNING, verdict.pending or "not planned yet")
    return Condition(Type.PLANNED, True, plan.fit, plan.advice or _summary(plan))


def _summary(plan: Plan) -> str:
    length = plan.maxModelLen.value
    where = f"{plan.gpu.count} x {plan.gpu.product or 'GPU'}" if plan.gpu else "CPU"
    return f"{where}: {plan.kvTokens} KV tokens hold {plan.concurrency:.1f} requests of {length} tokens"


def _blocker(service: LLMService, judged: Iterable[Condition]) -> Condition | None:
    """What keeps this generation from being rolled out at all."""
    blocked = next((condition for condition in judged if condition.holds is not True), None)
    if service.spec.paused and (blocked is None or blocked.reason != Reason.INVALID):
        message = "spec.paused is set: the operator changes and repairs nothing, and only writes the status"
        return Condition(Type.PROGRESSING, None, Reason.PAUSED, message)
    return blocked


def _progressing(blocker: Condition | None, found: Rollout) -> Condition:
    if blocker is None:
        return found.progressing()
    moving = blocker.reason in (Reason.PLANNING, Reason.DOWNLOADING, Reason.DOWNLOAD_PENDING)
    return Condition(Type.PROGRESSING, moving, blocker.reason, blocker.message)


def _ready(blocker: Condition | None, found: Rollout, loaded: Condition) -> Condition:
    if blocker is not None:
        holds = None if blocker.reason == Reason.PAUSED else False
        return Condition(Type.READY, holds, blocker.reason, blocker.message)
    if not found.complete:
        return Condition(Type.READY, False, found.reason, found.message)
    if found.wanted == 0:
        return Condition(Type.READY, False, Reason.SCALED_TO_ZERO, "spec.replicas is 0")
    if loaded.holds is not True:
        return Condition(Type.READY, loaded.holds, loaded.reason, loaded.message)
    return Condition(Type.READY, True, Reason.READY, f"{found.message}; {loaded.message}")


def _blocked(kind: Type, by: Condition) -> Condition:
    return Condition(kind, False, by.reason, by.message)


def _unjudged(kind: Type, by: Condition) -> Condition:
    return Condition(kind, None, by.reason, "not judged: the spec cannot be read, see ConfigValid")


# The plan, and what the engine found


def drift(plan: Mapping[str, Any]) -> float | None:
    """By how much of the planned KV tokens the engine measured fewer (negative) or more; None: nothing was measured."""
    measured, planned = (plan.get("measured") or {}).get("kvTokens"), plan.get("kvTokens")
    if measured is None or not planned:
        return None
    if (plan.get("dtype") or {}).get("value") == "auto":
        # On a CPU, where float32 is counted; the engine may take a type of half the size, which doubles the tokens.
        planned = min(max(planned, measured), 2 * planned)
    return float(measured / planned - 1)


_MOST = 2**31
"""Blocks, and tokens of one, that nobody has; an API server takes no integer beyond 64 bits."""
DRIFT = 0.10
"""Beyond this the plan was wrong enough to tell somebody."""


def _drift_note(plan: Mapping[str, Any]) -> str:
    found = drift(plan)
    if found is None or abs(found) <= DRIFT:
        return ""
    measured, word = plan["measured"]["kvTokens"], "fewer" if found < 0 else "more"
    return f"the engine has room for {measured} KV tokens, {abs(found):.0%} {word} than the plan's {plan['kvTokens']}"


def _plan(plan: Plan | None, observed: Observed, found: Rollout, previous: Mapping[str, Any]) -> dict[str, Any]:
    """status.plan. Without a new one the last stays: it is the one that the pods run by."""
    before = dict(previous.get("plan") or {})
    if plan is None:
        return before
    planned = plan.to_json()
    measured = _measured(observed) if found.complete else None
    if measured is None and before.get("inputsHash") == planned["inputsHash"]:
        measured = before.get("measured")
    return planned | ({"measured": measured} if measured else {})


def _measured(observed: Observed) -> dict[str, Any] | None:
    """What the engine of the pod with the least room found."""
    memories = [(p.report.memory, p.report.core_started_at) for p in ready_pods(observed) if p.report]
    found = [
        (memory.num_blocks * memory.block_size, memory.num_blocks, _time(started_at))
        for memory, started_at in memories
        if memory and 0 < memory.num_blocks < _MOST and 0 < memory.block_size < _MOST
    ]
    if not found:
        return None
    tokens, blocks, at = min(found)
    return {"kvBlocks": blocks, "kvTokens": tokens} | ({"at": at} if at else {})


def _time(text: str | None) -> str:
    """RFC 3339 as the schema wants it; empty for anything else."""
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        return ""
    return timestamp(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


def _endpoints(service: LLMService) -> dict[str, str]:
    ports = service.spec.runtime.ports
    host = ".".join([service.name, *([service.namespace] if service.namespace else []), "svc"])
    return {"http": f"http://{host}:{ports.http}", "grpc": f"{host}:{ports.grpc}"}
