# SPDX-License-Identifier: Apache-2.0
"""Parse and check the value of one request parameter: convert text, and check the type and the range.

The types and bounds come from the annotations of a Struct. The functions of this module treat all parameters alike.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct, inspect

from quire_spec.dataclass_json import without_zero_fraction
from quire_spec.engine.structured_outputs import StructuredOutputsParams
from quire_spec.errors import InvalidArgument, truncated_repr

_MAX_MAGNITUDE = 2**63
_LIST_OF_STRINGS = re.compile(r"""\[\s*["']""")
"""Matches the start of a text that is a list of strings in JSON or Python notation. It does not match a plain string
that starts with a bracket, such as [INST]."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """The declaration of one parameter."""

    name: str
    kind: str
    """A key of `_KINDS`."""
    type: Any
    """Annotation of the field without None, as msgspec.inspect describes it. It contains the bounds."""
    is_optional: bool
    """Whether the value can be None."""
    default: Any


def describe_parameters(struct: type[Struct]) -> dict[str, Parameter]:
    """Return the declarations of a Struct's fields by name."""
    description = inspect.type_info(struct)
    assert isinstance(description, inspect.StructType)
    return {field.name: _describe(field) for field in description.fields}


def _describe(field: inspect.Field) -> Parameter:
    types = list(field.type.types) if isinstance(field.type, inspect.UnionType) else [field.type]
    value_types = [kind for kind in types if not isinstance(kind, inspect.NoneType)]
    kind = " | ".join(map(_kind_name, value_types))
    return Parameter(field.name, kind, value_types[0], len(value_types) < len(types), field.default)


def _kind_name(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.VarTupleType):
        return f"tuple[{_kind_name(kind.item_type)}]"
    return type(kind).__name__.removesuffix("Type").lower()


def parse_text(parameter: Parameter, value: Any) -> Any:
    """Parse a value that was sent as text; return the value unchanged if it cannot be parsed.

    Text is accepted for numbers and booleans ("0.5", "true"), because clients of NVIDIA's vllm_backend send strings.
    Text that is JSON is accepted for lists and objects ('["a", "b"]'), because the server's generate endpoint rejects
    real lists and objects.

    Raises:
        InvalidArgument: a text starts like a list of strings, but it is not JSON. The client could have meant a list or
            a single string.
    """
    kind = parameter.kind
    if not isinstance(value, str) or (kind.startswith("tuple") and not value.startswith("[")):
        return value
    try:
        parsed = float(value) if kind == "float" else json.loads(value.lower() if kind.startswith("bool") else value)
    except (ValueError, RecursionError):
        if kind == "tuple[str]" and _LIST_OF_STRINGS.match(value):
            raise InvalidArgument(
                f"sampling parameter {parameter.name!r}: must be a JSON list of strings, got {truncated_repr(value)}, "
                'which is not JSON; write it like ["a", "b"], also for a single string'
            ) from None
        return value
    # The text "null" is not a number. Parsing it as None would remove a limit that the client meant to set.
    return value if parsed is None else parsed


def check_parameter(parameter: Parameter, value: Any) -> Any:
    """Return the value in the form that the field stores. All forms that vLLM accepts are accepted.

    Raises:
        InvalidArgument: the value has the wrong type, is out of range, or has too many entries. The message names the
            parameter.
    """
    name, kind = parameter.name, parameter.kind
    if kind.startswith(("tuple", "dict")) and isinstance(value, list | tuple | Mapping):
        # The number of entries is checked before they are converted.
        _check_num_entries(parameter, len(value))
    value = _normalize(parameter, value)
    if value is None and parameter.is_optional:
        return None
    type_words, accepts = _KINDS[kind]
    if not accepts(value):
        # Clients send lists. They were converted to tuples, but the message must show a list.
        shown = truncated_repr(list(value) if isinstance(value, tuple) else value)
        raise InvalidArgument(f"sampling parameter {name!r}: must be {type_words}, got {shown}")
    if kind in ("int", "float") and parameter.type.ge is not None:
        check_range(name, value, parameter.type.ge, parameter.type.le)
    elif kind == "literal" and value not in parameter.type.values:
        # msgspec sorts the values.
        expected = " or ".join(parameter.type.values)
        raise InvalidArgument(f"sampling parameter {name!r}: must be {expected}, got {truncated_repr(value)}")
    elif kind.startswith(("tuple", "dict")):
        _check_lengths(parameter, value)
    return value


def _normalize(parameter: Parameter, value: Any) -> Any:
    """Return `value` unchanged if it is not in a form that vLLM accepts."""
    kind = parameter.kind
    if isinstance(value, list):
        return tuple(map(without_zero_fraction, value)) if kind == "tuple[int]" else tuple(value)
    if kind == "int":
        return without_zero_fraction(value)
    if kind == "tuple[str]" and isinstance(value, str):
        return (value,)
    if kind == "struct" and isinstance(value, Mapping):
        return StructuredOutputsParams.from_mapping(value)
    if kind == "dict" and isinstance(value, Mapping):
        # The keys of a JSON object are always strings.
        return {_token_id(key): bias for key, bias in value.items()}
    if kind == "float" and _is_int(value):
        # The integer may be too large for a float. It is then also out of every range, so it is reduced to the largest
        # magnitude.
        return float(max(-_MAX_MAGNITUDE, min(_MAX_MAGNITUDE, value)))
    return () if value is None and isinstance(parameter.default, tuple) else value


def _check_num_entries(parameter: Parameter, count: int) -> None:
    limit = parameter.type.max_length
    if count > limit:
        raise InvalidArgument(
            f"sampling parameter {parameter.name!r}: at most {limit} entries are allowed, got {count}"
        )


def _check_lengths(parameter: Parameter, value: Any) -> None:
    name = parameter.name
    _check_num_entries(parameter, len(value))
    if parameter.kind == "tuple[str]":
        bounds = parameter.type.item_type
        for text in value:
            if not bounds.min_length <= len(text) <= bounds.max_length:
                raise InvalidArgument(
                    f"sampling parameter {name!r}: each string must have {bounds.min_length} to {bounds.max_length} "
                    f"characters, got {len(text)} in {truncated_repr(text)}"
                )


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise InvalidArgument if `value` is less than `low` or greater than `high`."""
    if not low <= value <= high:
        bounds = f"{_format_bound(low)} to {_format_bound(high)}"
        raise InvalidArgument(f"sampling parameter {name!r}: must be from {bounds}, got {truncated_repr(value)}")


def _format_bound(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _token_id(key: object) -> object:
    try:
        return int(key) if isinstance(key, str) else key
    except ValueError:
        return key


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "float": ("a finite number", _is_number),
    "int": ("an integer", _is_int),
    "literal": ("a string", lambda value: isinstance(value, str)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "bool | literal": ('true, false or "never"', lambda value: isinstance(value, bool) or value == "never"),
    "tuple[str]": (
        "a string or a list of strings",
        lambda value: isinstance(value, tuple) and all(isinstance(v, str) for v in value),
    ),
    "tuple[int]": (
        "a list of integers",
        lambda value: isinstance(value, tuple) and all(map(_is_int, value)),
    ),
    "dict": (
        "an object that maps token ids to numbers",
        lambda value: (
            isinstance(value, dict)
            and all(_is_int(key) and (_is_int(bias) or _is_number(bias)) for key, bias in value.items())
        ),
    ),
    "struct": (
        "an object with one of json, regex, choice, grammar, json_object and structural_tag",
        lambda value: isinstance(value, StructuredOutputsParams),
    ),
}
"""Maps each kind of parameter to a pair: how error messages describe the type, and the function that checks a value."""
