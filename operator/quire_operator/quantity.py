# SPDX-License-Identifier: Apache-2.0
"""Kubernetes quantities as numbers: 4Gi, 512Mi, 1.5G. Called by rules.py (CEL's quantity) and service.py."""

import math
from decimal import Decimal

_FACTORS = {
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
}  # fmt: skip


def num_bytes(text: str) -> int:
    """Bytes of a quantity that the CRD's pattern has accepted, rounded up as Kubernetes does."""
    for suffix, factor in _FACTORS.items():
        if text.endswith(suffix):
            return math.ceil(Decimal(text.removesuffix(suffix)) * factor)
    return math.ceil(Decimal(text))
