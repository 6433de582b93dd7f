# SPDX-License-Identifier: Apache-2.0
"""The structural half of the CRD's checks: nulls pruned and defaults filled in as an API server does, then OpenAPI.

Pure: schema and value in, value or problems out. crd.py calls it; the CEL half is rules.py. Where it is stricter than
an API server: an unknown field is a problem (kubectl says the same, an API server may drop the field silently).
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
from jsonschema.exceptions import ValidationError

from quire_operator.errors import FieldPath, Problem
from quire_operator.explain import explain, folded, places_in

Schema = Mapping[str, Any]

_FREE = "x-kubernetes-preserve-unknown-fields"


def complete(schema: Schema, value: Any) -> Any:
    """The value as an API server would store it: listed fields that are null dropped, defaults filled in. A copy."""
    if isinstance(value, Mapping):
        fields, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        kept = {key: item for key, item in value.items() if item is not None or key not in fields}
        filled = {name: field["default"] for name, field in fields.items() if "default" in field and name not in kept}
        return {key: complete(fields.get(key, rest), item) for key, item in {**kept, **filled}.items()}
    if isinstance(value, list):
        return [complete(schema.get("items", {}), item) for item in value]
    return value


def sparse(schema: Schema, value: Any) -> Any:
    """The value without what `complete` would fill in again: fields that are their default, at every depth. A copy."""
    if isinstance(value, Mapping):
        fields, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        kept = {key: (sparse(fields.get(key, rest), item), fields.get(key, {})) for key, item in value.items()}
        return {key: item for key, (item, field) in kept.items() if "default" not in field or item != field["default"]}
    if isinstance(value, list):
        return [sparse(schema.get("items", {}), item) for item in value]
    return value


def known(schema: Schema, value: Any) -> Any:
    """The value without fields that the schema does not have, as an API server stores it. A copy."""
    if isinstance(value, Mapping):
        fields, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        free = schema.get(_FREE) or "properties" not in schema
        return {key: known(fields.get(key, rest), item) for key, item in value.items() if free or key in fields}
    if isinstance(value, list):
        return [known(schema.get("items", {}), item) for item in value]
    return value


def problems(schema: Schema, value: Any, path: FieldPath = ()) -> Iterator[Problem]:
    """What is structurally wrong with a completed value; `path` is where it stands in its document."""
    places: dict[str, list[FieldPath]] = {}
    for place in places_in(schema, path):
        places.setdefault(folded(str(place[-1])), []).append(place)
    for error in _validator(schema).iter_errors(value):
        if error.validator == "enum" and _other_type(error.schema, error.instance):
            continue  # which is told, and says more
        here = (*path, *error.absolute_path)
        yield from explain(str(error.validator), error.validator_value, error.instance, error.schema, here, places)
    yield from _twins(schema, value, path)


def _validator(schema: Schema) -> Any:
    # OpenAPI 3.0 descends from draft 4; there 1.0 is no integer, as for an API server.
    extend: Any = jsonschema.validators.extend
    return extend(jsonschema.Draft4Validator, {"pattern": _pattern})(_closed(schema))


def _other_type(schema: Any, value: object) -> bool:
    """Whether a value has not even the type that its schema asks for."""
    return "type" in schema and not jsonschema.Draft4Validator({"type": schema["type"]}).is_valid(value)


def _closed(schema: Schema) -> dict[str, Any]:
    """The schema with unknown fields refused wherever fields are listed."""
    closed = dict(schema)
    if "properties" in schema:
        closed["properties"] = {name: _closed(field) for name, field in schema["properties"].items()}
        if not schema.get(_FREE):
            closed["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), Mapping):
        closed["additionalProperties"] = _closed(schema["additionalProperties"])
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    return closed


def _pattern(validator: Any, pattern: str, value: object, schema: Schema) -> Iterator[ValidationError]:
    # An API server's `$` is the end of the text, Python's also matches before a last newline.
    if isinstance(value, str) and not re.search(re.sub(r"\$$", r"\\Z", pattern), value):
        yield ValidationError("pattern")


def _twins(schema: Schema, value: Any, path: FieldPath) -> Iterator[Problem]:
    """Entries of x-kubernetes-list-type map or set that are there twice."""
    if isinstance(value, Mapping):
        fields, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        for key, item in value.items():
            yield from _twins(fields.get(key, rest), item, (*path, key))
    elif isinstance(value, list):
        # By their text: values do not hash, and to compare each with each takes minutes for a list that is too long.
        seen: dict[str, int] = {}
        keys = schema.get("x-kubernetes-list-map-keys")
        for i, item in enumerate(value):
            yield from _twins(schema.get("items", {}), item, (*path, i))
            identity = [item.get(key) for key in keys] if keys and isinstance(item, Mapping) else item
            if schema.get("x-kubernetes-list-type") in ("map", "set"):
                first = seen.setdefault(json.dumps(identity, sort_keys=True, default=str), i)
                if first != i:
                    here = (*path, i, *(keys or ())[:1])
                    found = identity[0] if keys and isinstance(identity, list) else item
                    yield Problem(here, found, f"is in entry {first} already", "give each entry its own")
