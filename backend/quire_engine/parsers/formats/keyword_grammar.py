# SPDX-License-Identifier: Apache-2.0
"""The grammar of calls that write each argument as a keyword, such as `f(a=1, b="x")`. Values are written as JSON."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire_engine.parsers.call_grammar import check_parameter_name
from quire_engine.parsers.tool import Tool
from quire_engine.structured_outputs.composed_constraint import quote


@dataclass(frozen=True, slots=True)
class KeywordNotation:
    """The text around the keywords of a call."""

    head: str
    """Text before the keywords; contains `{}` for the name of the function."""
    assign: str
    comma: str
    tail: str
    keyword: re.Pattern[str]
    """Names that a parameter can have."""


def keyword_calls(
    notation: KeywordNotation,
    tools: Sequence[Tool],
    native: Callable[[Tool, Any], str | None] = lambda tool, schema: None,
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the rules `call_0`, `call_1` and so on, and the parts of the grammar.

    `native` returns the expression for a value of a schema if the format does not write it as JSON.
    """
    assign, comma, tail = quote(notation.assign), quote(notation.comma), quote(notation.tail)
    any_value = native(Tool("", {}), {"type": "string"})
    rules = [
        r"KEYWORD: /[\w.-]+/",
        f"keywords: (keyword ({comma} keyword)*)?",
        f"keyword: KEYWORD {assign} (@any_value{f' | {any_value}' if any_value else ''})",
    ]
    parts: dict[str, Any] = {"any_value": {}}
    for i, tool in enumerate(tools):
        head = quote(notation.head.replace("{}", tool.name))
        if not tool.is_enforced:
            rules.append(f"call_{i}: {head} keywords {tail}")
            continue
        parameters = tool.parameters()
        rules.append(f"call_{i}: {head} keywords_{i}_0 {tail}")
        for j, parameter in enumerate(parameters):
            check_parameter_name(tool, parameter.name, notation.keyword)
            # The rule "more" applies after a keyword, so it begins with a comma.
            expression = native(tool, parameter.schema)
            if expression is None:
                expression = f"@value_{i}_{j}"
                parts[f"value_{i}_{j}"] = parameter.schema
            value, rest = f"{quote(parameter.name + notation.assign)} {expression}", f"more_{i}_{j + 1}"
            skipped = "" if parameter.is_required else f" | keywords_{i}_{j + 1}"
            rules.append(f"keywords_{i}_{j}: {value} {rest}{skipped}")
            skipped = "" if parameter.is_required else f" | more_{i}_{j + 1}"
            rules.append(f"more_{i}_{j}: {comma} {value} {rest}{skipped}")
        rules += [f'keywords_{i}_{len(parameters)}: ""', f'more_{i}_{len(parameters)}: ""']
    return tuple(rules), parts
