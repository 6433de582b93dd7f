# SPDX-License-Identifier: Apache-2.0
"""Conversion of Kubernetes quantities, such as 4Gi, 512Mi or 1.5G, to numbers. Called by cel_rules.py for CEL's
function quantity(), by the planner and by the controller.
"""

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

QUANTITY: Mapping[str, Any] = {
    "min_length": 1,
    "max_length": 32,
    "pattern": r"^[1-9][0-9]*(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$",
}
"""Keywords of a field that contains a number of bytes, for `schema_field`."""
_FACTORS = {
    "": Decimal(1), "m": Decimal("0.001"), "u": Decimal("0.000001"), "n": Decimal("0.000000001"),
    **{suffix: Decimal(1000 ** (i + 1)) for i, suffix in enumerate("kMGTPE")},
    **{f"{suffix}i": Decimal(1024 ** (i + 1)) for i, suffix in enumerate("KMGTPE")},
}  # fmt: skip
_QUANTITY = re.compile(r"([+-]?[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)(m|u|n|[kMGTPE]|[KMGTPE]i)?", re.ASCII)


def to_bytes(text: str) -> int:
    """Return the number of bytes of a quantity. It is rounded up, as in Kubernetes.

    Raises:
        ValueError: the text is not a quantity.
    """
    if (number := to_decimal(text)) is None:
        raise ValueError(f"{text!r} is not a quantity")
    return math.ceil(number)


def to_decimal(text: str) -> Decimal | None:
    """Return the exact number of a quantity, such as 500m, 2, 1Gi or 1e3.

    If the text is not a quantity, return None.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    return Decimal(match[1]) * _FACTORS[match[2] or ""]
