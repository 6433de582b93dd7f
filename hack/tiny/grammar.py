# SPDX-License-Identifier: Apache-2.0
"""Reads a grammar file, and generates texts from it.

The files `stories.txt`, `pirate.txt` and `desk.txt` have the same format, and this module defines it. The module does
not depend on the content of the files. `stories`, `pirate` and `desk` provide the words.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


class GrammarError(ValueError):
    """A grammar file is invalid. The message contains the line and the reason."""


@dataclass(frozen=True, slots=True)
class Plot:
    """The structure of a text. It is a sequence of steps, and each step has several wordings."""

    name: str
    """Name of the plot in the file."""
    words: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    """Each item contains names and a list of words. In the text, words from the list replace the names, and each name
    gets a different word."""
    steps: tuple[tuple[str, ...], ...]
    """The wordings of each step. The steps are in the order in which they are told."""

    def tell(self, rng: random.Random, bindings: Mapping[str, object]) -> list[str]:
        """Choose one wording for each step and return them in order. The names in the wordings are replaced by words of
        the plot, and by the values in `bindings`."""
        filled = dict(bindings)
        for names, choices in self.words:
            filled.update(zip(names, rng.sample(choices, len(names)), strict=True))
        return [tidy(rng.choice(ways).format(**filled)) for ways in self.steps]


def tidy(text: str) -> str:
    """Return `text` with a capital letter at the start of each sentence. Before a vowel, "a" becomes "an", but not in
    "a one-legged"."""
    text = re.sub(r"\b([Aa]) (?=[aeio])(?!one)", r"\1n ", text)
    return re.sub(r"(^|[.!?] )([a-z])", lambda found: found[1] + found[2].upper(), text)


def words(text: str) -> tuple[str, ...]:
    """Return the words of a line. With this function, a list of words in the source code needs neither quotes nor
    commas."""
    return tuple(text.split())


def load(file_name: str) -> tuple[Plot, ...]:
    """Read a grammar file in the folder of this module.

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
            raise GrammarError(f"{file_name}:{number}: {line!r} is before the first '== name'; move it into a plot")
        plots[-1] = _extend(plots[-1], line, f"{file_name}:{number}")
    return tuple(plots)


def _extend(plot: Plot, line: str, where: str) -> Plot:
    if not line.startswith("@"):
        return Plot(plot.name, plot.words, (*plot.steps, _ways(line)))
    left, _, right = line[1:].partition("=")
    names, choices = tuple(name.strip() for name in left.split(",")), _ways(right)
    if len(choices) < len(names):
        raise GrammarError(
            f"{where}: {len(names)} names need different words, but the list has {len(choices)}; add words to the list"
        )
    return Plot(plot.name, (*plot.words, (names, choices)), plot.steps)


def _ways(text: str) -> tuple[str, ...]:
    return tuple(way.strip() for way in text.split(" | "))
