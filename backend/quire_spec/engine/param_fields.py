# SPDX-License-Identifier: Apache-2.0
"""One parameter of a request: how its value is read from text, what type it has, which range it may take.

sampling.py declares the parameters; everything here is about a single value and knows none of them.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import Field
from typing import Any

from quire_spec.errors import InvalidArgument, truncated_repr

_MAX_MAGNITUDE = 2**63
_LIST_OF_STRINGS = re.compile(r"""\[\s*["']""")
"""How one begins, in JSON or as Python shows it; "[INST]" is a string."""


def in_range(low: float, high: float) -> Mapping[str, Any]:
    """Metadata of a field whose value, if it is not None, must be from `low` to `high`."""
    return {"range": (low, high)}


def max_entries(limit: int) -> Mapping[str, Any]:
    """Metadata of a field that holds several entries, `most` of them at most."""
    return {"entries": limit}


def parse_text(parameter: Field[Any], value: Any) -> Any:
    """Undo the stringification that clients and the server's parameter types force; leave what does not parse.

    Numbers and booleans may come as strings ("0.5", "true": clients of NVIDIA's vllm_backend do that), lists and
    objects as JSON strings ('["a", "b"]': the server's generate endpoint takes neither).

    Raises:
        InvalidArgument: a text that begins like a list of strings is none, so that it would be taken for a single one.
    """
    kind = type_name(parameter)
    if not isinstance(value, str) or (kind.startswith("tuple") and not value.startswith("[")):
        return value
    try:
        parsed = float(value) if kind == "float" else json.loads(value.lower() if kind == "bool" else value)
    except (ValueError, RecursionError):
        if kind.startswith("tuple[str") and _LIST_OF_STRINGS.match(value):
            raise InvalidArgument(
                f"sampling parameter {parameter.name!r}: {truncated_repr(value)} begins like a list of strings and is "
                "not JSON; "
                'write it like ["a", "b"], also where this text itself is the only string'
            ) from None
        return value
    # The text "null" is no number: taken for none, it would lift a limit that somebody meant to set.
    return value if parsed is None else parsed


def normalize(parameter: Field[Any], value: Any) -> Any:
    """`value` in the form that the parameter keeps it in, if it is one of the forms that vLLM takes."""
    kind = type_name(parameter)
    if isinstance(value, list):
        return tuple(value)
    if kind.startswith("tuple[str") and isinstance(value, str):
        return (value,)
    if kind.startswith("dict") and isinstance(value, Mapping):
        # JSON has no integer keys.
        return {_token_id(key): bias for key, bias in value.items()}
    return () if value is None and isinstance(parameter.default, tuple) else value


def validate(parameter: Field[Any], value: Any) -> Any:
    """`value`, an integer made a float where one is meant.

    Raises:
        InvalidArgument: wrong type, out of range, or too many entries; the message names the parameter.
    """
    name, kind = parameter.name, type_name(parameter)
    if kind == "float" and _is_int(value):
        # An integer beyond every float is beyond every range, too.
        value = float(max(-_MAX_MAGNITUDE, min(_MAX_MAGNITUDE, value)))
    if value is None and kind.endswith("| None"):
        return None
    expected, accepts = _TYPES[kind.removesuffix(" | None")]
    if not accepts(value):
        # Lists have become tuples by now, and it is lists that clients send.
        shown = truncated_repr(list(value) if isinstance(value, tuple) else value)
        raise InvalidArgument(f"sampling parameter {name!r}: {shown} is not {expected}")
    if bounds := parameter.metadata.get("range"):
        check_range(name, value, *bounds)
    limit = parameter.metadata.get("entries")
    if limit is not None and len(value) > limit:
        raise InvalidArgument(f"sampling parameter {name!r}: {len(value)} entries; at most {limit} are allowed")
    return value


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise InvalidArgument unless `value` is from `low` to `high`."""
    if not low <= value <= high:
        bounds = f"{_format_bound(low)} to {_format_bound(high)}"
        raise InvalidArgument(f"sampling parameter {name!r}: {truncated_repr(value)} is out of range; use {bounds}")


def _format_bound(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def type_name(parameter: Field[Any]) -> str:
    """The parameter's type, as it is written."""
    return parameter.type.__name__ if isinstance(parameter.type, type) else str(parameter.type)


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
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "tuple[str, ...]": (
        "a string or a list of strings",
        lambda value: isinstance(value, tuple) and all(isinstance(v, str) for v in value),
    ),
    "tuple[int, ...]": (
        "a list of integers",
        lambda value: isinstance(value, tuple) and all(map(_is_int, value)),
    ),
    "dict[int, float]": (
        "an object of numbers by token id",
        lambda value: (
            isinstance(value, dict)
            and all(_is_int(key) and (_is_int(bias) or _is_number(bias)) for key, bias in value.items())
        ),
    ),
}
"""What a value of each type is called in an error, and whether it is one."""
