# SPDX-License-Identifier: Apache-2.0
"""Converts `response_format`, a constraint in the form of the OpenAI API, to `structured_outputs`."""

from collections.abc import Mapping
from typing import Any

from quire_server.openai.errors import ApiError
from quire_server.openai.http.ignored_fields import IgnoredFields
from quire_spec.errors import truncated_repr

_SCHEMA_FIELDS = {"schema": "json_object", "json_schema": "json_schema"}
"""Fields that contain a schema, and their types. The field of json_object is an extension of llama.cpp and others."""
_DEFINITION_FIELDS = frozenset({"name", "description", "schema", "strict"})


def check_response_format(response_format: object, ignored: IgnoredFields) -> None:
    """Record the fields of `response_format` that are not known. The fields of a structural tag are a grammar, whose
    compiler checks them."""
    if isinstance(response_format, Mapping) and response_format.get("type") != "structural_tag":
        ignored.check(response_format, {"type", *_SCHEMA_FIELDS}, "response_format.")
        ignored.check(response_format.get("json_schema"), _DEFINITION_FIELDS, "response_format.json_schema.")


def merge_response_format(response_format: Mapping[str, Any] | None, structured_outputs: Any) -> dict[str, Any]:
    """Translate `response_format` into a constraint, add the constraint to `structured_outputs`, and return both. The
    result is empty if there is no constraint.

    A request can set both fields, because its `structured_outputs` can contain options, such as disable_any_whitespace.

    Raises:
        ApiError: the format is not one of text, json_object, json_schema and structural_tag, or has no schema.
    """
    constraint = _constraint(response_format) if response_format is not None else {}
    if not constraint:
        return {}
    if structured_outputs is None:
        return {"structured_outputs": constraint}
    if not isinstance(structured_outputs, Mapping):
        raise ApiError(400, "structured_outputs: must be an object")
    return {"structured_outputs": {**structured_outputs, **constraint}}


def _constraint(response_format: Mapping[str, Any]) -> dict[str, Any]:
    format_type = response_format.get("type")
    for name, own_type in _SCHEMA_FIELDS.items():
        if response_format.get(name) is not None and format_type in {"text", *_SCHEMA_FIELDS.values()} - {own_type}:
            raise ApiError(400, f"response_format: {name} is a field of the type {own_type}, not of {format_type}")
    if format_type == "text":
        return {}
    if format_type == "json_object":
        schema = response_format.get("schema")
        return {"json_object": True} if schema is None else _json_schema(schema, "schema")
    if format_type == "json_schema":
        definition = response_format.get("json_schema")
        schema = definition.get("schema") if isinstance(definition, Mapping) else None
        return _json_schema(schema, "json_schema.schema")
    if format_type == "structural_tag":
        return {"structural_tag": {name: value for name, value in response_format.items() if name != "type"}}
    raise ApiError(
        400,
        "response_format: type must be text, json_object, json_schema or structural_tag, got "
        f"{truncated_repr(format_type)}",
    )


def _json_schema(schema: object, path: str) -> dict[str, Any]:
    if not isinstance(schema, Mapping | bool):
        raise ApiError(400, f"response_format: {path} must be an object, got {truncated_repr(schema)}")
    return {"json": schema}
