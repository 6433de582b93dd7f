# SPDX-License-Identifier: Apache-2.0
"""Compatibility with API servers that are older than the current Kubernetes. Called by api_client.py and errors.py.

In Kubernetes 1.25 and older, server-side apply rejects every manifest that contains an unknown field. The API server
returns the internal error "field not declared in schema". For example, Kubernetes 1.25 does not support the field
unhealthyPodEvictionPolicy of a PodDisruptionBudget, and a user's podTemplate can contain any newer field.

The operator writes the status with a JSON patch because of Kubernetes 1.20. If an object inside the status was removed,
server-side apply in 1.20 writes null in its place, and the API server then rejects the null. Since 1.21, server-side
apply works for the status too.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

FieldPath = tuple[str, ...]
"""Path from the root of an object to a field. It consists of the names of the fields on the way, without list
indexes."""

_UNKNOWN_FIELD = re.compile(r"\.([A-Za-z0-9.]+): field not declared in schema")
_PRECONDITIONS = ("uid", "generation", "resourceVersion")


def unknown_field(status: int, reason: str) -> FieldPath | None:
    """Return the field that a response reports as unknown; None if it reports none."""
    match = _UNKNOWN_FIELD.search(reason) if status == 500 else None
    return tuple(match[1].split(".")) if match else None


def remove_fields(value: Any, paths: Collection[FieldPath]) -> Any:
    """Return a copy of a JSON value without the fields at `paths`."""
    if not paths:
        return value
    if isinstance(value, list):
        return [remove_fields(item, paths) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: remove_fields(item, {path[1:] for path in paths if path[0] == key and len(path) > 1})
        for key, item in value.items()
        if (key,) not in paths
    }


def status_patch(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a JSON patch that replaces the whole status if uid, generation and resourceVersion are still the same."""
    meta = manifest["metadata"]
    tests = [{"op": "test", "path": f"/metadata/{name}", "value": meta[name]} for name in _PRECONDITIONS]
    return [*tests, {"op": "add", "path": "/status", "value": manifest["status"]}]


def meets_preconditions(manifest: Mapping[str, Any], current: Mapping[str, Any] | None) -> bool:
    """Return whether the object `current` satisfies the preconditions of status_patch(). `current` is None if the
    object does not exist."""
    meta = manifest["metadata"]
    return current is not None and all(current["metadata"].get(name) == meta[name] for name in _PRECONDITIONS)
