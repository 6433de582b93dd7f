# SPDX-License-Identifier: Apache-2.0
"""Constraint on the output of a request: a JSON schema, a regular expression, choices or a grammar.

The names are those of vLLM.

This module checks the types and sizes of the values in a constraint. It does not need a grammar library. The text
process compiles the constraint later (quire_engine.structured_outputs). The field `SamplingParams.structured_outputs`
contains the constraint.
"""

import json
from collections.abc import Mapping
from typing import Any, Self

from msgspec import Struct, msgpack, structs, to_builtins

from quire_spec.errors import InvalidArgument, truncated_repr

MAX_CONSTRAINT_BYTES = 256 * 1024
"""Maximum size in bytes of a constraint that is written as JSON in UTF-8."""
MAX_SCHEMA_DEPTH = 32
"""Maximum number of levels to which objects and lists in a JSON schema or structural tag can be nested."""
MAX_ENUM_VALUES = 10_000
"""Maximum number of values in an `enum`. It also limits the number of strings in `choice`."""
MAX_BEGIN_TOKENS = 16
CONSTRAINT_NAMES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Names of the fields that set a constraint. Exactly one of these fields is set."""


class StructuredOutputsParams(Struct, frozen=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True):
    """Constraint that the output must match. Exactly one of the first six fields is set.

    The constructor checks nothing. `from_mapping` checks the values of clients. The class of the offline API checks its
    arguments (quire_engine.api.sampling_params).
    """

    json: dict[str, Any] | bool | str | None = None
    """JSON schema that the output must match. It can be an object, or an object written as JSON text."""

    regex: str | None = None
    """Regular expression that the whole output must match. It has the syntax of Rust's regex library."""

    choice: tuple[str, ...] | None = None
    """A list of strings. The output is exactly one of them."""

    grammar: str | None = None
    """Grammar that the output must match, in Lark or GBNF notation."""

    json_object: bool | None = None
    """If true, the output can be any JSON object."""

    structural_tag: dict[str, Any] | str | None = None
    """Describes an output that consists of free text and constrained parts.

    The value is {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, as an object or as JSON text.
    """

    disable_any_whitespace: bool = True
    """Do not generate whitespace between the parts of JSON. If this is false, a small model may generate whitespace
    until it reaches max_tokens."""

    disable_additional_properties: bool = False
    """Generate only the properties that the schema names. A schema that sets additionalProperties overrides this."""

    whitespace_pattern: str | None = None
    """Regular expression that the whitespace between the parts of JSON must match. It overrides
    disable_any_whitespace."""

    begin_after_token_ids: tuple[int, ...] = ()
    """The constraint begins after these tokens. An example is the mark that ends the reasoning. The output cannot end
    before it contains these tokens. If the list is empty, the constraint applies from the first token of the output."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build an instance from the object that a client sent. Raises InvalidArgument if it is wrong."""
        names = cls.__struct_fields__
        unknown = [name for name in values if name not in names]
        if unknown:
            raise _error(f"{truncated_repr(unknown[0])} is unknown; known fields are {', '.join(names)}")
        # For every field, null has the same effect as omitting the field, which is then not set or has its default.
        constraint = cls(**{name: value for name, value in values.items() if value is not None})
        constraint.check()
        return constraint

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults. The result can be written as JSON, and `from_mapping` can
        read it."""
        mapping: dict[str, Any] = to_builtins(self)
        return mapping

    def check(self) -> None:
        """Check the values of a new instance, and convert them to the form that the fields store. JSON text is parsed,
        and lists become tuples.

        Raises:
            InvalidArgument: none or several of the first six fields are set, or a value has the wrong type or is too
                large.
        """
        # The schema `false` is a constraint, although no output matches it. json_object=False sets no constraint.
        values = {name: getattr(self, name) for name in CONSTRAINT_NAMES}
        present = [name for name, v in values.items() if v is not None and not (name == "json_object" and v is False)]
        if len(present) != 1:
            raise _error(
                f"exactly one of {', '.join(CONSTRAINT_NAMES)} must be set, got {', '.join(present) or 'none'}"
            )
        for name in ("json", "structural_tag"):
            self._normalize_json(name)
        self._check_types()
        self._check_sizes()

    def _normalize_json(self, name: str) -> None:
        """If the value is JSON text, parse it. Check that the result is an object; a JSON schema can also be true or
        false."""
        value = getattr(self, name)
        if isinstance(value, str):
            if len(value) > MAX_CONSTRAINT_BYTES:
                raise _error(f"{name} has {len(value)} characters; at most {MAX_CONSTRAINT_BYTES} bytes are allowed")
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise _error(f"{name} is not JSON: {str(error)[:100]}") from None
            structs.force_setattr(self, name, value)
        if value is not None and not isinstance(value, dict) and not (name == "json" and isinstance(value, bool)):
            raise _error(f"{name} must be an object, got {truncated_repr(value)}")

    def _check_types(self) -> None:
        if isinstance(self.choice, list):
            structs.force_setattr(self, "choice", tuple(self.choice))
        if isinstance(self.begin_after_token_ids, list):
            structs.force_setattr(self, "begin_after_token_ids", tuple(self.begin_after_token_ids))
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _error(f"{name} must be a string with at least one character, got {truncated_repr(value)}")
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool | None):
                raise _error(f"{name} must be true or false, got {truncated_repr(getattr(self, name))}")
        choice: Any = self.choice
        if choice is not None and not (
            isinstance(choice, tuple) and choice and all(isinstance(text, str) for text in choice)
        ):
            raise _error(f"choice must be a list of at least one string, got {truncated_repr(choice)}")
        begin: Any = self.begin_after_token_ids
        if (
            not isinstance(begin, tuple)
            or not all(type(i) is int and i >= 0 for i in begin)
            or len(begin) > MAX_BEGIN_TOKENS
        ):
            raise _error(f"begin_after_token_ids must be a list of at most {MAX_BEGIN_TOKENS} token ids")

    def _check_sizes(self) -> None:
        if self.choice is not None and len(self.choice) > MAX_ENUM_VALUES:
            raise _error(f"choice has {len(self.choice)} strings; at most {MAX_ENUM_VALUES} are allowed")
        # Check the depth first, because the JSON encoder is recursive.
        for name in ("json", "structural_tag"):
            _check_document(name, getattr(self, name))
        try:
            num_bytes = len(json.dumps(self.to_mapping(), ensure_ascii=False).encode())
        except (TypeError, ValueError) as error:
            raise _error(f"a value cannot be written as JSON in valid Unicode: {str(error)[:100]}") from None
        if num_bytes > MAX_CONSTRAINT_BYTES:
            raise _error(f"the constraint has {num_bytes} bytes; at most {MAX_CONSTRAINT_BYTES} are allowed")
        try:
            msgpack.encode(self)
        except OverflowError:
            # MessagePack has no larger integers, and the grammar library reads them as floats anyway.
            for name in ("json", "structural_tag"):
                value = json.loads(json.dumps(getattr(self, name)), parse_int=_parse_int)
                structs.force_setattr(self, name, value)


def _check_document(name: str, document: Any) -> None:
    """Check how deeply a schema is nested and how large its enums are. The function does not use recursion."""
    level, depth = [document], 0
    while level:
        if depth > MAX_SCHEMA_DEPTH:
            raise _error(f"{name} is nested more than {MAX_SCHEMA_DEPTH} levels deep; flatten it, or use $defs")
        depth += 1
        children: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                enum = value.get("enum")
                if isinstance(enum, list) and len(enum) > MAX_ENUM_VALUES:
                    raise _error(f"{name} has an enum of {len(enum)} values; at most {MAX_ENUM_VALUES} are allowed")
                children += [child for child in value.values() if isinstance(child, dict | list)]
            elif isinstance(value, list):
                children += [child for child in value if isinstance(child, dict | list)]
        level = children


def _parse_int(text: str) -> int | float:
    """Return a float if the integer has more than 64 bits."""
    number = int(text)
    return number if -(2**63) <= number < 2**64 else float(text)


def _error(problem: str) -> InvalidArgument:
    return InvalidArgument(f"sampling parameter 'structured_outputs': {problem}")


_FORMER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
    "structural_tag": "structural_tag",
}
"""In vLLM before 0.12, the fields were request parameters with other names. This maps each old name to the new one."""
FORMER_NAMES = frozenset({*_FORMER_NAMES, "guided_decoding", "guided_decoding_backend"})
"""Names of the request parameters that `merge_former_names` replaces."""


def merge_former_names(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of a request. If they include vLLM's older names, replace these with `structured_outputs`.

    Raises:
        InvalidArgument: old and new names are both present, or guided_decoding is not an object.
    """
    if not any(name in values for name in FORMER_NAMES):
        return values
    remaining = {name: value for name, value in values.items() if name not in FORMER_NAMES}
    merged = {new: values[old] for old, new in _FORMER_NAMES.items() if values.get(old) is not None}
    for name, value in merged.items():
        if name == "choice" and isinstance(value, str):
            merged[name] = _parse_list(value)
    guided_decoding = values.get("guided_decoding")
    if guided_decoding is not None:
        if not isinstance(guided_decoding, Mapping):
            raise _error(f"guided_decoding must be an object, got {truncated_repr(guided_decoding)}")
        merged |= {n: v for n, v in guided_decoding.items() if n not in ("backend", "disable_fallback")}
    if not merged:
        return remaining
    if remaining.get("structured_outputs") is not None:
        raise _error(
            f"must not be set together with vLLM's older parameter for {next(iter(merged))}; remove the older one"
        )
    return remaining | {"structured_outputs": merged}


def _parse_list(text: str) -> Any:
    """Parse a list that was sent as JSON text. Some endpoints accept only text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
