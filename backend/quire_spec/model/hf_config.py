# SPDX-License-Identifier: Apache-2.0
"""Reader for the config.json of a checkpoint. It checks that each value has the right type and range. The modules
architectures.py and model_config.py define what the keys mean."""

from collections.abc import Iterator, Mapping
from typing import Any

from quire_spec.dataclass_json import without_zero_fraction
from quire_spec.errors import ConfigError, truncated_repr

# No model needs larger numbers than these. The limits prevent overflows, because config.json is untrusted input.
MAX_INTEGER = 2**31 - 1
_MAX_NUMBER = 1e15


class HFConfigReader:
    """An object of config.json. A key with the value null is treated as absent, as in transformers.

    Every getter raises ConfigError if the value has the wrong type, or if the key is absent and has no default. The
    message names the key and the value.
    """

    def __init__(
        self, values: object, defaults: Mapping[str, Any] | None = None, location: str = "config.json"
    ) -> None:
        """`defaults` contains values for keys that are not in `values`. A key whose value in `values` is null has no
        value, not even its default."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"{location}: expected an object, got {truncated_repr(values)}")
        self._values = {**(defaults or {}), **values}
        self._location = location

    @property
    def is_empty(self) -> bool:
        """True if the object has no keys."""
        return not self._values

    def __iter__(self) -> Iterator[str]:
        """Yield the keys of the object."""
        return iter(self._values)

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def get_raw(self, key: str) -> object:
        """Return the value of a key. It can have any type. The result is None if the key is absent."""
        return self._values.get(key)

    def get_int(self, key: str, default: int | None = None, maximum: int = MAX_INTEGER, minimum: int = 1) -> int:
        """Return an integer from `minimum` (0 or 1) to `maximum`."""
        value = without_zero_fraction(self._get_value(key, default))
        if type(value) is not int or value < minimum:
            raise self.error(key, value, "a positive integer" if minimum else "0 or a positive integer")
        if value > maximum:
            raise self.error(key, value, f"at most {maximum}")
        return value

    def get_float(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self._get_value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_NUMBER:
            raise self.error(key, value, "a positive number")
        return float(value)

    def get_bool(self, key: str, default: bool | None = None) -> bool:
        """Return a boolean."""
        value = self._get_value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def get_str(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._get_value(key, default)
        if not isinstance(value, str):
            raise self.error(key, value, "a string")
        return value

    def get_float_list(self, key: str) -> tuple[float, ...]:
        """Return a list of positive numbers."""
        value = self._get_value(key, None)
        is_valid = isinstance(value, list) and all(
            type(item) in (int, float) and 0 < item <= _MAX_NUMBER for item in value
        )
        if not is_valid:
            raise self.error(key, value, "a list of positive numbers")
        return tuple(float(item) for item in value)

    def get_int_list(self, key: str) -> tuple[int, ...]:
        """Return a list of integers."""
        value = self._get_value(key, None)
        items = [without_zero_fraction(item) for item in value] if isinstance(value, list) else [value]
        if not isinstance(value, list) or not all(type(item) is int for item in items):
            raise self.error(key, value, "a list of integers")
        return tuple(items)

    def get_str_list(self, key: str) -> tuple[str, ...]:
        """Return a list of strings."""
        value = self._get_value(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, value, "a list of strings")
        return tuple(value)

    def get_token_ids(self, key: str) -> tuple[int, ...]:
        """Return the token ids at a key. The value in config.json can be a single id or a list of ids. If the key is
        absent, the result is empty."""
        value = self._values.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        items = [without_zero_fraction(item) for item in items]
        if not all(type(item) is int and 0 <= item <= MAX_INTEGER for item in items):
            raise self.error(key, value, "a token id or a list of token ids")
        return tuple(items)

    def get_section(self, *keys: str) -> "HFConfigReader":
        """Return a reader for the value of the first key in `keys` that contains a non-empty object.

        If none of `keys` contains one, return an empty reader.
        """
        key = next((key for key in keys if self._values.get(key) not in (None, {})), keys[-1])
        value = self._values.get(key)
        return HFConfigReader({} if value is None else value, location=f"{self._location}: {key}")

    def without(self, key: str) -> "HFConfigReader":
        """Return a reader of the same object that ignores a key."""
        return HFConfigReader({k: v for k, v in self._values.items() if k != key}, location=self._location)

    def error(self, key: str, value: object, expected: str) -> ConfigError:
        """Return the error that reports an invalid value."""
        return ConfigError(f"{self._location}: {key}: must be {expected}, got {truncated_repr(value)}")

    def _get_value(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self._location}: {key} is missing")
        return value
