# SPDX-License-Identifier: Apache-2.0
"""Grammar of tool calls in llguidance's Lark notation. This module contains the parts that all formats share.

Each format builds a CallGrammar; output_grammar.py combines it with the grammars of reasoning and text. JSON schemas
are not part of the grammar text: a rule refers to a schema as @name, and `parts` contains the schema.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire_engine.structured_outputs.composed_constraint import quote


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model can call."""

    name: str
    schema: Mapping[str, Any]
    """JSON schema of the arguments."""

    @classmethod
    def from_request(cls, tool: Mapping[str, Any], is_enforced: bool) -> "Tool":
        """Convert a tool definition of the OpenAI API; if `is_enforced` is False, the tool accepts any object as
        arguments."""
        function = tool["function"]
        schema = {"type": "object", **((function.get("parameters") or {}) if is_enforced else {})}
        if schema.get("properties") == {} and schema.keys() <= {"type", "properties", "title", "description"}:
            # A function without parameters: the front adds an empty list of parameters if a client leaves it out.
            schema["additionalProperties"] = False
        return cls(function["name"], schema)

    def properties(self) -> list[tuple[str, Mapping[str, Any], bool]]:
        """Return, for each property, its name, its schema, and whether it is required."""
        definitions = {name: self.schema[name] for name in ("$defs", "definitions") if name in self.schema}
        required, properties = self.schema.get("required"), self.schema.get("properties")
        required_names = required if isinstance(required, list) else []
        return [
            (str(name), {**definitions, **schema} if isinstance(schema, Mapping) else {}, name in required_names)
            for name, schema in (properties.items() if isinstance(properties, Mapping) else ())
        ]


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Grammar of the calls in one format."""

    start: str
    """Text of the mark that comes before a call. It is empty if the format has no such mark. In that case, an output
    consists either of calls or of text."""
    call: str
    """Expression for the call that follows the mark."""
    separator: str | None
    """Text between a call and the mark of the next call; None if only one call is possible."""
    rules: tuple[str, ...]
    parts: Mapping[str, Mapping[str, Any]]
    """JSON schemas by name."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Writes marks in the notation of the grammar."""

    token_ids: Mapping[str, int]
    """Token ids of the marks that consist of a single token."""
    special: frozenset[str]
    """Marks that are special tokens. Ordinary text never matches them."""

    def terminal(self, mark: str) -> str:
        """Return the grammar terminal that matches a mark: its token or its characters."""
        return f"<[{self.token_ids[mark]}]>" if mark in self.token_ids else quote(mark)


def json_calls(tools: Sequence[Tool], arguments_key: str) -> tuple[str, tuple[str, ...], dict[str, Mapping[str, Any]]]:
    """Return the expression, the rules and the parts of the grammar for a call. The call is a JSON object that contains
    a name and arguments."""
    rules = tuple(
        f'call_{i}: {quote(_json_head(tool.name, arguments_key))} @arguments_{i} "}}"' for i, tool in enumerate(tools)
    )
    return either(f"call_{i}" for i in range(len(tools))), rules, argument_parts(tools)


def argument_parts(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the arguments by name."""
    return {f"arguments_{i}": tool.schema for i, tool in enumerate(tools)}


def either(alternatives: Any) -> str:
    """Return an expression that matches one of the alternatives."""
    return "(" + " | ".join(alternatives) + ")"


def _json_head(name: str, arguments_key: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'{{"name": "{escaped}", "{arguments_key}": '
