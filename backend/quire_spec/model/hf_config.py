# SPDX-License-Identifier: Apache-2.0
"""ConfigJson: a checkpoint's config.json read key by key, each value checked. The one place that refuses its types.

What the keys mean for a family is told by families.py and shape.py.
"""

from collections.abc import Mapping
from typing import Any

from quire_spec.errors import ConfigError, truncated_repr

# Far beyond any model, and small enough that no arithmetic overflows: a config.json may come from anyone.
_MAX_INTEGER = 2**31 - 1
_MAX_NUMBER = 1e15


class HFConfigReader:
    """An object of config.json. A key that is null counts as absent, as transformers has it.

    Every method raises ConfigError, with the key and what was found, for a value of the wrong type, and where no
    default is given for a key that is absent.
    """

    def __init__(
        self, values: object, defaults: Mapping[str, Any] | None = None, location: str = "config.json"
    ) -> None:
        """`defaults`: values of keys that are not there at all."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"{location}: expected an object, found {truncated_repr(values)}")
        self._values = {**(defaults or {}), **values}
        self._location = location

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it."""
        return not self._values

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def get_int(self, key: str, default: int | None = None, maximum: int = _MAX_INTEGER, minimum: int = 1) -> int:
        """An integer of at most `most` and at least `least`, 0 or 1."""
        value = self._get_value(key, default)
        if type(value) is not int or value < minimum:
            raise self.error(key, value, "a positive integer" if minimum else "0 or a positive integer")
        if value > maximum:
            raise self.error(key, value, f"at most {maximum}")
        return value

    def get_float(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get_value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_NUMBER:
            raise self.error(key, value, "a positive number")
        return float(value)

    def get_bool(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._get_value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def get_str(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get_value(key, default)
        if not isinstance(value, str):
            raise self.error(key, value, "a string")
        return value

    def get_float_list(self, key: str) -> tuple[float, ...]:
        """A list of positive numbers."""
        value = self._get_value(key, None)
        is_valid = isinstance(value, list) and all(
            type(item) in (int, float) and 0 < item <= _MAX_NUMBER for item in value
        )
        if not is_valid:
            raise self.error(key, value, "a list of positive numbers")
        return tuple(float(item) for item in value)

    def get_str_list(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._get_value(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, value, "a list of strings")
        return tuple(value)

    def get_token_ids(self, key: str) -> tuple[int, ...]:
        """A token id, a list of them, or none."""
        value = self._values.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item <= _MAX_INTEGER for item in items):
            raise self.error(key, value, "a token id or a list of token ids")
        return tuple(items)

    def get_section(self, *keys: str) -> "HFConfigReader":
        """The first of these objects in this one that is not empty; an empty one when there is none."""
        key = next((key for key in keys if self._values.get(key) not in (None, {})), keys[-1])
        value = self._values.get(key)
        return HFConfigReader({} if value is None else value, location=f"{self._location}: {key}")

    def error(self, key: str, value: object, expected: str) -> ConfigError:
        """The refusal of a value, to be raised."""
        return ConfigError(f"{self._location}: {key}: {truncated_repr(value)} is not {expected}")

    def _get_value(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self._location}: {key} is missing")
        return value
