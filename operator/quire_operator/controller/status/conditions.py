# SPDX-License-Identifier: Apache-2.0
"""The conditions of a service: their types, their reasons, and their conversion to .status.conditions.

Pure. rollout.py, model_cache.py, adapters.py and status.py evaluate the conditions. A test checks that
docs/troubleshooting.md explains each reason.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

MAX_MESSAGE = 1024
"""Maximum number of characters in the message of a condition. The schema would allow more."""
MAX_MULTILINE_MESSAGE = 4096
"""Maximum number of characters in a message that has several lines. Such a message lists problems of a spec, or
candidates of the planner.
"""


class ConditionType(StrEnum):
    """The types of conditions, in the order in which the status contains them."""

    READY = "Ready"
    CONFIG_VALID = "ConfigValid"
    PLANNED = "Planned"
    MODEL_CACHED = "ModelCached"
    AVAILABLE = "Available"
    PROGRESSING = "Progressing"
    ADAPTERS_READY = "AdaptersReady"
    AUTOSCALING = "Autoscaling"
    """Only if the spec has an autoscaler."""
    INFERENCE_POOL = "InferencePool"
    """Only if the spec has an InferencePool."""
    HTTP_ROUTE = "HTTPRoute"
    """Only if the spec has an HTTPRoute."""


class Reason(StrEnum):
    """Reasons of conditions. The condition Planned can also have a reason from the package plan."""

    # Ready
    READY = "Ready"
    SCALED_TO_ZERO = "ScaledToZero"
    PODS_UNREACHABLE = "PodsUnreachable"
    PAUSED = "Paused"
    # ConfigValid
    ACCEPTED = "Accepted"
    KINDS_LEFT_OUT = "KindsLeftOut"
    FIELDS_LEFT_OUT = "FieldsLeftOut"
    IMAGE_OUTDATED = "ImageOutdated"
    DELETION_STUCK = "DeletionStuck"
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
    WAITING_FOR_QUOTA = "WaitingForQuota"
    SCHEDULING_GATED = "SchedulingGated"
    GROUP_NODE_LOST = "GroupNodeLost"
    GANG_INCOMPLETE = "GangIncomplete"
    GROUP_CRASH_LOOPING = "GroupCrashLooping"
    PODS_STARTING = "PodsStarting"
    PODS_NOT_READY = "PodsNotReady"
    PODS_REFUSED = "PodsRefused"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    # AdaptersReady
    NO_ADAPTERS = "NoAdapters"
    ALL_LOADED = "AllLoaded"
    LOADING = "Loading"
    LOAD_FAILED = "LoadFailed"
    # Autoscaling
    AUTOSCALER_ACTIVE = "AutoscalerActive"
    AUTOSCALER_FAILED = "AutoscalerFailed"
    AUTOSCALER_PENDING = "AutoscalerPending"
    # InferencePool and HTTPRoute
    PARENT_ACTIVE = "ParentActive"
    PARENT_FAILED = "ParentFailed"
    PARENT_PENDING = "ParentPending"


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of a service, without the time of its last transition."""

    type: ConditionType
    is_true: bool | None
    """Whether the status of the condition is True. None means Unknown."""
    reason: str
    """A Reason, or a reason from the package plan."""
    message: str

    @property
    def status(self) -> str:
        """Return the status in the form that the API server stores: True, False or Unknown."""
        return "Unknown" if self.is_true is None else str(self.is_true)


def to_conditions(
    conditions: Iterable[Condition], generation: int, previous: Mapping[str, Any], now: datetime
) -> list[dict[str, Any]]:
    """Return .status.conditions. As long as the status of a condition does not change, its lastTransitionTime does not
    change either.
    """
    previous_by_type = {entry.get("type"): entry for entry in previous.get("conditions") or ()}
    type_order = list(ConditionType)
    return [
        {
            "type": condition.type.value,
            "status": condition.status,
            "observedGeneration": generation,
            "lastTransitionTime": _transition_time(condition, previous_by_type.get(condition.type.value, {}), now),
            "reason": str(condition.reason),
            "message": _format_message(condition),
        }
        for condition in sorted(conditions, key=lambda c: type_order.index(c.type))
    ]


def to_single_line(text: str, limit: int = MAX_MESSAGE) -> str:
    """Join the lines of `text` to one line of at most `limit` characters.

    Indented lines, such as the lines of a table, are omitted.
    """
    first, *remaining = text.strip().splitlines() or [""]
    return _truncate("; ".join([first, *(line for line in remaining if line.strip() and not line[0].isspace())]), limit)


def format_timestamp(moment: datetime) -> str:
    """Return the time in the form of RFC 3339, in UTC with whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _format_message(condition: Condition) -> str:
    if condition.type in (ConditionType.CONFIG_VALID, ConditionType.PLANNED):
        return _truncate(condition.message, MAX_MULTILINE_MESSAGE)
    return to_single_line(condition.message)


def _truncate(text: str, limit: int) -> str:
    # The API server changes text that is not valid UTF-8. The stored text would then always differ from ours.
    text = text.encode(errors="replace").decode()
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def _transition_time(condition: Condition, previous: Mapping[str, Any], now: datetime) -> str:
    unchanged_since = previous.get("lastTransitionTime") if previous.get("status") == condition.status else None
    return str(unchanged_since) if unchanged_since else format_timestamp(now)
