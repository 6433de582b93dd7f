# SPDX-License-Identifier: Apache-2.0
"""Strict conversion between JSON documents and frozen dataclasses. Unknown keys and wrong types are errors.

Each error contains the path of the wrong field. All documents (pod.json, adapters.json, status) are read with
`from_json`, so their errors have the same form.
"""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast

from quire_spec.errors import ConfigError, truncated_repr

T = TypeVar("T")


def from_json(cls: type[T], data: object, field_path: str = "", ignore_unknown: bool = False) -> T:
    """Build the dataclass `cls` from parsed JSON.

    The function supports nested dataclasses, lists, tuples, dicts with string keys, enums, unions with None, absolute
    paths, and the scalar types. An int is accepted where a float is expected.

    Args:
        field_path: path of `data` in its document, for error messages.
        ignore_unknown: if true, unknown keys are dropped. Use this if a later release may have written the document.

    Raises:
        ConfigError: a key is unknown or missing, or a value has the wrong type.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{field_path or cls.__name__}: expected an object, got {_type_name(data)}")
    names = [field.name for field in dataclasses.fields(cast(Any, cls))]
    hints = _type_hints(cast(Any, cls))
    if ignore_unknown:
        data = {key: value for key, value in data.items() if key in names}
    elif unknown := sorted(set(data) - set(names)):
        raise ConfigError(
            f"{_join_path(field_path, str(unknown[0]))}: unknown field; {cls.__name__} has {', '.join(sorted(names))}"
        )
    for field in dataclasses.fields(cast(Any, cls)):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in data:
            raise ConfigError(f"{_join_path(field_path, field.name)}: missing; {cls.__name__} requires it")
    return cls(
        **{
            key: _convert_value(hints[key], value, _join_path(field_path, key), ignore_unknown)
            for key, value in data.items()
        }
    )


@functools.cache
def _type_hints(cls: type) -> dict[str, Any]:
    # Python evaluates the annotations in each call, which took a fifth of the time to read an LLMService.
    return typing.get_type_hints(cls)


def read_json(path: Path) -> Any:
    """Read and parse a JSON file.

    Raises:
        ConfigError: the file cannot be read or is not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object.

    Raises:
        ConfigError: `read_json` rejects the file, or the document is not an object.
    """
    document = read_json(path)
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected an object, got {_type_name(document)}")
    return document


def to_json(value: object) -> Any:
    """Convert a dataclass to JSON. The result contains every field; an enum becomes its value, a tuple becomes a list,
    and a path becomes a string."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    return value


def non_default_json(value: Any) -> dict[str, Any]:
    """Convert a dataclass to JSON, without the fields that are equal to their defaults, at every depth."""
    document = {}
    for f in dataclasses.fields(value):
        item = getattr(value, f.name)
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if item != default:
            document[f.name] = non_default_json(item) if dataclasses.is_dataclass(item) else to_json(item)
    return document


def drop_nulls(value: Any) -> Any:
    """Remove all null fields from a JSON value, at every depth."""
    if isinstance(value, Mapping):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _convert_value(hint: Any, value: object, field_path: str, ignore_unknown: bool) -> Any:
    # A value of a NewType is checked like a value of the type on which the NewType is based.
    hint = getattr(hint, "__supertype__", hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value, field_path, ignore_unknown)
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{field_path}: expected a list, got {_type_name(value)}")
        return origin(
            _convert_value(args[0], item, f"{field_path}[{i}]", ignore_unknown) for i, item in enumerate(value)
        )
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{field_path}: expected an object, got {_type_name(value)}")
        return {
            str(k): _convert_value(args[1], v, _join_path(field_path, str(k)), ignore_unknown) for k, v in value.items()
        }
    if dataclasses.is_dataclass(hint):
        return from_json(cast(type, hint), value, field_path, ignore_unknown)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _convert_enum(hint, value, field_path)
    return _convert_scalar(hint, value, field_path)


def _convert_union(args: tuple[Any, ...], value: object, field_path: str, ignore_unknown: bool) -> Any:
    if value is None and type(None) in args:
        return None
    choices = [a for a in args if a is not type(None)]
    for choice in choices[:-1]:
        try:
            return _convert_value(choice, value, field_path, ignore_unknown)
        except ConfigError:
            continue
    return _convert_value(choices[-1], value, field_path, ignore_unknown)


def _convert_enum(hint: type[Enum], value: object, field_path: str) -> Enum:
    for member in hint:
        if member.value == value:
            return member
    raise ConfigError(f"{field_path}: must be one of {', '.join(str(m.value) for m in hint)}, got {value!r}")


def _convert_scalar(hint: Any, value: object, field_path: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path:
        if not isinstance(value, str) or not value.startswith("/"):
            raise ConfigError(f"{field_path}: expected an absolute path, got {truncated_repr(value)}; begin it with /")
        return Path(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(
            f"{field_path}: expected {_expected_type(hint)}, got {_type_name(value)} {truncated_repr(value)}"
        )
    return value


def _join_path(field_path: str, key: str) -> str:
    return f"{field_path}.{key}" if field_path else key


def _expected_type(hint: Any) -> str:
    return {int: "an integer", float: "a number", str: "a string", bool: "true or false"}.get(hint, str(hint))


def _type_name(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, Mapping) else type(value).__name__)


def without_zero_fraction(value: Any) -> Any:
    """Return 5 for 5.0, and other values unchanged. JSON has one type of numbers, and some programs write all of them
    with a fraction."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
