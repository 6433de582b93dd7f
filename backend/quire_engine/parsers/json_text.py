# SPDX-License-Identifier: Apache-2.0
"""Converts values that a model wrote to JSON text.

A model can write what JSON does not contain (NaN), and what UTF-8 cannot encode: an escape of half a surrogate pair.
"""

import json
from typing import Any, NoReturn


def repair_surrogates(text: str) -> str:
    """Join surrogate pairs to characters, and replace all other surrogates with U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def dump_json(value: object) -> str:
    """Return the JSON text of a value. Raises ValueError or TypeError if JSON has no such value."""
    return repair_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))


def load_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is not JSON, also for NaN and Infinity, which Python's
    own function accepts."""
    return json.loads(text, parse_constant=_reject)


def _reject(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
