# SPDX-License-Identifier: Apache-2.0
"""Validation problems of an LLMService, and the error that contains them.

A problem consists of path, value, rule and fix. openapi_schema.py, cel_rules.py and the commands create problems, and
the commands print them. The module does not depend on YAML or CEL.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from quire_spec.errors import ConfigError

FieldPath = tuple[str | int, ...]
"""The keys and list indexes that lead from the root of the document to a field."""


class _Absent:
    """Type of ABSENT, the value of a field that does not exist."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a document. It contains the field, its value, the rule that it violates, and a fix."""

    path: FieldPath
    """Path of the invalid field."""
    value: object
    """Value of the field, or ABSENT if the field does not exist."""
    rule: str
    """The rule that the field violates."""
    fix: str
    """How to change the document so that the problem is solved."""
    suggestion: FieldPath | None = None
    """If the field is unknown, this is the path of the field that the user probably meant. CEL rules that read the
    suggested field are skipped.
    """

    def __str__(self) -> str:
        value_text = "" if self.value is ABSENT else f" {format_value(self.value)}:"
        return f"{format_path(self.path)}:{value_text} {self.rule}; {self.fix}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with path, value, rule and fix. If the value is ABSENT, it is omitted."""
        value = {} if self.value is ABSENT else {"value": self.value}
        return {"path": format_path(self.path), **value, "rule": self.rule, "fix": self.fix}


class InvalidService(ConfigError):
    """A document is not a valid LLMService. The message has one line for each problem."""

    def __init__(self, problems: Iterable[Problem], location: Callable[[FieldPath], str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{location(problem.path)}: {problem}" for problem in self.problems))


def sorted_unique(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems sorted by path, and without duplicates. Entries of a list are sorted by their index."""
    unique = {(problem.path, problem.rule): problem for problem in problems}
    return sorted(unique.values(), key=lambda p: ([(isinstance(k, str), k) for k in p.path], p.rule))


def format_path(path: FieldPath) -> str:
    """Format a path, for example as spec.adapters[0].source. Keys that contain dots or slashes are quoted."""
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
    """Format a value as JSON. A text of more than 60 characters is shortened."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
