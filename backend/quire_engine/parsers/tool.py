# SPDX-License-Identifier: Apache-2.0
"""A tool that a model can call, and the parameters that its JSON schema describes.

Some formats write each parameter separately. Both the grammars and the parsers of these formats read the parameters
from here, so that they agree.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire_engine.structured_outputs.json_schema import resolve_reference
from quire_spec.errors import InvalidArgument

_DEFINITIONS = ("$defs", "definitions")
_UNSUPPORTED = frozenset(
    {
        *("anyOf", "oneOf", "not", "if", "then", "else", "enum", "const", "patternProperties", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef"),
    }
)
"""Keywords that restrict the arguments together. Where parameters are written separately, they cannot be enforced."""
_TYPE_ALIASES = {
    **dict.fromkeys(("str", "text"), "string"),
    **dict.fromkeys(("float", "double"), "number"),
    "int": "integer",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
_MAX_DEFINITION_CHARS = 4 * 2**20
ALL_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "object", "array"})
_MAX_BRANCHES = 4
"""Maximum number of references and of branches at the top level of a schema. More are not in use."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a tool."""

    name: str
    schema: Any
    """JSON schema of the value. Contains the definitions of the tool's schema if it refers to them."""
    is_required: bool


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model can call."""

    name: str
    schema: Mapping[str, Any]
    """JSON schema of the arguments."""
    is_enforced: bool = True
    """If false, the tool accepts any object as arguments."""
    _types: dict[str, frozenset[str]] = field(default_factory=dict, compare=False, repr=False)
    """JSON types of the references that were followed so far."""

    @classmethod
    def from_request(cls, tool: Mapping[str, Any], is_enforced: bool) -> "Tool":
        """Convert a tool definition of the OpenAI API; if `is_enforced` is False, the tool accepts any object as
        arguments."""
        function = tool["function"]
        schema = {"type": "object", **((function.get("parameters") or {}) if is_enforced else {})}
        if schema.get("properties") == {} and schema.keys() <= {"type", "properties", "title", "description"}:
            # A function without parameters: the front adds an empty list of parameters if a client leaves it out.
            schema["additionalProperties"] = False
        return cls(function["name"], schema, is_enforced)

    def parameters(self) -> list[Parameter]:
        """Return the parameters, in the order of the schema.

        Raises:
            InvalidArgument: the schema has keywords that a list of parameters does not express.
        """
        flat = self._flatten(self.schema, ())
        definitions = {name: self.schema[name] for name in _DEFINITIONS if name in self.schema}
        has_reference = {name for name, schema in flat.properties.items() if "$ref" in json.dumps(schema)}
        if len(has_reference) * len(json.dumps(definitions)) > _MAX_DEFINITION_CHARS:
            raise self._error("the definitions are too long, because each parameter contains a copy; shorten them")
        return [
            Parameter(
                name,
                {**definitions, **schema} if name in has_reference else schema,
                name in flat.required_names,
            )
            for name, schema in flat.properties.items()
        ]

    def types_of(self, schema: Any) -> frozenset[str]:
        """Return the JSON types that a schema allows. A reference in the schema points into the schema of the tool."""
        if not isinstance(schema, Mapping):
            return ALL_TYPES
        stated = schema.get("type")
        names = [name for name in (stated if isinstance(stated, list) else [stated]) if isinstance(name, str)]
        types = _with_integers({_TYPE_ALIASES.get(name, name) for name in names}) & ALL_TYPES or ALL_TYPES
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._types:
                self._types[reference] = ALL_TYPES
                self._types[reference] = self.types_of(self.resolve(reference))
            types &= self._types[reference]
        for branch in _list(schema.get("allOf")):
            types &= self.types_of(branch)
        for keyword in ("anyOf", "oneOf"):
            if branches := _list(schema.get(keyword)):
                types &= frozenset().union(*(self.types_of(branch) for branch in branches))
        values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
        if values:
            types &= frozenset().union(*map(json_types, values))
        return types

    def resolve(self, reference: object) -> Any:
        """Return the schema to which a reference points; None if it does not exist."""
        return resolve_reference(self.schema, reference)

    def _flatten(self, schema: Any, references: tuple[str, ...]) -> "_Properties":
        """Return the properties of a schema and of the schemas to which it refers.

        `references` were followed before; the same one is followed only once.
        """
        if not isinstance(schema, Mapping):
            raise self._error("a reference in the schema of the parameters is wrong")
        if unsupported := sorted(_UNSUPPORTED & schema.keys()):
            raise self._error(
                f"the schema of the parameters has {unsupported[0]!r} at its top level, which cannot be enforced in "
                "the format of this model's tool calls; move it into a parameter"
            )
        branches = [*_list(schema.get("allOf"))]
        if isinstance(reference := schema.get("$ref"), str):
            references = (*references, reference)
            branches.append(self.resolve(reference))
        if len(set(references)) < len(references) or max(len(references), len(branches)) > _MAX_BRANCHES:
            raise self._error(
                "the schema of the parameters refers to itself, or has too many references; list the properties"
            )
        properties, required = schema.get("properties"), _list(schema.get("required"))
        parts = [
            _Properties(
                {str(name): value for name, value in properties.items()} if isinstance(properties, Mapping) else {},
                [name for name in required if isinstance(name, str)],
                schema.get("additionalProperties", True),
            ),
            *(self._flatten(branch, references) for branch in branches),
        ]
        names = dict.fromkeys(name for part in parts for name in (*part.properties, *part.required_names))
        merged = {name: _all_of([part.properties.get(name, part.others) for part in parts]) for name in names}
        required_names = [name for name in names if any(name in part.required_names for part in parts)]
        if impossible := [name for name in required_names if merged[name] is False]:
            raise self._error(f"the required parameter {impossible[0][:80]!r} is not allowed by the schema; remove it")
        merged = {name: value for name, value in merged.items() if value is not False}
        minimum, maximum = schema.get("minProperties", 0), schema.get("maxProperties", len(merged))
        if minimum not in range(len(required_names) + 1) or maximum in range(len(merged)):
            raise self._error("minProperties and maxProperties of the parameters cannot be enforced; use required")
        return _Properties(merged, required_names, _all_of([part.others for part in parts]))

    def _error(self, problem: str) -> InvalidArgument:
        return InvalidArgument(f"tools: {self.name[:80]!r}: {problem}")


@dataclass(frozen=True, slots=True)
class _Properties:
    """The properties of an object."""

    properties: Mapping[str, Any]
    required_names: Sequence[str]
    others: Any
    """Schema of the properties that are not in `properties`."""


def _all_of(schemas: Sequence[Any]) -> Any:
    """Return a schema that matches what all of the schemas match."""
    schemas = [schema for schema in schemas if schema is not True and schema != {}]
    if any(schema is False for schema in schemas):
        return False
    return {} if not schemas else schemas[0] if len(schemas) == 1 else {"allOf": list(schemas)}


def json_types(value: object) -> frozenset[str]:
    """Return the JSON types of a value."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number", "integer"} if value.is_integer() else {"number"})
    return frozenset({"string" if isinstance(value, str) else "object" if isinstance(value, Mapping) else "array"})


def _with_integers(types: set[str]) -> frozenset[str]:
    return frozenset(types | {"integer"} if "number" in types else types)


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
