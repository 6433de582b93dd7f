# SPDX-License-Identifier: Apache-2.0
"""The grammar of tool calls in one format, in llguidance's Lark notation: what the formats share.

Each format builds a CallGrammar; output_grammar.py puts it together with reasoning and text. JSON schemas are not part
of the text: a rule refers to one as @name, and `parts` contains it.
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
        """Return a tool as clients of the OpenAI API define it; unless enforced, it accepts any object."""
        function = tool["function"]
        schema = (function.get("parameters") or {}) if is_enforced else {}
        return cls(function["name"], {"type": "object", **schema})

    def properties(self) -> list[tuple[str, Mapping[str, Any], bool]]:
        """Return name, schema and whether it is required, of each property."""
        definitions = {name: self.schema[name] for name in ("$defs", "definitions") if name in self.schema}
        required, properties = self.schema.get("required"), self.schema.get("properties")
        required_names = required if isinstance(required, list) else []
        return [
            (str(name), {**definitions, **schema} if isinstance(schema, Mapping) else {}, name in required_names)
            for name, schema in (properties.items() if isinstance(properties, Mapping) else ())
        ]


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The calls of one format."""

    start: str
    """Text of the mark before a call; empty if calls have none, so that an output is either calls or text."""
    call: str
    """What follows the mark, as an expression."""
    separator: str | None
    """Text between a call and the mark of the next; None: no call can follow."""
    rules: tuple[str, ...]
    parts: Mapping[str, Mapping[str, Any]]
    """JSON schemas by name."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks in the notation of a grammar."""

    token_ids: Mapping[str, int]
    """Marks that are one token."""
    special: frozenset[str]
    """Those that no text can match."""

    def terminal(self, mark: str) -> str:
        """Return the terminal of a mark: its token, or its characters."""
        return f"<[{self.token_ids[mark]}]>" if mark in self.token_ids else quote(mark)


def json_calls(tools: Sequence[Tool], arguments_key: str) -> tuple[str, tuple[str, ...], dict[str, Mapping[str, Any]]]:
    """Return expression, rules and parts of one object with a name and arguments."""
    rules = tuple(
        f'call_{i}: {quote(_json_head(tool.name, arguments_key))} @arguments_{i} "}}"' for i, tool in enumerate(tools)
    )
    return either(f"call_{i}" for i in range(len(tools))), rules, argument_parts(tools)


def argument_parts(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the arguments by name."""
    return {f"arguments_{i}": tool.schema for i, tool in enumerate(tools)}


def either(alternatives: Any) -> str:
    """Return an expression of alternatives."""
    return "(" + " | ".join(alternatives) + ")"


def _json_head(name: str, arguments_key: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'{{"name": "{escaped}", "{arguments_key}": '
