# SPDX-License-Identifier: Apache-2.0
"""The progress of a download, converted to fields of status.cache and to text.

The fields are not updated often, because the status must be written for each update.

The module is pure: the current time is an argument. Called by model_cache.py.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from quire_operator.controller.status.conditions import format_timestamp
from quire_spec.documents.download_progress import DownloadProgress, format_bytes

MIN_INTERVAL_S = 10.0
"""Minimum number of seconds between two updates of the fields."""
MAX_INTERVAL_S = 30.0
"""After this many seconds, the fields are updated even if there was little progress."""
MIN_PERCENT_STEP = 5
"""If the progress since the last update is at least this many percentage points, the fields are updated earlier."""
STALE_S = 120.0
"""If the pod has not responded for this many seconds, the fields are removed."""

_FIELDS = ("bytes", "totalBytes", "progress", "bytesPerSecond", "at")


def to_fields(
    progress: DownloadProgress | None, planned_bytes: int | None, previous: Mapping[str, Any], now: datetime
) -> dict[str, Any]:
    """Return the fields of status.cache for a running download. They are empty if the progress is not known.

    If the pod did not respond, `progress` is None. `planned_bytes` is used if the source does not report a size.
    """
    unchanged = (
        {name: previous[name] for name in _FIELDS if name in previous} if previous.get("state") == "Downloading" else {}
    )
    age = _age_s(unchanged, now)
    if age is None:
        unchanged = {}
    elif 0 <= age < MIN_INTERVAL_S:
        return unchanged
    if progress is None:
        return unchanged if age is not None and 0 <= age < STALE_S else {}
    total = progress.total or planned_bytes
    updated = _status_fields(DownloadProgress(progress.bytes, total, progress.bytes_per_s), now)
    if (
        age is not None
        and 0 <= age < MAX_INTERVAL_S
        and abs(_percent(updated) - _percent(unchanged)) < MIN_PERCENT_STEP
    ):
        return unchanged
    return updated


def describe(cache: Mapping[str, Any]) -> str:
    """Return the fields of status.cache as text. The text is empty if the fields do not contain numbers."""
    if "at" not in cache:
        return ""
    size, total, rate = (_parse_number(cache.get(name)) for name in ("bytes", "totalBytes", "bytesPerSecond"))
    progress = DownloadProgress(size or 0, total, rate)
    total_text = "" if total is None else f" of {format_bytes(total)} ({progress.percent}%)"
    return ", ".join([f"{format_bytes(progress.bytes)}{total_text}", *_describe_rate(progress)])


def _describe_rate(progress: DownloadProgress) -> list[str]:
    is_complete = progress.total is not None and progress.bytes >= progress.total
    if is_complete:
        return ["which are being checked"]
    if progress.bytes_per_s is None:
        return []
    if progress.bytes_per_s == 0:
        return ["nothing comes now"]
    eta_text = [] if progress.eta_s is None else [f"about {_format_duration(progress.eta_s)} left"]
    return [f"{format_bytes(progress.bytes_per_s)}/s", *eta_text]


def _format_duration(seconds: int) -> str:
    if seconds < 90:
        return f"{seconds} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _status_fields(progress: DownloadProgress, now: datetime) -> dict[str, Any]:
    values = {
        "bytes": str(progress.bytes),
        "totalBytes": None if progress.total is None else str(progress.total),
        "progress": None if progress.percent is None else f"{progress.percent}%",
        "bytesPerSecond": None if progress.bytes_per_s is None else str(progress.bytes_per_s),
        "at": format_timestamp(now),
    }
    return {name: value for name, value in values.items() if value is not None}


def _percent(cache: Mapping[str, Any]) -> int:
    """Return the percentage in the status. If the status does not contain a percentage, return a number so low that the
    first percentage is always written.
    """
    percent = _parse_number(str(cache.get("progress", "")).removesuffix("%"))
    return -MIN_PERCENT_STEP if percent is None else percent


def _parse_number(text: Any) -> int | None:
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() else None


def _age_s(cache: Mapping[str, Any], now: datetime) -> float | None:
    """Return the age of the fields, or None if it is not known."""
    try:
        at = datetime.fromisoformat(str(cache.get("at", "")))
    except ValueError:
        return None
    return (now - at).total_seconds() if at.tzinfo else None
