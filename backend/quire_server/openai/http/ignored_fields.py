# SPDX-License-Identifier: Apache-2.0
"""The fields of a request that the server does not know. They are ignored, and named in a header of the response, or
they are rejected, if the server is configured so."""

import difflib
import re
from collections.abc import Mapping, Set
from typing import Any

from quire_server.openai.errors import ApiError
from quire_spec.errors import truncated_repr

HEADER = b"x-quire-ignored-fields"
MAX_NAMES = 16
MAX_HEADER_BYTES = 512
_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9_.-]")


class IgnoredFields:
    """The ignored fields of one request."""

    def __init__(self, rejects: bool = False) -> None:
        """`rejects` is True if a field that is not known is an error."""
        self._rejects = rejects
        self._names: dict[str, None] = {}

    def check(self, value: object, known: Set[str], path: str = "") -> None:
        """Record the fields of an object that are not among `known`. A value that is not an object has no fields, and a
        field whose value is null counts as missing. `path` is the name of the object with a dot; empty for the body.

        Raises:
            ApiError: the request has such a field, and unknown fields are rejected.
        """
        if not isinstance(value, Mapping) or value.keys() <= known:
            return
        for name, field_value in value.items():
            if name not in known and field_value is not None:
                self._add(name, known, path)

    def header(self) -> list[tuple[bytes, bytes]]:
        """Return the header that names the fields: at most MAX_NAMES names, and MAX_HEADER_BYTES bytes. The list is
        empty if no field was ignored."""
        if not self._names:
            return []
        text = ",".join(self._names)
        if len(text) > MAX_HEADER_BYTES:
            # Names are at most as long as the header. Therefore, at least one fits.
            text = text[: MAX_HEADER_BYTES + 1].rpartition(",")[0]
        return [(HEADER, text.encode())]

    def __bool__(self) -> bool:
        return bool(self._names)

    def _add(self, name: Any, known: Set[str], path: str) -> None:
        if self._rejects:
            matches = difflib.get_close_matches(str(name)[:80].lower(), known, n=1)
            hint = f"did you mean {path}{matches[0]}?" if matches else "leave it out"
            shown = truncated_repr(f"{path}{name}")
            raise ApiError(400, f"{shown}: is not a field of this request; {hint}", f"{path}{name}"[:80])
        if len(self._names) < MAX_NAMES:
            self._names[_NOT_ALLOWED.sub("_", f"{path}{name}"[:MAX_HEADER_BYTES]) or "_"] = None


def names_of(fields_type: Any) -> frozenset[str]:
    """Return the names of the fields of a Struct."""
    return frozenset(fields_type.__struct_fields__)
