# SPDX-License-Identifier: Apache-2.0
"""Prepares a JSON schema (draft 2020-12) for llguidance: rejects keywords that llguidance would not enforce, and
replaces some keywords that llguidance does not implement.

llguidance itself rejects the keywords that it does not implement. However, there are some keywords that it accepts but
does not enforce. They were found with JSON-Schema-Test-Suite and by experiment, and this module handles them. The
module also removes keywords that have no effect, such as unknown formats, and replaces keywords for which an equivalent
exists.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard
from urllib.parse import quote, unquote

from quire_spec.errors import InvalidArgument

_SCHEMA_KEYWORDS = frozenset(
    {
        *("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames", "contains"),
        *("not", "if", "then", "else", "contentSchema"),
    }
)
_SCHEMA_LIST_KEYWORDS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SCHEMA_MAP_KEYWORDS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_IN_PLACE_KEYWORDS = frozenset(
    {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"}
)
"""Keywords whose subschemas apply to the same value as the schema that contains them. Therefore, these subschemas also
evaluate the properties and items of the value."""
_ANNOTATIONS = frozenset({"title", "description", "$comment", "default"})
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""Formats that llguidance enforces. The standard makes all other formats annotations."""
_YEAR = r"(?:\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)"
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"^(?:{_YEAR}-(?:0[13-9]|1[0-2]|02-[01]|02-2[0-8])|{_LEAP_YEAR}-02-29)"
_FORMAT_PATTERNS = {"date": _DATE, "date-time": rf"{_DATE}.*[Tt]\d\d:\d\d:[0-5]", "time": r"^\d\d:\d\d:[0-5]"}
"""llguidance does not check that February 29 exists in leap years only. The year 0 and leap seconds are excluded, too,
because most libraries cannot read them."""
_COUNTS = frozenset({f"{bound}{what}" for bound in ("min", "max") for what in ("Items", "Length", "Properties")})
_LOWER_BOUNDS, _UPPER_BOUNDS = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_MAX_BOUND = 2**63 - 1024
"""llguidance calculates with 64-bit integers and floating-point numbers. This is the largest bound that it supports for
all types."""
_KEYWORDS_OF_TYPE = {
    "array": ("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
    "object": ("propertyNames", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
}
"""Keywords that llguidance rejects, by the only type of values to which they apply."""
_RESERVED_CHARACTERS = "!$&'()*+,;=:@/?-._~"
"""Characters that the fragment of a URI can contain unescaped, besides letters and digits."""

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")
"""JSON writes these characters as \\u escapes, and the grammar does not contain such escapes."""
_CONTROL_ESCAPES = re.compile(
    r"\\(x\{?0*[01]?[0-9a-fA-F](?![0-9a-fA-F])|x[01][0-9a-fA-F]|u\{?0*[01][0-9a-fA-F]|u000|c|0|a|v|e)"
)


def prepare_schema(schema: dict[str, Any] | bool, disable_additional_properties: bool = False) -> dict[str, Any]:
    """Return an equivalent schema, which is always an object.

    llguidance's own options are removed from it, because they could turn checks off.

    Args:
        schema: schema of the request.
        disable_additional_properties: forbid the properties that the schema of an object does not name, unless the
            schema has a keyword for such properties.

    Raises:
        InvalidArgument: the schema would not be enforced.
    """
    if isinstance(schema, bool):
        if not schema:
            raise _error("the schema is false, so no value matches it; use another schema")
        return {}
    parts = list(_dictionaries(schema))
    for part in parts:
        _check(part)
    rewriter = _Rewriter(
        schema,
        disable_additional_properties,
        has_dynamic_ref=any("$dynamicRef" in part for part in parts),
        has_unevaluated=any("unevaluatedItems" in part or "unevaluatedProperties" in part for part in parts),
    )
    prepared: dict[str, Any] = rewriter.rewrite(schema)
    prepared.pop("x-guidance", None)
    return prepared


def _dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects of a document, even if they are not schemas, because a reference can point to any object."""
    if isinstance(value, dict):
        yield value
        for child in value.values():
            yield from _dictionaries(child)
    elif isinstance(value, list):
        for child in value:
            yield from _dictionaries(child)


def _check(part: dict[str, Any]) -> None:
    """Reject an object if llguidance would not enforce it correctly as a schema."""
    for name, value in part.items():
        texts = [name] if name in _ANNOTATIONS else [name, *_strings(value)]
        if any(_CONTROL_CHARACTERS.search(text) for text in texts):
            raise _error(f"{name[:40]!r} contains a control character, which cannot be enforced; remove it")
    pattern_names = part.get("patternProperties")
    patterns = [part.get("pattern"), *(pattern_names if isinstance(pattern_names, dict) else ())]
    for pattern in patterns:
        if isinstance(pattern, str) and _CONTROL_ESCAPES.search(pattern):
            raise _error(f"pattern {pattern[:80]!r} matches a control character, which cannot be enforced; remove it")
    min_properties, required = part.get("minProperties"), part.get("required", [])
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    if (
        isinstance(min_properties, int | float)
        and min_properties > max(1, num_required)
        and _allows_other_properties(part)
    ):
        # The text can contain the same property twice, but the parsed value contains it only once. So it is not enough
        # to count the properties in the text.
        raise _error(
            f"minProperties {min_properties} cannot be enforced for properties that the schema does not require; name "
            "them in properties and required, or set additionalProperties to false"
        )


def _allows_other_properties(schema: dict[str, Any]) -> bool:
    return schema.get("additionalProperties", True) is not False or bool(schema.get("patternProperties"))


def _strings(value: Any) -> Iterator[str]:
    """Yield a string, or the strings of a list. Strings inside objects are not yielded, because they are checked with
    their objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for child in value:
            yield from _strings(child)


@dataclass(frozen=True, slots=True)
class _Rewriter:
    """Rewrites schemas. A keyword that llguidance does not implement is replaced by an equivalent one."""

    document: Mapping[str, Any]
    """The whole document. References point into it."""
    closes_objects: bool
    """Whether properties that a schema does not name are forbidden."""
    has_dynamic_ref: bool
    """Whether $dynamicRef occurs in the document."""
    has_unevaluated: bool
    """Whether unevaluatedItems or unevaluatedProperties occurs in the document. If so, some keywords must be kept that
    would otherwise have no effect.
    """

    def rewrite(self, schema: Any) -> Any:
        """Return an equivalent schema."""
        if not isinstance(schema, dict):
            return schema
        rewritten = {name: self._rewrite_keyword(name, value) for name, value in schema.items()}
        if isinstance(name := rewritten.get("format"), str) and name in _FORMAT_PATTERNS:
            checks = [{"pattern": _FORMAT_PATTERNS[name]}]
            rewritten["allOf"] = [*(rewritten["allOf"] if isinstance(rewritten.get("allOf"), list) else ()), *checks]
        self._rewrite_property_names(rewritten)
        self._clamp_bounds(rewritten)
        for name in self._keywords_without_effect(rewritten):
            rewritten.pop(name, None)
        if rewritten.keys().isdisjoint(_IN_PLACE_KEYWORDS):
            # In this case, only keywords of this schema evaluate its properties and items, so simpler keywords have the
            # same effect.
            if "unevaluatedProperties" in rewritten:
                rewritten.setdefault("additionalProperties", rewritten.pop("unevaluatedProperties"))
            if "unevaluatedItems" in rewritten and "contains" not in rewritten:
                rewritten.setdefault("items", rewritten.pop("unevaluatedItems"))
        if "$dynamicAnchor" in rewritten and "$anchor" not in rewritten and not self.has_dynamic_ref:
            rewritten["$anchor"] = rewritten.pop("$dynamicAnchor")
        if self.closes_objects and isinstance(rewritten.get("properties"), dict):
            rewritten.setdefault("additionalProperties", False)
        return rewritten

    def _rewrite_keyword(self, name: str, value: Any) -> Any:
        if name in _SCHEMA_KEYWORDS:
            return self.rewrite(value)
        if name in _SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            return [self.rewrite(child) for child in value]
        if name in _SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            return {key: self.rewrite(child) for key, child in value.items()}
        if name in _COUNTS and isinstance(value, float) and value.is_integer():
            return int(value)
        if name == "$ref" and isinstance(value, str) and value.startswith("#"):
            # Names of generic classes, such as Box[int], contain characters that are not allowed in a URI.
            return "#" + quote(re.sub("%(?![0-9a-fA-F]{2})", "%25", value[1:]), safe=_RESERVED_CHARACTERS + "%")
        return value

    def _rewrite_property_names(self, schema: dict[str, Any]) -> None:
        """Replace propertyNames, which llguidance does not implement, if the names are listed or match a pattern."""
        names = self._resolve(schema.get("propertyNames"))
        if not isinstance(names, dict) or self.has_unevaluated or "patternProperties" in schema:
            return
        names = {k: self._rewrite_keyword(k, value) for k, value in names.items() if k not in _ANNOTATIONS}
        if names.pop("type", "string") != "string" or not isinstance(schema.get("properties", {}), dict):
            return
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        listed = [names["const"]] if names.keys() == {"const"} else names.get("enum")
        if names.keys() <= {"enum", "const"} and isinstance(listed, list):
            allowed = [name for name in (*properties, *listed) if isinstance(name, str) and name in listed]
            schema["properties"] = {name: properties.get(name, others) for name in allowed}
        elif names.keys() in ({"pattern"}, {"minLength"}, {"maxLength"}, {"minLength", "maxLength"}) and not properties:
            schema["patternProperties"] = {_names_pattern(names): others}
        elif names:
            return
        if names:
            schema["additionalProperties"] = False
        del schema["propertyNames"]

    def _resolve(self, schema: Any) -> Any:
        """Return the schema to which a schema refers if it consists of a reference; otherwise the schema itself."""
        if not isinstance(schema, dict) or schema.keys() - _ANNOTATIONS != {"$ref"}:
            return schema
        return resolve_reference(self.document, schema["$ref"])

    @staticmethod
    def _clamp_bounds(schema: dict[str, Any]) -> None:
        """Replace bounds that are too large for llguidance, such as the smallest 64-bit integer, by narrower ones."""
        for name in _LOWER_BOUNDS:
            if _is_number(bound := schema.get(name)) and bound < -_MAX_BOUND:
                schema[name] = -_MAX_BOUND
        for name in _UPPER_BOUNDS:
            # llguidance itself clamps the upper bounds of integers.
            if _is_number(bound := schema.get(name)) and bound > _MAX_BOUND and schema.get("type") != "integer":
                schema[name] = _MAX_BOUND

    def _keywords_without_effect(self, schema: dict[str, Any]) -> list[str]:
        """Return the keywords that have no effect in a schema, but that llguidance rejects."""
        names = [name for name in ("uniqueItems", "not") if schema.get(name) is False]
        names += [n for n in ("propertyNames", "unevaluatedItems", "unevaluatedProperties") if schema.get(n) is True]
        names += [name for name in ("dependentRequired", "dependentSchemas") if schema.get(name) == {}]
        if not isinstance(name := schema.get("format"), str) or name not in FORMATS:
            names.append("format")
        max_items, types = schema.get("maxItems"), schema.get("type")
        if isinstance(max_items, int) and max_items <= 1:
            names.append("uniqueItems")
        if not self.has_unevaluated and types is not None:
            applicable = types if isinstance(types, list) else [types]
            names += [n for kind, keywords in _KEYWORDS_OF_TYPE.items() if kind not in applicable for n in keywords]
        if "if" not in schema:
            names += [name for name in ("then", "else") if name in schema]
        elif "then" not in schema and "else" not in schema and not self.has_unevaluated:
            names.append("if")
        if "contains" not in schema:
            names += [name for name in ("minContains", "maxContains") if name in schema]
        elif schema.get("minContains") == 0 and "maxContains" not in schema and not self.has_unevaluated:
            names += ["contains", "minContains"]
        return names


def resolve_reference(document: object, reference: object) -> Any:
    """Return the part of a document to which a `$ref` points; None if it does not exist."""
    found: Any = document
    for part in unquote(str(reference)).removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _names_pattern(names: Mapping[str, Any]) -> str:
    """Return a pattern for the names that match a schema with a pattern or with limits of the length."""
    if "pattern" in names:
        return str(names["pattern"])
    return f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"


def _error(problem: str) -> InvalidArgument:
    return InvalidArgument(f"structured_outputs: json: {problem}")
