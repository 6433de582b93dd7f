# SPDX-License-Identifier: Apache-2.0
"""Converts HTTP error responses to QuireErrors. If the server requests a delay (Retry-After), the error contains it.
Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from quire_spec.errors import AccessDenied, Unavailable

_MAX_RETRY_AFTER_S = 86400.0


def error_from_status(source: str, status: int, headers: Mapping[str, str], code: str = "") -> Unavailable:
    """Return the error for a failed request that can succeed if it is sent again later. `code` is the error code of the
    source itself."""
    if status in (401, 403):
        return AccessDenied(f"{source}: HTTP {status}{code}; the source's secret is missing, wrong, or lacks access")
    delay_s = parse_retry_after(headers.get("Retry-After"), datetime.now(UTC))
    retry_hint = "" if delay_s is None else f"; the server requests a delay of {delay_s:.0f} s"
    return Unavailable(f"{source}: HTTP {status}{code}{retry_hint}", delay_s)


def parse_retry_after(value: str | None, now: datetime) -> float | None:
    """Return the delay that a Retry-After header requests, in seconds.

    The result is at most one day. It is None if the header contains neither a number nor a date.

    Source: RFC 9110, section 10.2.3.
    """
    text = (value or "").strip()
    if text.isascii() and text.isdecimal():
        return min(float(text), _MAX_RETRY_AFTER_S)
    try:
        retry_at = parsedate_to_datetime(text)
    except ValueError:
        return None
    # If the zone of a date is -0000, the date is parsed without a zone. It means UTC.
    delay = (retry_at if retry_at.tzinfo else retry_at.replace(tzinfo=UTC)) - now
    return min(max(delay.total_seconds(), 0.0), _MAX_RETRY_AFTER_S)
