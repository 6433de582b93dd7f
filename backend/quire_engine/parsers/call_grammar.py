# SPDX-License-Identifier: Apache-2.0
"""Grammar of tool calls in llguidance's Lark notation. This module contains the parts that all formats share.

Each format builds a CallGrammar; output_grammar.py combines it with the grammars of reasoning and text. JSON schemas
are not part of the grammar text: a rule refers to a schema as @name, and `parts` contains the schema.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire_engine.parsers.tool import Tool
from quire_engine.structured_outputs.composed_constraint import quote
from quire_spec.errors import InvalidArgument


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
    parts: Mapping[str, Any]
    """JSON schemas by name."""
    text: str
    """Expression of a terminal: text in which the parser of the format finds no call. It can be empty."""


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

    def written(self, text: str, marks: Iterable[str]) -> str:
        """Return the expression for a text that contains some of the marks."""
        return " ".join(map(self.terminal, self._pieces(text, marks)))

    def until(self, end: str, marks: Iterable[str], name: str, body: str) -> tuple[str, list[str]]:
        """Return the expression for a text that ends with `end`, and its rules.

        `end` contains one of the marks, and `body` is the expression of a terminal: the text before `end`.
        """
        terminal, pieces = f"{name.upper()}_BODY", self._pieces(end, marks)
        if pieces == [end] and end not in self.token_ids:
            return name, [f"{name}[lazy]: {terminal} {quote(end)}", f"{terminal}: {body}"]
        # The terminal takes all text before the token, so that text before the mark is a part of it.
        first = next(i for i, piece in enumerate(pieces) if piece in self.token_ids)
        return " ".join([terminal, *map(self.terminal, pieces[first:])]), [f"{terminal}: {body}"]

    def _pieces(self, text: str, marks: Iterable[str]) -> list[str]:
        """Return the marks in a text that are tokens, and the text between them."""
        tokens = [re.escape(mark) for mark in marks if mark in self.token_ids]
        return [piece for piece in re.split(f"({'|'.join(tokens)})", text) if piece] if tokens else [text]

    def text_without(self, marks: Iterable[str], *patterns: str) -> str:
        """Return the expression of a terminal: any text that contains neither the marks nor the patterns."""
        excluded = [re.escape(mark).replace("/", r"\/") for mark in marks if mark not in self.special]
        excluded += patterns
        return r"/(.|\n)*/" + (rf" & ~/(.|\n)*({'|'.join(excluded)})(.|\n)*/" if excluded else "")


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


def either(alternatives: Iterable[str]) -> str:
    """Return an expression that matches one of the alternatives."""
    return "(" + " | ".join(alternatives) + ")"


def check_parameter_name(tool: Tool, name: str, pattern: re.Pattern[str]) -> None:
    """Raise InvalidArgument if a format cannot write the name of a parameter."""
    if not pattern.fullmatch(name):
        raise InvalidArgument(
            f"tools: {tool.name[:80]!r}: the format of this model's tool calls cannot contain the parameter name "
            f"{name[:80]!r}; rename the parameter"
        )


def _json_head(name: str, arguments_key: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'{{"name": "{escaped}", "{arguments_key}": '
