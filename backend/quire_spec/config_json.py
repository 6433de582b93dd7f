# SPDX-License-Identifier: Apache-2.0
"""ConfigJson: a checkpoint's config.json read key by key, each value checked. The one place that refuses its types.

What the keys mean for a family is told by families.py and shape.py.
"""

from collections.abc import Mapping
from typing import Any

from quire_spec.errors import ConfigError, short

# Far beyond any model, and small enough that no arithmetic overflows: a config.json may come from anyone.
_MAX_INTEGER = 2**31 - 1
_MAX_NUMBER = 1e15


class ConfigJson:
    """An object of config.json. A key that is null counts as absent, as transformers has it.

    Every method raises ConfigError, with the key and what was found, for a value of the wrong type, and where no
    default is given for a key that is absent.
    """

    def __init__(self, values: object, defaults: Mapping[str, Any] | None = None, where: str = "config.json") -> None:
        """`defaults`: values of keys that are not there at all."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: expected an object, found {short(values)}")
        self._values = {**(defaults or {}), **values}
        self._where = where

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it."""
        return not self._values

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def integer(self, key: str, default: int | None = None, most: int = _MAX_INTEGER, least: int = 1) -> int:
        """An integer of at most `most` and at least `least`, 0 or 1."""
        value = self._get(key, default)
        if type(value) is not int or value < least:
            raise self.error(key, value, "a positive integer" if least else "0 or a positive integer")
        if value > most:
            raise self.error(key, value, f"at most {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_NUMBER:
            raise self.error(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, value, "a string")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive numbers."""
        value = self._get(key, None)
        numbers = isinstance(value, list) and all(
            type(item) in (int, float) and 0 < item <= _MAX_NUMBER for item in value
        )
        if not numbers:
            raise self.error(key, value, "a list of positive numbers")
        return tuple(float(item) for item in value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, value, "a list of strings")
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id, a list of them, or none."""
        value = self._values.get(key)
        found = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item <= _MAX_INTEGER for item in found):
            raise self.error(key, value, "a token id or a list of token ids")
        return tuple(found)

    def section(self, *keys: str) -> "ConfigJson":
        """The first of these objects in this one that is not empty; an empty one when there is none."""
        key = next((key for key in keys if self._values.get(key) not in (None, {})), keys[-1])
        value = self._values.get(key)
        return ConfigJson({} if value is None else value, where=f"{self._where}: {key}")

    def error(self, key: str, value: object, wanted: str) -> ConfigError:
        """The refusal of a value, to be raised."""
        return ConfigError(f"{self._where}: {key}: {short(value)} is not {wanted}")

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self._where}: {key} is missing")
        return value
