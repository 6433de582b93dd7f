# SPDX-License-Identifier: Apache-2.0
"""The fields rank_pattern and alpha_pattern of an adapter's config: values of modules, by regular expressions.

Source: `get_pattern_key` in PEFT 0.21, utils/other.py
"""

import re
from collections import defaultdict
from collections.abc import Mapping

from quire_engine.lora.peft.regex_matcher import RegexMatcher

# A path of a module is a regular expression, too, whose dots match any character. Trainers write one such key for each
# module, so comparing them must be quick: 4,096 keys and 500 modules take 0.2 s at most.
_PLAIN_KEY = re.compile(r"\^?(?:[\w.]|\\\.)+\$?", re.ASCII)
_ESCAPED_DOT = b"/"
_TO_MASK = bytes(0 if byte == ord(".") else 255 for byte in range(256))
_TO_TEXT = bytes(0 if byte == ord(".") else byte for byte in range(256)).replace(_ESCAPED_DOT, b".")


class ModulePattern:
    """The value of the first key that matches the end of a module's path. Keys are matched as in PEFT."""

    def __init__(self, values: Mapping[str, float], matcher: RegexMatcher) -> None:
        """Create the pattern. Each key is a valid and safe regular expression."""
        self._matcher = matcher
        self._values = list(values.values())
        # Contains the index of a key, the bits that are compared, their values, and whether the whole path must match.
        self._plain_keys: defaultdict[int, list[tuple[int, int, int, bool]]] = defaultdict(list)
        self._regexes: list[tuple[int, str]] = []
        for index, key in enumerate(values):
            if not _PLAIN_KEY.fullmatch(key):
                self._regexes.append((index, rf"(?:.*\.)?(?:{key})"))
                continue
            text = key.removeprefix("^").removesuffix("$").encode().replace(rb"\.", _ESCAPED_DOT)
            mask, value = (int.from_bytes(text.translate(table)) for table in (_TO_MASK, _TO_TEXT))
            self._plain_keys[len(text)].append((index, mask, value, key.startswith("^")))
        self._indexes: dict[str, int | None] = {}

    def get(self, path: str, default: float) -> float:
        """Return the value for a module.

        Raises:
            InvalidArgument: the regular expressions took too long.
        """
        if path not in self._indexes:
            self._indexes[path] = self._first_match(path)
        index = self._indexes[path]
        return default if index is None else self._values[index]

    def _first_match(self, path: str) -> int | None:
        first = len(self._values)
        data = path.encode()
        for start in (0, *(dot.end() for dot in re.finditer(rb"\.", data))):
            suffix = int.from_bytes(data[start:])
            for index, mask, value, is_whole in self._plain_keys.get(len(data) - start, ()):
                if suffix & mask == value and not (is_whole and start):
                    first = min(first, index)
                    break
        for index, expression in self._regexes:
            if index > first:
                break
            if self._matcher.matches(expression, path):
                return index
        return first if first < len(self._values) else None
