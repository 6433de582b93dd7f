# SPDX-License-Identifier: Apache-2.0
"""A weighted sum of adapters, in the place of the name of an adapter: `a:0.7,b:0.3`.

The sum is linear: the deltas of all adapters, each multiplied by its weight, are added to the base model, as with
PEFT's `add_weighted_adapter(..., combination_type="cat")`.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.errors import InvalidArgument, truncated_repr

MAX_PARTS = 8
"""Maximum number of adapters in a sum."""
MAX_WEIGHT = 100.0
"""Maximum size of a weight; weights can be negative."""
_PREFIX = "sum:"


@dataclass(frozen=True, slots=True)
class WeightedAdapter:
    """An adapter of a sum, and its weight."""

    name: AdapterName
    weight: float


def parse_sum(text: str) -> tuple[WeightedAdapter, ...]:
    """Parse a sum of adapters. Return an empty tuple if `text` is the name of a model.

    Raises:
        InvalidArgument: a part is not `name:weight`, a weight is not finite or too large, a name occurs twice, or
            there are too many parts.
    """
    if ":" not in text and "," not in text:
        return ()
    parts = text.split(",")
    if len(parts) > MAX_PARTS:
        raise InvalidArgument(f"adapters {truncated_repr(text)}: {len(parts)} parts, at most {MAX_PARTS} are allowed")
    adapters = tuple(_parse_part(text, part) for part in parts)
    names = [adapter.name for adapter in adapters]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(f"adapters {truncated_repr(text)}: {name!r} occurs twice; add its weights")
    return adapters


def _parse_part(text: str, part: str) -> WeightedAdapter:
    name, _, number = part.partition(":")
    try:
        weight = float(number) if number.isascii() and "_" not in number and number == number.strip() else math.nan
    except ValueError:
        weight = math.nan
    if not name or not abs(weight) <= MAX_WEIGHT:
        raise InvalidArgument(
            f"adapters {truncated_repr(text)}: {truncated_repr(part)} must be NAME:WEIGHT, with a weight from "
            f"{-MAX_WEIGHT:g} to {MAX_WEIGHT:g}, as in 'a:0.7,b:0.3'"
        )
    return WeightedAdapter(AdapterName(name), weight)


def sum_digest(parts: Sequence[tuple[AdapterDigest, float]]) -> AdapterDigest:
    """Return the digest of a sum of adapters, given the digests of the adapters and their weights. The order does not
    count."""
    text = json.dumps(sorted((digest, float(weight)) for digest, weight in parts))
    return AdapterDigest(f"{_PREFIX}{hashlib.sha256(text.encode()).hexdigest()}")


def is_sum(digest: AdapterDigest) -> bool:
    """Return whether a digest is that of a sum of adapters."""
    return digest.startswith(_PREFIX)
