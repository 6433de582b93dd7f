# SPDX-License-Identifier: Apache-2.0
"""A bad answer by HTTP as the error that it is, with how long the place asks to be left alone. Pure; whoever reads
sources calls it.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from quire_spec.errors import Unavailable

_MAX_RETRY_AFTER_S = 86400.0


def error_from_status(source: str, status: int, headers: Mapping[str, str], code: str = "") -> Unavailable:
    """An answer that may be another one later; `code` is what the place itself calls it."""
    delay_s = parse_retry_after(headers.get("Retry-After"), datetime.now(UTC))
    retry_hint = "" if delay_s is None else f"; it asks for {delay_s:.0f} s of patience"
    return Unavailable(f"{source}: HTTP {status}{code}{retry_hint}", delay_s)


def parse_retry_after(value: str | None, now: datetime) -> float | None:
    """Seconds that a header Retry-After asks to be waited, a day at most; None where it says neither them nor a date.

    Source: RFC 9110, section 10.2.3.
    """
    text = (value or "").strip()
    if text.isascii() and text.isdecimal():
        return min(float(text), _MAX_RETRY_AFTER_S)
    try:
        retry_at = parsedate_to_datetime(text)
    except ValueError:
        return None
    # One of -0000 has no zone, and means UTC.
    delay = (retry_at if retry_at.tzinfo else retry_at.replace(tzinfo=UTC)) - now
    return min(max(delay.total_seconds(), 0.0), _MAX_RETRY_AFTER_S)
