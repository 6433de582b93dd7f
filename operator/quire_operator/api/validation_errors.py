# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with an LLMService file: problems with path, value, rule and fix, and the error that carries them.

Found by schema.py, rules.py and serve.py; shown by the commands. Knows nothing of YAML or of CEL.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from quire_spec.errors import ConfigError

FieldPath = tuple[str | int, ...]
"""Where a field is: keys and list indexes from the document's root."""


class _Absent:
    """The value of a problem that is about a field which is not there."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, said so that it can be put right without looking anything up."""

    path: FieldPath
    """The field that is wrong."""
    value: object
    """What was found there; ABSENT when nothing was."""
    rule: str
    """What must hold."""
    fix: str
    """What to do."""
    suggestion: FieldPath | None = None
    """The field that was probably meant, for an unknown one: rules about that field are not judged too."""

    def __str__(self) -> str:
        value_text = "" if self.value is ABSENT else f" {format_value(self.value)}:"
        return f"{format_path(self.path)}:{value_text} {self.rule}; {self.fix}"

    def to_json(self) -> dict[str, Any]:
        """Path, value (absent when there is none), rule and fix."""
        value = {} if self.value is ABSENT else {"value": self.value}
        return {"path": format_path(self.path), **value, "rule": self.rule, "fix": self.fix}


class InvalidService(ConfigError):
    """A document is not an LLMService that can be used; the message has a line for each problem."""

    def __init__(self, problems: Iterable[Problem], location: Callable[[FieldPath], str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{location(problem.path)}: {problem}" for problem in self.problems))


def sorted_unique(problems: Iterable[Problem]) -> list[Problem]:
    """The problems sorted by path, each once; list entries by number."""
    unique = {(problem.path, problem.rule): problem for problem in problems}
    return sorted(unique.values(), key=lambda p: ([(isinstance(k, str), k) for k in p.path], p.rule))


def format_path(path: FieldPath) -> str:
    """The path as people write it: spec.adapters[0].source; keys that hold dots or slashes in quotes."""
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
    """A value as in the file, cut to a length that fits a line."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
