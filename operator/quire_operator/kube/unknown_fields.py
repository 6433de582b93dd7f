# SPDX-License-Identifier: Apache-2.0
"""Fields that the API server does not know. Called by api_client.py and errors.py.

Server-side apply rejects every manifest that contains an unknown field: the API server returns the internal error
"field not declared in schema". A user's podTemplate can contain misspelt fields, or fields that are newer than the API
server.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

FieldPath = tuple[str, ...]
"""Path from the root of an object to a field. It consists of the names of the fields on the way, without list
indexes."""

_LIST_INDEX = r'\[(?:"(?:[^"\\]|\\.)*"|[^\]"])*\]'
"""The index of an entry: its number, or the fields that identify it, such as [name="server"]."""
_UNKNOWN_FIELD = re.compile(rf"((?:\.[A-Za-z0-9]+|{_LIST_INDEX})+): field not declared in schema")


def unknown_fields(status: int, reason: str) -> frozenset[FieldPath]:
    """Return the fields that a response reports as unknown."""
    paths = _UNKNOWN_FIELD.findall(reason) if status == 500 else []
    return frozenset(tuple(re.sub(_LIST_INDEX, "", path)[1:].split(".")) for path in paths)


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
