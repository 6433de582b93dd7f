# SPDX-License-Identifier: Apache-2.0
"""A bad answer by HTTP as the error that it is, with how long the place asks to be left alone. Pure; whoever reads
sources calls it.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from quire_spec.errors import Unavailable

_MOST_WAIT_S = 86400.0


def refused(where: str, status: int, headers: Mapping[str, str], code: str = "") -> Unavailable:
    """An answer that may be another one later; `code` is what the place itself calls it."""
    wait = retry_after_s(headers.get("Retry-After"), datetime.now(UTC))
    words = "" if wait is None else f"; it asks for {wait:.0f} s of patience"
    return Unavailable(f"{where}: HTTP {status}{code}{words}", wait)


def retry_after_s(value: str | None, now: datetime) -> float | None:
    """Seconds that a header Retry-After asks to be waited, a day at most; None where it says neither them nor a date.

    Source: RFC 9110, section 10.2.3.
    """
    text = (value or "").strip()
    if text.isascii() and text.isdecimal():
        return min(float(text), _MOST_WAIT_S)
    try:
        until = parsedate_to_datetime(text)
    except ValueError:
        return None
    # One of -0000 has no zone, and means UTC.
    wait = (until if until.tzinfo else until.replace(tzinfo=UTC)) - now
    return min(max(wait.total_seconds(), 0.0), _MOST_WAIT_S)
