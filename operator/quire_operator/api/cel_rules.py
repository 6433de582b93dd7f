# SPDX-License-Identifier: Apache-2.0
"""CEL validation, which evaluates every x-kubernetes-validations rule of the CRD in the same way as an API server.

The module is pure: it takes a schema and a value with defaults, and yields problems. Called by crd.py. The rules use
only those features of CEL that both the library and every current API server support. They do not use the optional
syntax (`.?`). The only Kubernetes extension that they use is quantity(). This module implements quantity(). A rule that
uses oldSelf is evaluated only on an update.
"""

import functools
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from quire_operator.api.quantity import to_bytes
from quire_operator.api.validation_errors import ABSENT, FieldPath, Problem
from quire_spec.errors import Internal

Schema = Mapping[str, Any]
InvalidPaths = frozenset[FieldPath]
"""Paths of fields for which openapi_schema.py has found a problem."""

_FIELD_REFERENCE = re.compile(r"\b(?:oldSelf|self)((?:\.[A-Za-z_]\w*\b(?!\())+)")


@dataclass(frozen=True, slots=True)
class CelRule:
    """One rule of the CRD."""

    expression: str
    requirement: str
    """What the rule requires. This is the part of the rule's message before `; `. Normally, its first word is the name
    of the invalid field.
    """
    fix: str
    """How to fix the value. This is the part of the rule's message after `; `."""

    @classmethod
    def from_crd(cls, entry: Mapping[str, str]) -> "CelRule":
        """Parse an entry of x-kubernetes-validations."""
        requirement, _, fix = entry["message"].strip().removesuffix(".").partition("; ")
        return cls(entry["rule"].strip(), requirement, fix)

    @property
    def fields(self) -> list[FieldPath]:
        """Paths of the fields that the rule reads.

        The paths are relative to the rule's schema. They are in the order in which the expression contains them.
        """
        return [tuple(match.group(1)[1:].split(".")) for match in _FIELD_REFERENCE.finditer(self.expression)]

    @property
    def subject(self) -> FieldPath:
        """Path of the invalid field, relative to the rule's schema. It is empty if the value as a whole is invalid."""
        first = tuple(self.requirement.partition(" ")[0].split("."))
        return first if first in self.fields else ()


def iter_problems(
    schema: Schema, value: Any, old: Any = ABSENT, known_problems: Collection[Problem] = (), path: FieldPath = ()
) -> Iterator[Problem]:
    """Yield a problem for each rule that the value violates.

    Values at any depth are checked. The defaults must already have been added to the value.

    `old` is the value that was stored before the update. `known_problems` are the problems that openapi_schema.py
    found. If a rule reads a field that has such a problem, the rule is skipped, so that the same mistake is not
    reported twice.

    Raises:
        Internal: the value is valid for openapi_schema.py, but a rule cannot be evaluated, so the rule is wrong.
    """
    yield from _iter_problems(
        schema, value, old, frozenset(problem.suggestion or problem.path for problem in known_problems), path
    )


def _iter_problems(
    schema: Schema, value: Any, old: Any, invalid_paths: InvalidPaths, path: FieldPath
) -> Iterator[Problem]:
    if entries := schema.get("x-kubernetes-validations", ()):
        # One context for all rules of the value, because the library converts the whole value for each context.
        context = _build_context(value, old)
        for entry in entries:
            yield from _evaluate(CelRule.from_crd(entry), context, value, old, invalid_paths, path)
    if isinstance(value, Mapping):
        fields, additional_schema = schema.get("properties", {}), schema.get("additionalProperties", {})
        for key, item in value.items():
            old_item = old.get(key, ABSENT) if isinstance(old, Mapping) else ABSENT
            yield from _iter_problems(fields.get(key, additional_schema), item, old_item, invalid_paths, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _iter_problems(schema.get("items", {}), item, ABSENT, invalid_paths, (*path, i))


def _evaluate(
    rule: CelRule, context: Any, value: Any, old: Any, invalid_paths: InvalidPaths, path: FieldPath
) -> Iterator[Problem]:
    if ("oldSelf" in rule.expression and old is ABSENT) or _reads_invalid_field(rule, invalid_paths, path):
        return
    try:
        result = _compile(rule.expression).execute(context)
    except Exception as error:  # The library passes on any exception of its Rust code or of a callback.
        if invalid_paths:
            return
        raise Internal(f"rule {rule.expression!r} cannot be evaluated: {error}") from error
    if result is not True:
        yield Problem((*path, *rule.subject), _blamed_value(value, rule.subject), rule.requirement, rule.fix)


def _reads_invalid_field(rule: CelRule, invalid_paths: InvalidPaths, path: FieldPath) -> bool:
    return any(
        (*path, *field)[:n] in invalid_paths for field in rule.fields for n in range(1, len(path) + len(field) + 1)
    )


def _blamed_value(value: Any, field: FieldPath) -> Any:
    for key in field:
        value = value.get(key, ABSENT) if isinstance(value, Mapping) else ABSENT
    # Printing a whole list or object would not help to find the mistake.
    return ABSENT if isinstance(value, Mapping | list) else value


@functools.cache
def _compile(expression: str) -> Any:
    return _load_cel().compile(expression)


def _build_context(value: Any, old: Any) -> Any:
    variables = {"self": value} | ({} if old is ABSENT else {"oldSelf": old})
    return _load_cel().Context(
        variables, {"quantity": to_bytes, "compareTo": lambda left, right: (left > right) - (left < right)}
    )


@functools.cache
def _load_cel() -> ModuleType:
    """Load the compiled module of the package `cel`.

    The package's own __init__ is not imported, because it imports a command line (typer, rich). That would take 0.2 s,
    which is half of the time that `quire validate` needs.
    """
    package = importlib.util.find_spec("cel")
    spec = package and importlib.machinery.PathFinder.find_spec("cel.cel", package.submodule_search_locations)
    if spec is None or spec.loader is None:
        raise Internal("package common-expression-language is not installed; pip install 'quire-llm[operator]'")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return sys.modules.setdefault("cel.cel", module)
