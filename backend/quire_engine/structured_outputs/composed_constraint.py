# SPDX-License-Identifier: Apache-2.0
"""A constraint that is composed of other constraints. It is a grammar in Lark notation, whose rules refer to the other
constraints as @name.

The parsers of chat outputs build it, and the process that checks constraints converts it to a single grammar. This
module does not import any library for grammars.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANSWER = "answer"
"""Name of the part that is the request's own constraint."""
_SPECIAL_CHARACTERS = re.compile(r'[\\"\x00-\x1f\x7f]')
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


@dataclass(frozen=True, slots=True)
class ComposedConstraint:
    """The grammar and its parts."""

    lark: str
    parts: Mapping[str, Mapping[str, Any]]
    """The parts by name. Each part contains the fields of a StructuredOutputsParams as JSON."""

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields as a dict that can be written as JSON."""
        return {"lark": self.lark, "parts": {name: dict(part) for name, part in self.parts.items()}}


def quote(text: str) -> str:
    """Return a Lark string. Lark supports only the escapes used here; json.dumps would write surrogate pairs, which
    Lark does not support."""
    return f'"{_SPECIAL_CHARACTERS.sub(_escape, text)}"'


def _escape(match: re.Match[str]) -> str:
    return _ESCAPES.get(match[0]) or f"\\x{ord(match[0]):02x}"
