# SPDX-License-Identifier: Apache-2.0
"""Reads a grammar file and tells one text from it.

Owns the file form that `stories.txt`, `pirate.txt` and `desk.txt` share. Knows nothing of what the texts are about:
`stories`, `pirate` and `desk` bring the words.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


class GrammarError(ValueError):
    """A grammar file that cannot be read: the message says which line and why."""


@dataclass(frozen=True, slots=True)
class Plot:
    """One way for a text to go, with the ways to word each part of it."""

    name: str
    """What the file calls it."""
    words: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    """Names bound together, and the list they are drawn from without repeats."""
    steps: tuple[tuple[str, ...], ...]
    """In order; each is the ways to say one step."""

    def tell(self, rng: random.Random, bindings: Mapping[str, object]) -> list[str]:
        """The steps in order, one wording each, with the plot's words and `bindings` filled in."""
        filled = dict(bindings)
        for names, choices in self.words:
            filled.update(zip(names, rng.sample(choices, len(names)), strict=True))
        return [tidy(rng.choice(ways).format(**filled)) for ways in self.steps]


def tidy(text: str) -> str:
    """Sentences begin with a capital, and "a" before a vowel becomes "an" (but "a one-legged")."""
    text = re.sub(r"\b([Aa]) (?=[aeio])(?!one)", r"\1n ", text)
    return re.sub(r"(^|[.!?] )([a-z])", lambda found: found[1] + found[2].upper(), text)


def words(text: str) -> tuple[str, ...]:
    """The words of a line, for lists that read better without quotes and commas."""
    return tuple(text.split())


def load(file_name: str) -> tuple[Plot, ...]:
    """Read a grammar file that lies beside this module.

    Raises:
        GrammarError: a line outside a plot, or a word list too short for its names.
    """
    plots: list[Plot] = []
    for number, line in enumerate((_FOLDER / file_name).read_text(encoding="utf-8").splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("== "):
            plots.append(Plot(line[3:], (), ()))
            continue
        if not plots:
            raise GrammarError(f"{file_name}:{number}: {line!r} stands before any '== name'; move it into a plot")
        plots[-1] = _extend(plots[-1], line, f"{file_name}:{number}")
    return tuple(plots)


def _extend(plot: Plot, line: str, where: str) -> Plot:
    if not line.startswith("@"):
        return Plot(plot.name, plot.words, (*plot.steps, _ways(line)))
    left, _, right = line[1:].partition("=")
    names, choices = tuple(name.strip() for name in left.split(",")), _ways(right)
    if len(choices) < len(names):
        raise GrammarError(f"{where}: {len(names)} names share {len(choices)} words; add words to the list")
    return Plot(plot.name, (*plot.words, (names, choices)), plot.steps)


def _ways(text: str) -> tuple[str, ...]:
    return tuple(way.strip() for way in text.split(" | "))
