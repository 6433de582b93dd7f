# SPDX-License-Identifier: Apache-2.0
"""Parse and validate the value of one request parameter: convert text, and check the type and the range. The functions
of this module treat all parameters alike."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import Field
from typing import Any

from quire_spec.engine.structured_outputs import StructuredOutputsParams
from quire_spec.errors import InvalidArgument, truncated_repr

_MAX_MAGNITUDE = 2**63
_LIST_OF_STRINGS = re.compile(r"""\[\s*["']""")
"""Matches the start of a text that is a list of strings in JSON or Python notation. It does not match a plain string
that starts with a bracket, such as [INST]."""


def in_range(low: float, high: float) -> Mapping[str, Any]:
    """Return the metadata of a field. Its value must be None, or a number from `low` to `high`."""
    return {"range": (low, high)}


def one_of(*values: str) -> Mapping[str, Any]:
    """Return the metadata of a text field. Its value must be one of `values`."""
    return {"values": values}


def max_entries(limit: int) -> Mapping[str, Any]:
    """Return the metadata of a field that contains a collection. The collection can have at most `limit` entries."""
    return {"entries": limit}


def parse_text(parameter: Field[Any], value: Any) -> Any:
    """Parse a value that was sent as text; return the value unchanged if it cannot be parsed.

    Text is accepted for numbers and booleans ("0.5", "true"), because clients of NVIDIA's vllm_backend send strings.
    Text that is JSON is accepted for lists and objects ('["a", "b"]'), because the server's generate endpoint rejects
    real lists and objects.

    Raises:
        InvalidArgument: a text starts like a list of strings, but it is not JSON. The client could have meant a list or
            a single string.
    """
    kind = type_name(parameter)
    if not isinstance(value, str) or (kind.startswith("tuple") and not value.startswith("[")):
        return value
    try:
        parsed = float(value) if kind == "float" else json.loads(value.lower() if kind.startswith("bool") else value)
    except (ValueError, RecursionError):
        if kind.startswith("tuple[str") and _LIST_OF_STRINGS.match(value):
            raise InvalidArgument(
                f"sampling parameter {parameter.name!r}: must be a JSON list of strings, got {truncated_repr(value)}, "
                'which is not JSON; write it like ["a", "b"], also for a single string'
            ) from None
        return value
    # The text "null" is not a number. Parsing it as None would remove a limit that the client meant to set.
    return value if parsed is None else parsed


def normalize(parameter: Field[Any], value: Any) -> Any:
    """Return `value` in the form that the field stores. Return it unchanged if it is not in a form that vLLM
    accepts."""
    kind = type_name(parameter)
    if isinstance(value, list):
        return tuple(value)
    if kind.startswith("tuple[str") and isinstance(value, str):
        return (value,)
    if kind.startswith("StructuredOutputsParams") and isinstance(value, Mapping):
        return StructuredOutputsParams.from_mapping(value)
    if kind.startswith("dict") and isinstance(value, Mapping):
        # The keys of a JSON object are always strings.
        return {_token_id(key): bias for key, bias in value.items()}
    return () if value is None and isinstance(parameter.default, tuple) else value


def validate(parameter: Field[Any], value: Any) -> Any:
    """Return `value` if it is valid. If the parameter is a float and `value` is an integer, return it as a float.

    Raises:
        InvalidArgument: the value has the wrong type, is out of range, or has too many entries. The message names the
            parameter.
    """
    name, kind = parameter.name, type_name(parameter)
    if kind == "float" and _is_int(value):
        # The integer may be too large for a float. It is then also out of every range, so it is reduced to the largest
        # magnitude.
        value = float(max(-_MAX_MAGNITUDE, min(_MAX_MAGNITUDE, value)))
    if value is None and kind.endswith("| None"):
        return None
    type_words, accepts = _TYPES[kind.removesuffix(" | None")]
    if not accepts(value):
        # Clients send lists. They were converted to tuples, but the message must show a list.
        shown = truncated_repr(list(value) if isinstance(value, tuple) else value)
        raise InvalidArgument(f"sampling parameter {name!r}: must be {type_words}, got {shown}")
    if bounds := parameter.metadata.get("range"):
        check_range(name, value, *bounds)
    values = parameter.metadata.get("values")
    if values is not None and value not in values:
        expected = " or ".join(values)
        raise InvalidArgument(f"sampling parameter {name!r}: must be {expected}, got {truncated_repr(value)}")
    limit = parameter.metadata.get("entries")
    if limit is not None and len(value) > limit:
        raise InvalidArgument(f"sampling parameter {name!r}: at most {limit} entries are allowed, got {len(value)}")
    return value


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise InvalidArgument if `value` is less than `low` or greater than `high`."""
    if not low <= value <= high:
        bounds = f"{_format_bound(low)} to {_format_bound(high)}"
        raise InvalidArgument(f"sampling parameter {name!r}: must be from {bounds}, got {truncated_repr(value)}")


def _format_bound(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def type_name(parameter: Field[Any]) -> str:
    """Return the parameter's type annotation as text."""
    if isinstance(parameter.type, type):
        return parameter.type.__name__
    return str(parameter.type).replace(f"{StructuredOutputsParams.__module__}.", "")


def _token_id(key: object) -> object:
    try:
        return int(key) if isinstance(key, str) else key
    except ValueError:
        return key


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "float": ("a finite number", _is_number),
    "int": ("an integer", _is_int),
    "str": ("a string", lambda value: isinstance(value, str)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "bool | str": ('true, false or "never"', lambda value: isinstance(value, bool) or value == "never"),
    "tuple[str, ...]": (
        "a string or a list of strings",
        lambda value: isinstance(value, tuple) and all(isinstance(v, str) for v in value),
    ),
    "tuple[int, ...]": (
        "a list of integers",
        lambda value: isinstance(value, tuple) and all(map(_is_int, value)),
    ),
    "dict[int, float]": (
        "an object that maps token ids to numbers",
        lambda value: (
            isinstance(value, dict)
            and all(_is_int(key) and (_is_int(bias) or _is_number(bias)) for key, bias in value.items())
        ),
    ),
    "StructuredOutputsParams": (
        "an object with one of json, regex, choice, grammar, json_object and structural_tag",
        lambda value: isinstance(value, StructuredOutputsParams),
    ),
}
"""Maps each type annotation to a pair: how error messages describe the type, and the function that checks a value."""
