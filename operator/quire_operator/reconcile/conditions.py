# SPDX-License-Identifier: Apache-2.0
"""Conditions: what holds for a service and why, in one word and in sentences. docs/troubleshooting.md explains each
reason, and a test holds the two together.

Judged by rollout.py, model_cache.py, adapters.py and status.py, turned into .status.conditions here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

MAX_MESSAGE = 1024
"""Characters of a condition's message; the schema allows more, people read less."""
MAX_TABLE = 4096
"""Characters where the message has lines of its own: problems of a spec, or what planning tried."""


class Type(StrEnum):
    """Conditions of a service, in the order in which they are shown."""

    READY = "Ready"
    CONFIG_VALID = "ConfigValid"
    PLANNED = "Planned"
    MODEL_CACHED = "ModelCached"
    AVAILABLE = "Available"
    PROGRESSING = "Progressing"
    ADAPTERS_READY = "AdaptersReady"


class Reason(StrEnum):
    """Why a condition is as it is. Reasons of Planned are also those of plan.Fit and plan.Why."""

    # Ready
    READY = "Ready"
    SCALED_TO_ZERO = "ScaledToZero"
    PODS_UNREACHABLE = "PodsUnreachable"
    PAUSED = "Paused"
    # ConfigValid
    ACCEPTED = "Accepted"
    KINDS_LEFT_OUT = "KindsLeftOut"
    FIELDS_LEFT_OUT = "FieldsLeftOut"
    INVALID = "Invalid"
    CONFLICT = "Conflict"
    APPLY_REJECTED = "ApplyRejected"
    # Planned
    PLANNING = "Planning"
    # ModelCached
    DOWNLOADED = "Downloaded"
    ON_CLAIM = "OnClaim"
    IN_PODS = "InPods"
    DOWNLOADING = "Downloading"
    DOWNLOAD_PENDING = "DownloadPending"
    AUTH_FAILED = "AuthFailed"
    NOT_FOUND = "NotFound"
    NO_SPACE = "NoSpace"
    DIGEST_MISMATCH = "DigestMismatch"
    SOURCE_INVALID = "SourceInvalid"
    UNREACHABLE = "Unreachable"
    DOWNLOAD_FAILED = "DownloadFailed"
    # Available
    MINIMUM_REPLICAS = "MinimumReplicas"
    NO_READY_PODS = "NoReadyPods"
    # Progressing
    ROLLOUT_COMPLETE = "RolloutComplete"
    UPDATING = "Updating"
    INSUFFICIENT_GPU = "InsufficientGPU"
    UNSCHEDULABLE = "Unschedulable"
    PODS_NOT_READY = "PodsNotReady"
    PODS_REFUSED = "PodsRefused"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    # AdaptersReady
    NO_ADAPTERS = "NoAdapters"
    ALL_LOADED = "AllLoaded"
    LOADING = "Loading"
    LOAD_FAILED = "LoadFailed"


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition, before it has times."""

    type: Type
    holds: bool | None
    """None: unknown."""
    reason: str
    """A Reason, or the plan's Fit or Why."""
    message: str

    @property
    def status(self) -> str:
        """As Kubernetes writes it."""
        return "Unknown" if self.holds is None else str(self.holds)


def settled(
    conditions: Iterable[Condition], generation: int, previous: Mapping[str, Any], now: datetime
) -> list[dict[str, Any]]:
    """.status.conditions: a condition keeps its lastTransitionTime for as long as it keeps its status."""
    before = {found.get("type"): found for found in previous.get("conditions") or ()}
    order = list(Type)
    return [
        {
            "type": condition.type.value,
            "status": condition.status,
            "observedGeneration": generation,
            "lastTransitionTime": _since(condition, before.get(condition.type.value, {}), now),
            "reason": str(condition.reason),
            "message": _message(condition),
        }
        for condition in sorted(conditions, key=lambda c: order.index(c.type))
    ]


def short(text: str, limit: int = MAX_MESSAGE) -> str:
    """One line of text, cut to `limit` characters with an ellipsis; indented lines, as of a table, are left out."""
    first, *others = text.strip().splitlines() or [""]
    return _cut("; ".join([first, *(line for line in others if line.strip() and not line[0].isspace())]), limit)


def timestamp(moment: datetime) -> str:
    """RFC 3339, in whole seconds of UTC."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _message(condition: Condition) -> str:
    if condition.type in (Type.CONFIG_VALID, Type.PLANNED):
        return _cut(condition.message, MAX_TABLE)
    return short(condition.message)


def _cut(text: str, limit: int) -> str:
    # What is no text in UTF-8 would come back from the API server as something else, and differ for ever.
    text = text.encode(errors="replace").decode()
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def _since(condition: Condition, before: Mapping[str, Any], now: datetime) -> str:
    kept = before.get("lastTransitionTime") if before.get("status") == condition.status else None
    return str(kept) if kept else timestamp(now)
