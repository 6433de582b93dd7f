# SPDX-License-Identifier: Apache-2.0
"""The response template of a checkpoint: a description of its outputs in tokenizer_config.json.

A template has fields, such as `thinking`, `content` and `tool_calls`, and the marks or patterns between which each
field stands. At most one field has no beginning; it gets all other text.

Source: docs/source/en/chat_response_parsing.md of transformers 5.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

from quire_engine.parsers.response_template.values import CONTENT_TYPES, ContentParser
from quire_spec.errors import ConfigError

REASONING, CONTENT, CALLS = "thinking", "content", "tool_calls"
_TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional"),
    *("transform", "transform_each"),
}
_SPECIAL = frozenset(".^$*+?{}[]()|")


@dataclass(frozen=True, slots=True)
class Anchor:
    """Where a field begins or ends."""

    pattern: re.Pattern[str]
    literals: tuple[str, ...]
    """The texts that the pattern matches, if they are known."""
    prefix: str
    """Text with which every match of another pattern begins; it can be empty."""

    @classmethod
    def of(cls, scope: str, entry: Mapping[str, Any], name: str) -> Self | None:
        """Return the anchor that the keys NAME or NAME_pattern describe; None if there is none."""
        if name in entry and f"{name}_pattern" in entry:
            raise ConfigError(f"{scope}: has both {name} and {name}_pattern; remove one")
        if f"{name}_pattern" in entry:
            text = entry[f"{name}_pattern"]
            try:
                return cls(re.compile(text, re.DOTALL), (), _literal_prefix(text))
            except (re.error, TypeError, RecursionError) as error:
                raise ConfigError(f"{scope}.{name}_pattern: {str(text)[:200]!r}: {error}") from error
        if name not in entry:
            return None
        literals = [entry[name]] if isinstance(entry[name], str) else entry[name]
        if not isinstance(literals, list) or not literals or not all(isinstance(t, str) and t for t in literals):
            raise ConfigError(f"{scope}.{name}: must be a text or a list of texts, got {str(literals)[:200]!r}")
        longest_first = sorted(set(literals), key=lambda text: (-len(text), text))
        return cls(re.compile("|".join(map(re.escape, longest_first))), tuple(longest_first), "")


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the outputs."""

    name: str
    open: Anchor | None
    """None if the field gets the text outside of other fields."""
    close: Anchor | None
    """None if the field ends with the output."""
    parser: ContentParser
    """Converts the text of the field to a value."""
    transform: Any
    """What the value becomes, with placeholders; None if it stays."""
    is_each_transformed: bool
    strips: bool
    """True if the whitespace around the text is dropped."""

    @classmethod
    def of(cls, name: str, entry: object) -> Self:
        """Check and convert an entry of `fields`."""
        scope = f"response_template.fields.{name}"
        if not isinstance(entry, Mapping) or entry.keys() - _FIELD_KEYS:
            raise ConfigError(f"{scope}: must be an object with the keys {', '.join(sorted(_FIELD_KEYS))}")
        if name not in (REASONING, CONTENT, CALLS):
            raise ConfigError(f"{scope}: supported fields are {REASONING}, {CONTENT} and {CALLS}")
        kind, args = entry.get("content", "text"), entry.get("content_args", {})
        if kind not in CONTENT_TYPES or not isinstance(args, Mapping):
            raise ConfigError(f"{scope}.content: must be one of {', '.join(CONTENT_TYPES)}, got {str(kind)[:80]!r}")
        transform, is_text = entry.get("transform"), kind == "text"
        if name != CALLS and (not is_text or transform is not None or entry.get("join") is not None):
            raise ConfigError(f"{scope}: must have the content text, and no transform or join")
        try:
            parser = CONTENT_TYPES[kind](args)
        except (re.error, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{scope}.content_args: {error}") from error
        return cls(
            name,
            Anchor.of(scope, entry, "open"),
            Anchor.of(scope, entry, "close"),
            parser,
            transform,
            bool(entry.get("transform_each", False)),
            bool(args.get("strip", True)),
        )


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """A response template."""

    fields: tuple[Field, ...]
    start: re.Pattern[str]
    """What the last message of a prompt begins with."""

    @property
    def field_names(self) -> frozenset[str]:
        """Names of the fields."""
        return frozenset(field.name for field in self.fields)

    @property
    def implicit(self) -> Field | None:
        """The field that gets the text outside of other fields."""
        return next((field for field in self.fields if field.open is None), None)

    def last_message(self, prompt: str) -> str:
        """Return the part of the last message that the prompt already contains."""
        end = 0
        for match in self.start.finditer(prompt):
            end = match.end()
        return prompt[end:]


@lru_cache(maxsize=8)
def load_response_template(text: str) -> ResponseTemplate:
    """Return the template in a JSON text.

    Raises:
        ConfigError: the template is invalid, or describes what the OpenAI API cannot return.
    """
    document = json.loads(text)
    if not isinstance(document, Mapping) or document.keys() - _TEMPLATE_KEYS or document.get("version", 1) != 1:
        raise ConfigError(f"response_template: must be an object with the keys {', '.join(sorted(_TEMPLATE_KEYS))}")
    entries = document.get("fields")
    if not isinstance(entries, Mapping) or not entries:
        raise ConfigError("response_template.fields: must be an object with at least one field")
    fields = [Field.of(name, entry) for name, entry in entries.items()]
    if sum(field.open is None for field in fields) > 1:
        raise ConfigError("response_template.fields: only one field can omit open and open_pattern")
    if CONTENT not in entries and all(field.open is not None for field in fields):
        fields.append(Field.of(CONTENT, {}))
    start = Anchor.of("response_template", document, "start_anchor")
    if start is None:
        raise ConfigError("response_template: start_anchor or start_anchor_pattern is missing")
    return ResponseTemplate(tuple(fields), start.pattern)


def _literal_prefix(pattern: str) -> str:
    """Return a text with which every match of a pattern begins; empty if it is not known."""
    if _has_alternatives(pattern):
        return ""
    prefix: list[str] = []
    position = 0
    while position < len(pattern) and pattern[position] not in _SPECIAL:
        if pattern[position] == "\\":
            position += 1
            if position == len(pattern) or pattern[position].isalnum():
                break
        prefix.append(pattern[position])
        position += 1
    if position < len(pattern) and pattern[position] in "*?{":
        del prefix[-1:]
    return "".join(prefix)


def _has_alternatives(pattern: str) -> bool:
    """Return whether a pattern can have alternatives at its top level."""
    depth = 0
    for char in re.sub(r"\\.|\[\^?\]?(\\.|[^\]])*\]", "", pattern, flags=re.DOTALL):
        depth += (char == "(") - (char == ")")
        if char == "|" and depth <= 0:
            return True
    return False


def sequence_of(value: object) -> Sequence[Any]:
    """Return a list as it is, and another value as a list of one."""
    return value if isinstance(value, list) else [value]
