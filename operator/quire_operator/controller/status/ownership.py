# SPDX-License-Identifier: Apache-2.0
"""The mark of the operator that owns an LLMService, in status.operator. Pure.

If two operators see the same service, for example one of the whole cluster and one of a namespace, they would undo each
other's writes for ever. Therefore, an operator writes only to services that have its own mark. It marks a service that
has no mark, in a write that fails if another operator was faster. It renews its marks from time to time. If a mark was
not renewed for long, its operator is gone, and another one takes the service over.

The mark contains the identity of an installation, not of a process. After a restart, an upgrade or a reinstallation
with the same name and namespace, the operator continues without a delay.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from quire_operator.controller.status.conditions import format_timestamp

FIELD = "operator"
"""Name of the mark's field in the status."""
RENEW_S, EXPIRE_S = 600.0, 1800.0
"""A mark is renewed when it is older than the first number of seconds. If it is older than the second one, other
operators can take the service over."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which operator owns a service."""

    owner: str
    """Identity of the operator."""
    is_own: bool
    """Whether this operator can write to the service, as soon as it has written `new_mark`."""
    new_mark: Mapping[str, str] | None
    """Mark that this operator must write before anything else. None if its mark is valid, or if it is not the owner."""
    expires_in_s: float
    """Seconds until other operators can take the service over."""


def evaluate_ownership(status: Mapping[str, Any], identity: str, now: datetime) -> Ownership:
    """Return the owner of a service with this status. `identity` is the one of this operator."""
    mark = status.get(FIELD) or {}
    owner, age_s = mark.get("identity", ""), _age_s(mark, now)
    if owner not in ("", identity) and age_s < EXPIRE_S:
        return Ownership(owner, False, None, EXPIRE_S - age_s)
    if owner == identity and age_s < RENEW_S:
        return Ownership(identity, True, None, EXPIRE_S - age_s)
    return Ownership(identity, True, {"identity": identity, "renewedAt": format_timestamp(now)}, EXPIRE_S)


def _age_s(mark: Mapping[str, Any], now: datetime) -> float:
    """Return the age of a mark in seconds. If its time is missing or invalid, the mark has expired."""
    try:
        renewed_at = datetime.fromisoformat(mark["renewedAt"])
        # The clocks of two machines can differ. A time in the future must not be valid for ever.
        return abs((now - renewed_at) / timedelta(seconds=1))
    except (KeyError, TypeError, ValueError):
        return EXPIRE_S
