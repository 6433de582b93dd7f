# SPDX-License-Identifier: Apache-2.0
"""How far a download is, as fields of status.cache and in words. Changed seldom: each change is a write of the status.
Pure: the clock is an argument."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from quire_operator.reconcile.conditions import timestamp
from quire_spec.documents.download_progress import DownloadProgress, format_bytes

LEAST_S = 10.0
"""Between two changes."""
MOST_S = 30.0
"""After which what is told is renewed, however little came."""
STEP = 5
"""Percent that are told sooner than that."""
STALE_S = 120.0
"""Numbers that could not be renewed for so long are told no longer: nobody knows whether they still hold."""

_FIELDS = ("bytes", "totalBytes", "progress", "bytesPerSecond", "at")


def fields(
    found: DownloadProgress | None, planned: int | None, before: Mapping[str, Any], now: datetime
) -> dict[str, Any]:
    """Fields of status.cache of a download that is under way; empty while nothing is known.

    `found` is None when its pod did not answer; `planned` is the size of the weights' files by the plan, for places
    that do not say it; `before` is status.cache as it is now.
    """
    kept = {name: before[name] for name in _FIELDS if name in before} if before.get("state") == "Downloading" else {}
    age = _age_s(kept, now)
    if age is None:
        kept = {}
    elif 0 <= age < LEAST_S:
        return kept
    if found is None:
        return kept if age is not None and 0 <= age < STALE_S else {}
    total = found.total or planned
    made = _written(DownloadProgress(found.bytes, total, found.bytes_per_s), now)
    if age is not None and 0 <= age < MOST_S and abs(_percent(made) - _percent(kept)) < STEP:
        return kept
    return made


def words(cache: Mapping[str, Any]) -> str:
    """What the fields say; empty when they say nothing."""
    if "at" not in cache:
        return ""
    size, total, rate = (_number(cache.get(name)) for name in ("bytes", "totalBytes", "bytesPerSecond"))
    found = DownloadProgress(size or 0, total, rate)
    share = "" if total is None else f" of {format_bytes(total)} ({found.percent}%)"
    return ", ".join([f"{format_bytes(found.bytes)}{share}", *_speed(found)])


def _speed(found: DownloadProgress) -> list[str]:
    over = found.total is not None and found.bytes >= found.total
    if over:
        return ["which are being checked"]
    if found.bytes_per_s is None:
        return []
    if found.bytes_per_s == 0:
        return ["nothing comes now"]
    left = [] if found.eta_s is None else [f"about {_duration(found.eta_s)} left"]
    return [f"{format_bytes(found.bytes_per_s)}/s", *left]


def _duration(seconds: int) -> str:
    if seconds < 90:
        return f"{seconds} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _written(found: DownloadProgress, now: datetime) -> dict[str, Any]:
    made = {
        "bytes": str(found.bytes),
        "totalBytes": None if found.total is None else str(found.total),
        "progress": None if found.percent is None else f"{found.percent}%",
        "bytesPerSecond": None if found.bytes_per_s is None else str(found.bytes_per_s),
        "at": timestamp(now),
    }
    return {name: value for name, value in made.items() if value is not None}


def _percent(cache: Mapping[str, Any]) -> int:
    """A total that becomes known is a step."""
    found = _number(str(cache.get("progress", "")).removesuffix("%"))
    return -STEP if found is None else found


def _number(text: Any) -> int | None:
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() else None


def _age_s(cache: Mapping[str, Any], now: datetime) -> float | None:
    """Since when the fields are what they are; None when they do not say it."""
    try:
        at = datetime.fromisoformat(str(cache.get("at", "")))
    except ValueError:
        return None
    return (now - at).total_seconds() if at.tzinfo else None
