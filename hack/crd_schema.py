# SPDX-License-Identifier: Apache-2.0
"""OpenAPI schemas of dataclasses, for the CRD: from annotations, `schema_field`, and the docstrings below fields.

The docstring of a field becomes its description, and the variable RULES of a class becomes its CEL rules.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any

from quire_spec.documents.field_schema import FieldSchema, Rule, schema_of

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}
_KEYWORDS = {
    "list_type": "x-kubernetes-list-type",
    "map_keys": "x-kubernetes-list-map-keys",
    "preserve_unknown_fields": "x-kubernetes-preserve-unknown-fields",
    "rules": "x-kubernetes-validations",
}
"""Names of keywords that differ from those of OpenAPI in more than the case."""


def object_schema(cls: type, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the schema of a dataclass. A name that is a keyword of Python ends with an underscore in the class.

    Raises:
        TypeError: an annotation has no schema; the message names the class and the field.
    """
    hints, texts = typing.get_type_hints(cls), _descriptions(cls)
    fields = {f.name.rstrip("_"): f for f in dataclasses.fields(cls) if f.name not in without}
    schema: dict[str, Any] = {"type": "object"}
    if required := [name for name, field in fields.items() if _is_required(field)]:
        schema["required"] = required
    if rules := getattr(cls, "RULES", ()):
        schema["x-kubernetes-validations"] = [rule._asdict() for rule in rules]
    schema["properties"] = {}
    for name, field in fields.items():
        try:
            schema["properties"][name] = _field_schema(field, hints[field.name], texts.get(field.name))
        except TypeError as error:
            raise TypeError(f"{cls.__name__}.{field.name}: {error}") from error
    return schema


def _descriptions(cls: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass, with those that it inherits."""
    bases = [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    return {name: text for base in bases for name, text in field_docstrings(base).items()}


@functools.cache
def field_docstrings(cls: type) -> Mapping[str, str]:
    """Return the docstrings below the fields of a class, each as one line."""
    (body,) = (node.body for node in ast.parse(inspect.cleandoc(inspect.getsource(cls))).body)  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _field_schema(field: "dataclasses.Field[Any]", hint: Any, text: str | None) -> dict[str, Any]:
    declared = schema_of(field)
    schema = _type_schema(declared.type or hint, declared)
    if (default := _crd_default(field, declared)) is not None:
        schema["default"] = default
    schema |= _keywords(declared.keywords)
    if text is not None:
        schema["description"] = text
    return schema


def _type_schema(hint: Any, declared: FieldSchema) -> dict[str, Any]:
    hint = getattr(hint, "__supertype__", hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if set(args) == {int, str}:
            return {"x-kubernetes-int-or-string": True}
        (hint,) = (arg for arg in args if arg is not types.NoneType)
        return _type_schema(hint, declared)
    if origin in (tuple, list):
        return {
            "type": "array",
            "items": _type_schema(args[0], FieldSchema(without=declared.without)) | _keywords(declared.items),
        }
    if origin in (dict, Mapping) or hint is dict:
        schema: dict[str, Any] = {"type": "object"}
        if declared.items:
            schema["additionalProperties"] = _type_schema(args[1], FieldSchema()) | _keywords(declared.items)
        return schema
    if dataclasses.is_dataclass(hint):
        return object_schema(typing.cast(type, hint), declared.without)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"type": "string", "enum": [member.value for member in hint]}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    raise TypeError(f"{hint!r} has no OpenAPI schema; declare its type in the CRD with schema_field(type=...)")


def _crd_default(field: "dataclasses.Field[Any]", declared: FieldSchema) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
        return {} if dataclasses.is_dataclass(value) else value or None
    default = field.default
    if default is dataclasses.MISSING or default == () or dataclasses.is_dataclass(default):
        return None
    if isinstance(default, Enum):
        return default.value
    return list(default) if isinstance(default, tuple) else default


def _keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    return {_openapi_name(name): _keyword_value(value) for name, value in keywords.items()}


def _keyword_value(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    return [entry._asdict() if isinstance(entry, Rule) else entry for entry in value]


def _openapi_name(name: str) -> str:
    first, *others = name.split("_")
    return _KEYWORDS.get(name, first + "".join(part.capitalize() for part in others))
