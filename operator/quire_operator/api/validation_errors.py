# SPDX-License-Identifier: Apache-2.0
"""Validation problems of an LLMService (path, value, rule, fix), and the error that contains them.

openapi_schema.py, cel_rules.py and the commands create problems; the commands print them. Independent of YAML and CEL.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from quire_spec.errors import ConfigError

FieldPath = tuple[str | int, ...]
"""Keys and list indexes from the root of the document to a field."""


class _Absent:
    """Type of ABSENT, the value of a field that does not exist."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a document: field, value, violated rule and fix."""

    path: FieldPath
    """Path of the invalid field."""
    value: object
    """Value of the field; ABSENT if the field is missing."""
    rule: str
    """The rule that the field violates."""
    fix: str
    """Change to the document that removes the problem."""
    suggestion: FieldPath | None = None
    """For an unknown field: path of the field that the user probably meant. CEL rules that read that field are
    skipped."""

    def __str__(self) -> str:
        value_text = "" if self.value is ABSENT else f" {format_value(self.value)}:"
        return f"{format_path(self.path)}:{value_text} {self.rule}; {self.fix}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with path, value, rule and fix; an ABSENT value is omitted."""
        value = {} if self.value is ABSENT else {"value": self.value}
        return {"path": format_path(self.path), **value, "rule": self.rule, "fix": self.fix}


class InvalidService(ConfigError):
    """A document is not a valid LLMService. The message has one line for each problem."""

    def __init__(self, problems: Iterable[Problem], location: Callable[[FieldPath], str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{location(problem.path)}: {problem}" for problem in self.problems))


def sorted_unique(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems sorted by path without duplicates. List entries are sorted by index."""
    unique = {(problem.path, problem.rule): problem for problem in problems}
    return sorted(unique.values(), key=lambda p: ([(isinstance(k, str), k) for k in p.path], p.rule))


def format_path(path: FieldPath) -> str:
    """Format a path like spec.adapters[0].source; keys with dots or slashes are quoted."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        elif key.replace("_", "").replace("-", "").isalnum():
            text += f".{key}" if text else key
        else:
            text += f"[{json.dumps(key)}]"
    return text or "document"


def format_value(value: object) -> str:
    """Format a value as JSON, shortened to 60 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
