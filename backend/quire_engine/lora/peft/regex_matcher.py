# SPDX-License-Identifier: Apache-2.0
"""Matches regular expressions of an adapter's config against module paths. The expressions are untrusted.

Python's `re` cannot be interrupted, so an expression must be safe: one match takes some milliseconds at most. All
matches of an adapter together have a limit of CPU time.
"""

import re
import time
from itertools import pairwise

from quire_spec.errors import InvalidArgument, truncated_repr

MAX_CPU_S = 0.5
"""Limit for all expressions of an adapter, in seconds of CPU time. An expression with a group for each of 300 layers
needs about 0.001 s for the modules of a large model."""
_MAX_LENGTH = 256
_MAX_PATHS = 1 << 20
"""Largest number of ways to match a path that are tried."""
_REPEAT_PATHS = 32
"""Ways in which a repetition can match. With _MAX_PATHS, it allows four repetitions."""
# Groups that are not listed, backreferences, flags and comments are not safe.
_TOKEN = re.compile(
    r"(?P<open>\((?:\?(?:[:=!]|P<\w+>)|(?!\?)))|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<repeat>(?:[*+?]|\{\d*,?\d*\})[?+]?)"
    r"|(?P<literal>[^()|*+?{.^$\\\[]|\\[^\w])|(?P<atom>[.^${]|\\[a-zA-Z]|\[\^?\]?(?:\\.|[^\]\\])*\])",
    re.DOTALL,
)


class RegexMatcher:
    """The matcher of one adapter. It counts the CPU time of all expressions."""

    def __init__(self) -> None:
        self._compiled: dict[str, re.Pattern[str]] = {}
        self._remaining_s = MAX_CPU_S

    def matches(self, expression: str, path: str) -> bool:
        """Return whether a safe expression matches a whole path.

        Raises:
            InvalidArgument: the expressions of the adapter took too long.
        """
        started_at = time.thread_time()
        compiled = self._compiled.get(expression)
        if compiled is None:
            compiled = self._compiled[expression] = re.compile(expression)
        is_match = compiled.fullmatch(path) is not None
        self._remaining_s -= time.thread_time() - started_at
        if self._remaining_s < 0:
            raise InvalidArgument(
                f"the regular expressions, such as {truncated_repr(expression)}, need more than {MAX_CPU_S} s; "
                "use names of modules"
            )
        return is_match


class _Group:
    """A group whose end has not been found yet, or the whole expression."""

    def __init__(self) -> None:
        self.paths = 0
        """Ways to match the alternatives before the current one."""
        self.literals: list[str] | None = []
        """Texts of the alternatives, or None if one of them is not a plain text."""
        self.alternative_paths, self.text = 1, ""

    def end_alternative(self) -> None:
        self.paths += self.alternative_paths
        if self.literals is not None:
            self.literals.append(self.text)
        self.alternative_paths, self.text = 1, ""

    def end(self) -> int:
        """Return the number of ways to match the group."""
        self.end_alternative()
        if self.literals is None:
            return self.paths
        # If no text is the start of another text, only one of them can match.
        texts = sorted(self.literals)
        pairs = pairwise(texts)
        return self.paths if any(second.startswith(first) for first, second in pairs) else 1


def is_safe_regex(expression: str) -> bool:
    """Return whether each match of an expression is quick: it has few repetitions and alternatives, and repeats no
    group that can match in several ways."""
    if len(expression) > _MAX_LENGTH:
        return False
    groups, position, item_paths = [_Group()], 0, 1
    while position < len(expression):
        token = _TOKEN.match(expression, position)
        if token is None:
            return False
        position, group = token.end(), groups[-1]
        if token["open"]:
            group.literals = None
            groups.append(_Group())
        elif token["close"]:
            if len(groups) == 1:
                return False
            item_paths = groups.pop().end()
            groups[-1].alternative_paths *= item_paths
        elif token["bar"]:
            group.end_alternative()
        elif token["repeat"]:
            group.literals = None
            is_optional = token["repeat"][0] == "?"
            if item_paths > 1 and not is_optional:
                return False
            group.alternative_paths *= 2 if is_optional else _REPEAT_PATHS
        else:
            item_paths = 1
            group.text += token[0]
            if token["atom"]:
                group.literals = None
        if group.alternative_paths > _MAX_PATHS:
            return False
    return len(groups) == 1 and groups[0].end() <= _MAX_PATHS
