# SPDX-License-Identifier: Apache-2.0
"""Comparison of a manifest with the live object.

If an apply would change nothing, the applier can skip it. Pure. Used by the applier.

Some changes do not count as differences: an API server adds defaults and normalizes quantities, and other clients can
add entries to lists that have keys.
"""

from collections.abc import Mapping
from typing import Any

from quire_operator.api.quantity import to_decimal

_LIST_KEYS = ("name", "mountPath", "containerPort", "port", "uid", "type", "topologyKey", "ip")
"""Fields that can identify the entries of a list, in the order in which they are tried."""
_ATOMIC_LISTS = (
    "tolerations",
    "args",
    "command",
    "ingress",
    "egress",
    "from",
    "to",
    "rules",
    "triggers",
    "metrics",
    "parentRefs",
)
"""Lists that server-side apply replaces as a whole. They must contain only the entries of the manifest."""


def is_up_to_date(desired: Any, live: Any, field: str = "", atomic: bool = False) -> bool:
    """Whether `live` contains all values of `desired`.

    `field` is the name of the field that contains these values. If `atomic` is true, a list in `live` must have no
    additional entries.
    """
    if isinstance(desired, Mapping):
        if not isinstance(live, Mapping):
            # The API server may omit an empty object.
            return not desired and live is None
        return all(is_up_to_date(item, live.get(key), key, atomic) for key, item in desired.items())
    if isinstance(desired, list):
        return _list_is_up_to_date(desired, live, atomic or field in _ATOMIC_LISTS)
    return bool(desired == live) or _is_same_quantity(desired, live) or (desired in ("", 0, False) and live is None)


def _list_is_up_to_date(desired: list[Any], live: Any, atomic: bool) -> bool:
    if live is None:
        return not desired
    if not isinstance(live, list):
        return False
    key = None if atomic else _list_key(desired)
    if key is None:
        return len(desired) == len(live) and all(
            is_up_to_date(w, f, "", atomic) for w, f in zip(desired, live, strict=True)
        )
    return all(
        any(f.get(key) == w[key] and is_up_to_date(w, f) for f in live if isinstance(f, Mapping)) for w in desired
    )


def _list_key(entries: list[Any]) -> str | None:
    if not entries or not all(isinstance(entry, Mapping) for entry in entries):
        return None
    return next((key for key in _LIST_KEYS if all(key in entry for entry in entries)), None)


def _is_same_quantity(desired: Any, live: Any) -> bool:
    if not isinstance(desired, str) or not isinstance(live, str | int):
        return False
    return to_decimal(desired) is not None and to_decimal(desired) == to_decimal(str(live))
