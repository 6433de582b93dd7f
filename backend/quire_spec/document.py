# SPDX-License-Identifier: Apache-2.0
"""Frozen dataclasses from JSON documents and back, strictly: an unknown key or a wrong type is an error with its path.

Every document of ours (engine.json, adapters.json, status) is read by this one function, so that they all
refuse the same way.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast

from quire_spec.errors import ConfigError, short

T = TypeVar("T")


def from_json(cls: type[T], data: object, where: str = "", newer: bool = False) -> T:
    """Build the dataclass `cls` from parsed JSON.

    `where` is the path of `data` in its document, for messages. `newer`: unknown keys are left out, as for a document
    that a later release may have written. Handles nested dataclasses, lists, tuples, string-keyed
    dicts, enums, unions with None, and the scalar types; an int is accepted where a float is asked.

    Raises:
        ConfigError: a key is unknown or missing, or a value has the wrong type.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or cls.__name__}: expected an object, found {_kind(data)}")
    hints = typing.get_type_hints(cls)
    if newer:
        data = {key: value for key, value in data.items() if key in hints}
    elif unknown := sorted(set(data) - set(hints)):
        raise ConfigError(
            f"{_join(where, str(unknown[0]))}: unknown field; {cls.__name__} has {', '.join(sorted(hints))}"
        )
    for field in dataclasses.fields(cast(Any, cls)):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in data:
            raise ConfigError(f"{_join(where, field.name)}: missing; {cls.__name__} needs it")
    return cls(**{key: _value(hints[key], value, _join(where, key), newer) for key, value in data.items()})


def load(path: Path) -> Any:
    """A JSON file, parsed.

    Raises:
        ConfigError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error


def load_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; raises ConfigError as `load` does, also for anything else."""
    found = load(path)
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected an object, found {_kind(found)}")
    return found


def to_json(value: object) -> Any:
    """The JSON form of a dataclass, with every field present (enums by value, tuples as lists)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    return value


def compact(value: Any) -> Any:
    """A JSON value without the fields that are null, at every depth."""
    if isinstance(value, Mapping):
        return {key: compact(item) for key, item in value.items() if item is not None}
    return [compact(item) for item in value] if isinstance(value, list | tuple) else value


def _value(hint: Any, value: object, where: str, newer: bool) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return value
    if origin in (typing.Union, types.UnionType):
        return _union(args, value, where, newer)
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}: expected a list, found {_kind(value)}")
        return origin(_value(args[0], item, f"{where}[{i}]", newer) for i, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected an object, found {_kind(value)}")
        return {str(k): _value(args[1], v, _join(where, str(k)), newer) for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_json(cast(type, hint), value, where, newer)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint, value, where)
    return _scalar(hint, value, where)


def _union(args: tuple[Any, ...], value: object, where: str, newer: bool) -> Any:
    if value is None and type(None) in args:
        return None
    choices = [a for a in args if a is not type(None)]
    for choice in choices[:-1]:
        try:
            return _value(choice, value, where, newer)
        except ConfigError:
            continue
    return _value(choices[-1], value, where, newer)


def _enum(hint: type[Enum], value: object, where: str) -> Enum:
    for member in hint:
        if member.value == value:
            return member
    raise ConfigError(f"{where}: {value!r} is not one of {', '.join(str(m.value) for m in hint)}")


def _scalar(hint: Any, value: object, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where}: expected {_name(hint)}, found {_kind(value)} {short(value)}")
    return value


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _name(hint: Any) -> str:
    return {int: "an integer", float: "a number", str: "a string", bool: "true or false"}.get(hint, str(hint))


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, Mapping) else type(value).__name__)
