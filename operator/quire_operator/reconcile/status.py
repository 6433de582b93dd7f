# SPDX-License-Identifier: Apache-2.0
"""status(): the whole .status of a service, from what is wanted and what was seen. Pure: the clock is an argument."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from quire_operator.reconcile.observed import Observed, Verdict
from quire_operator.service import LLMService


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
    raise NotImplementedError
