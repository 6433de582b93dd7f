# SPDX-License-Identifier: Apache-2.0
"""OpenAPI validation.

The module removes nulls and adds defaults in the same way as an API server, and then checks the value against the
schema.

The module is pure: it takes a schema and a value, and returns a value or yields problems. Called by crd.py;
cel_rules.py contains the CEL rules. As in kubectl, an unknown field is a problem. An API server may drop such a field
without reporting it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
from jsonschema.exceptions import ValidationError

from quire_operator.api.schema_messages import explain_error, field_paths, normalize_name
from quire_operator.api.validation_errors import FieldPath, Problem

Schema = Mapping[str, Any]

_INT_OR_STRING = "x-kubernetes-int-or-string"
_PRESERVE_UNKNOWN = "x-kubernetes-preserve-unknown-fields"


def with_defaults(schema: Schema, value: Any) -> Any:
    """Return a copy of the value as an API server would store it.

    Known fields that are null are removed, and defaults are added.
    """
    if isinstance(value, Mapping):
        fields, additional_schema = schema.get("properties", {}), schema.get("additionalProperties", {})
        present = {key: item for key, item in value.items() if item is not None or key not in fields}
        defaults = {
            name: field["default"] for name, field in fields.items() if "default" in field and name not in present
        }
        return {
            key: with_defaults(fields.get(key, additional_schema), item)
            for key, item in {**present, **defaults}.items()
        }
    if isinstance(value, list):
        return [with_defaults(schema.get("items", {}), item) for item in value]
    return value


def without_defaults(schema: Schema, value: Any) -> Any:
    """Return a copy of the value without the fields that are equal to their default. This is the inverse of
    `with_defaults`.
    """
    if isinstance(value, Mapping):
        fields, additional_schema = schema.get("properties", {}), schema.get("additionalProperties", {})
        pruned = {
            key: (without_defaults(fields.get(key, additional_schema), item), fields.get(key, {}))
            for key, item in value.items()
        }
        return {
            key: item for key, (item, field) in pruned.items() if "default" not in field or item != field["default"]
        }
    if isinstance(value, list):
        return [without_defaults(schema.get("items", {}), item) for item in value]
    return value


def without_unknown_fields(schema: Schema, value: Any) -> Any:
    """Return a copy of the value without the fields that the schema does not have.

    An API server stores the value in this form.
    """
    if isinstance(value, Mapping):
        fields, additional_schema = schema.get("properties", {}), schema.get("additionalProperties", {})
        preserves_unknown = schema.get(_PRESERVE_UNKNOWN) or "properties" not in schema
        return {
            key: without_unknown_fields(fields.get(key, additional_schema), item)
            for key, item in value.items()
            if preserves_unknown or key in fields
        }
    if isinstance(value, list):
        return [without_unknown_fields(schema.get("items", {}), item) for item in value]
    return value


def iter_problems(schema: Schema, value: Any, path: FieldPath = (), validator: Any = None) -> Iterator[Problem]:
    """Yield a problem for each violation of `schema`.

    The defaults must already have been added to the value. `path` is the path of the value in the document. `validator`
    is the result of `build_validator` for the schema, if it is used more than once.
    """
    paths_by_name: dict[str, list[FieldPath]] = {}
    for error in (validator or build_validator(schema)).iter_errors(value):
        if not paths_by_name:
            for field_path in field_paths(schema, path):
                paths_by_name.setdefault(normalize_name(str(field_path[-1])), []).append(field_path)
        if error.validator == "enum" and _has_wrong_type(error.schema, error.instance):
            continue  # The error about the type is more precise.
        error_path = (*path, *error.absolute_path)
        yield from explain_error(
            str(error.validator), error.validator_value, error.instance, error.schema, error_path, paths_by_name
        )
    yield from _duplicates(schema, value, path)


def build_validator(schema: Schema) -> Any:
    """Return the validator of a schema, for `iter_problems`."""
    # OpenAPI 3.0 is based on draft 4 of JSON Schema, in which 1.0 is not an integer. API servers treat 1.0 in the same
    # way.
    extend: Any = jsonschema.validators.extend
    return extend(jsonschema.Draft4Validator, {"pattern": _check_pattern})(_strict_schema(schema))


def _has_wrong_type(schema: Any, value: object) -> bool:
    """Return whether the type of a value differs from the type in its schema."""
    return "type" in schema and not jsonschema.Draft4Validator({"type": schema["type"]}).is_valid(value)


def _strict_schema(schema: Schema) -> dict[str, Any]:
    """Return a copy of the schema that rejects unknown fields.

    In the copy, additionalProperties is false for every object that lists its fields. A field that can be an integer or
    a string has these types.
    """
    strict = dict(schema)
    if strict.pop(_INT_OR_STRING, False):
        strict["type"] = ["integer", "string"]
    if "properties" in schema:
        strict["properties"] = {name: _strict_schema(field) for name, field in schema["properties"].items()}
        if not schema.get(_PRESERVE_UNKNOWN):
            strict["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), Mapping):
        strict["additionalProperties"] = _strict_schema(schema["additionalProperties"])
    if "items" in schema:
        strict["items"] = _strict_schema(schema["items"])
    return strict


def _check_pattern(validator: Any, pattern: str, value: object, schema: Schema) -> Iterator[ValidationError]:
    # For an API server, `$` matches only at the end of the text; in Python it also matches before a final newline.
    if isinstance(value, str) and not re.search(re.sub(r"\$$", r"\\Z", pattern), value):
        yield ValidationError("pattern")


def _duplicates(schema: Schema, value: Any, path: FieldPath) -> Iterator[Problem]:
    """Yield a problem for each duplicate entry in a list.

    Duplicates are a problem only if the x-kubernetes-list-type of the list is map or set.
    """
    if isinstance(value, Mapping):
        fields, additional_schema = schema.get("properties", {}), schema.get("additionalProperties", {})
        for key, item in value.items():
            yield from _duplicates(fields.get(key, additional_schema), item, (*path, key))
    elif isinstance(value, list):
        # The entries are compared as JSON texts, because the values are not hashable. For a long list, it would take
        # minutes to compare all pairs of entries.
        first_index: dict[str, int] = {}
        keys = schema.get("x-kubernetes-list-map-keys")
        for i, item in enumerate(value):
            yield from _duplicates(schema.get("items", {}), item, (*path, i))
            identity = [item.get(key) for key in keys] if keys and isinstance(item, Mapping) else item
            if schema.get("x-kubernetes-list-type") in ("map", "set"):
                first = first_index.setdefault(json.dumps(identity, sort_keys=True, default=str), i)
                if first != i:
                    entry_path = (*path, i, *(keys or ())[:1])
                    duplicate_value = identity[0] if keys and isinstance(identity, list) else item
                    yield Problem(
                        entry_path, duplicate_value, f"equals the value in entry {first}", "use a different value"
                    )
