# SPDX-License-Identifier: Apache-2.0
"""Kubernetes quantities as numbers: 4Gi, 512Mi, 1.5G. Called by cel_rules.py (CEL's quantity), plan and controller."""

import math
import re
from decimal import Decimal

_FACTORS = {
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
}  # fmt: skip
_ALL_FACTORS = {
    "": Decimal(1), "m": Decimal("0.001"), "u": Decimal("0.000001"), "n": Decimal("0.000000001"),
    **{suffix: Decimal(factor) for suffix, factor in _FACTORS.items()},
    "P": Decimal(10**15), "E": Decimal(10**18), "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip
_QUANTITY = re.compile(r"([+-]?[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)(m|u|n|[kMGTPE]|[KMGTPE]i)?", re.ASCII)


def to_bytes(text: str) -> int:
    """Return the bytes of a quantity that matches the CRD's pattern, rounded up as Kubernetes does."""
    for suffix, factor in _FACTORS.items():
        if text.endswith(suffix):
            return math.ceil(Decimal(text.removesuffix(suffix)) * factor)
    return math.ceil(Decimal(text))


def to_decimal(text: str) -> Decimal | None:
    """Return the exact number of a quantity such as 500m, 2, 1Gi or 1e3, or None for other text."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    return Decimal(match[1]) * _ALL_FACTORS[match[2] or ""]
