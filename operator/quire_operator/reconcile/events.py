# SPDX-License-Identifier: Apache-2.0
"""events(): what to tell `kubectl describe` and whoever watches events: transitions only, each once. Pure.

A transition is a change of a condition's status or reason, of an adapter's state, or of the plan; words that change
under the same reason are in the status and make no event.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from quire_operator.reconcile.conditions import Reason, Type, short
from quire_operator.reconcile.status import DRIFT, drift

MAX_MESSAGE = 1024
"""Of an event; the API server refuses longer ones."""
_MAX_ADAPTERS = 10
"""Events about adapters for one change; a catalogue has up to 1024."""
_QUIET = frozenset(
    {Reason.ACCEPTED, Reason.PLANNING, Reason.ON_CLAIM, Reason.NO_ADAPTERS, Reason.LOADING, Reason.NO_READY_PODS}
)
"""Reasons that are no news by themselves: others tell the same, or what comes of it will be told."""
_QUIET_AT_FIRST = frozenset({Reason.UPDATING})
"""Of a new service these are no news either: the Deployment tells of its pods."""
_BLOCKERS = (Type.CONFIG_VALID, Type.PLANNED, Type.MODEL_CACHED)


class News(StrEnum):
    """Reasons of events that are no condition's."""

    REPLANNED = "Replanned"
    PLAN_DIFFERS = "PlanDiffers"
    ADAPTER_READY = "AdapterReady"
    ADAPTER_FAILED = "AdapterFailed"
    MORE_ADAPTERS = "MoreAdapters"


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes event about the service."""

    type: str
    """Normal or Warning."""
    reason: str
    """In one word, at most 128 characters."""
    message: str
    """In sentences, at most 1024 characters."""


def events(previous: Mapping[str, Any], status: Mapping[str, Any]) -> list[Event]:
    """What has changed between two statuses that people should hear of; nothing when nothing has."""
    before, after = _conditions(previous), _conditions(status)
    return [*_of_conditions(before, after), *_of_plan(previous, status), *_of_adapters(previous, status)]


def _of_conditions(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Event]:
    for kind in (*_BLOCKERS, Type.PROGRESSING, Type.AVAILABLE, Type.READY):
        old, new = before.get(kind.value, {}), after.get(kind.value, {})
        if not new or (old.get("status"), old.get("reason")) == (new["status"], new["reason"]):
            continue
        if new["reason"] in _QUIET and not (kind is Type.AVAILABLE and old.get("status") == "True"):
            continue
        if not old and new["reason"] in _QUIET_AT_FIRST:
            continue
        if not _told_elsewhere(kind, new, after):
            yield _event(_is_bad(kind, old, new), new["reason"], f"{kind.value}: {new['message']}")


def _told_elsewhere(kind: Type, new: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether the same cause makes an event of another condition: Ready and Progressing repeat what they wait for."""
    if kind is Type.READY:
        # Adapters have events of their own.
        return bool(new["status"] != "True" and new["reason"] != Reason.PODS_UNREACHABLE)
    if kind in (Type.PLANNED, Type.MODEL_CACHED) and new["status"] == "Unknown":
        return bool(new["reason"] == after[Type.CONFIG_VALID.value]["reason"])
    if kind is Type.PROGRESSING:
        return any(after.get(other.value, {}).get("reason") == new["reason"] for other in _BLOCKERS)
    return False


def _is_bad(kind: Type, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    reason = new["reason"]
    if kind in (Type.READY, Type.AVAILABLE):
        return bool(new["status"] != "True" and reason != Reason.SCALED_TO_ZERO)
    if kind is Type.PROGRESSING:
        return reason not in (Reason.ROLLOUT_COMPLETE, Reason.UPDATING, Reason.PAUSED, Reason.PODS_NOT_READY)
    waits = (Reason.DOWNLOADING, Reason.DOWNLOAD_PENDING)
    left_out = (Reason.KINDS_LEFT_OUT, Reason.FIELDS_LEFT_OUT)
    return reason in left_out or (new["status"] != "True" and reason not in waits)


def _of_plan(previous: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[Event]:
    old, new = previous.get("plan") or {}, status.get("plan") or {}
    if not new:
        return
    if old.get("inputsHash") and old["inputsHash"] != new["inputsHash"]:
        yield _event(False, News.REPLANNED, f"the spec, the model or the GPUs changed: {_sizes(new)}")
    now, was = drift(new), drift(old) if old.get("inputsHash") == new["inputsHash"] else None
    if now is not None and abs(now) > DRIFT and not (was is not None and abs(was) > DRIFT):
        measured = new["measured"]["kvTokens"]
        word = "fewer" if now < 0 else "more"
        yield _event(
            True,
            News.PLAN_DIFFERS,
            f"the engine has room for {measured} KV tokens, {abs(now):.0%} {word} than the {new['kvTokens']} planned; "
            f"{'something else is in the memory of the GPU, or ' if new.get('gpu') else ''}the plan is wrong for this "
            "model",
        )


def _of_adapters(previous: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[Event]:
    before = {entry["name"]: entry for entry in previous.get("adapters") or ()}
    found = [event for entry in status.get("adapters") or () if (event := _of_adapter(before, entry))]
    yield from found[:_MAX_ADAPTERS]
    if len(found) > _MAX_ADAPTERS:
        left = found[_MAX_ADAPTERS:]
        bad = sum(event.type == "Warning" for event in left)
        yield _event(bool(bad), News.MORE_ADAPTERS, f"{len(left)} more adapters changed, {bad} of them failed")


def _of_adapter(before: Mapping[str, Any], entry: Mapping[str, Any]) -> Event | None:
    old = before.get(entry["name"], {})
    if entry["state"] == "Failed" and old.get("state") != "Failed":
        return _event(True, News.ADAPTER_FAILED, f"adapter {entry['name']}: {entry.get('message') or 'it has failed'}")
    everywhere, was = _everywhere(entry), _everywhere(old)
    if everywhere and (not was or old.get("digest") != entry.get("digest")):
        digest = f", {entry['digest']}" if entry.get("digest") else ""
        return _event(
            False, News.ADAPTER_READY, f"adapter {entry['name']} is on all {entry['total']} ready pods{digest}"
        )
    return None


def _everywhere(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("state") == "Ready" and entry.get("total") and entry.get("ready") == entry["total"])


def _sizes(plan: Mapping[str, Any]) -> str:
    values = {name: plan[name]["value"] for name in ("tensorParallelSize", "maxModelLen", "maxNumSeqs") if name in plan}
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _conditions(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {condition["type"]: condition for condition in status.get("conditions") or ()}


def _event(bad: bool, reason: str, message: str) -> Event:
    return Event("Warning" if bad else "Normal", str(reason), short(message, MAX_MESSAGE))
