# SPDX-License-Identifier: Apache-2.0
"""holds(): whether an object on the server is as it was wanted, so that nothing has to be written. Pure.

A server fills in defaults, writes quantities its own way, and lets others add entries to lists that have keys; none of
that is a difference. An older server drops fields that it does not know: that looks like a difference, and costs one
apply that changes nothing.
"""

from collections.abc import Mapping
from typing import Any

from quire_operator.quantity import exact

_KEYS = ("name", "mountPath", "containerPort", "port", "uid", "type", "topologyKey", "ip")
"""Fields by which entries of a list are told apart, in the order in which they are tried."""
_ATOMIC = ("tolerations", "args", "command", "ingress", "egress", "from", "to", "rules", "triggers", "metrics")
"""Lists that server-side apply replaces as a whole: nobody can add an entry beside ours."""


def holds(wanted: Any, found: Any, field: str = "", atomic: bool = False) -> bool:
    """Whether `found` has everything that `wanted` says.

    `field` is the name of the field that they are values of; in an `atomic` one lists have no entries but ours.
    """
    if isinstance(wanted, Mapping):
        if not isinstance(found, Mapping):
            # What is empty may be left out.
            return not wanted and found is None
        return all(holds(item, found.get(key), key, atomic) for key, item in wanted.items())
    if isinstance(wanted, list):
        return _list_holds(wanted, found, atomic or field in _ATOMIC)
    return bool(wanted == found) or _same_quantity(wanted, found) or (wanted in ("", 0, False) and found is None)


def _list_holds(wanted: list[Any], found: Any, atomic: bool) -> bool:
    if found is None:
        return not wanted
    if not isinstance(found, list):
        return False
    key = None if atomic else _key(wanted)
    if key is None:
        return len(wanted) == len(found) and all(holds(w, f, "", atomic) for w, f in zip(wanted, found, strict=True))
    return all(any(f.get(key) == w[key] and holds(w, f) for f in found if isinstance(f, Mapping)) for w in wanted)


def _key(entries: list[Any]) -> str | None:
    if not entries or not all(isinstance(entry, Mapping) for entry in entries):
        return None
    return next((key for key in _KEYS if all(key in entry for entry in entries)), None)


def _same_quantity(wanted: Any, found: Any) -> bool:
    if not isinstance(wanted, str) or not isinstance(found, str | int):
        return False
    return exact(wanted) is not None and exact(wanted) == exact(str(found))
