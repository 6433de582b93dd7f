# SPDX-License-Identifier: Apache-2.0
"""Words and values that requests contain.

The module owns the word lists. The lists are short, because a model of this size can hardly repeat words that it has
not learned. `tools` and `objects` use the lists.
"""

import random

import grammar
import sql
import stories

NUMBER_KEYS = frozenset(grammar.words("age price year size count weight"))
"""Keys whose value in a JSON answer is a number."""
FLAG_KEYS = frozenset(grammar.words("open new paid ready"))
"""Keys whose value in a JSON answer is true or false."""
KEYS = grammar.words("name city age price year size count open owner team weight new paid ready")
"""Keys of JSON answers."""
VERBS = grammar.words("get find show check")
"""A function that looks up a value has one of these verbs in its name."""
PLACE_NOUNS = grammar.words("weather time temperature population news")
"""Nouns. A function can look up one of them for a place."""
PERSON_NOUNS = grammar.words("address phone balance age score status")
"""Nouns. A function can look up one of them for a person."""
SETTINGS = grammar.words("lamp volume brightness heating speed")
"""Nouns. A function can set one of them to a number."""
LETTERS = grammar.words("message note letter reminder")
"""Nouns. A function can send one of them to a person."""
ORDERS = grammar.words("tickets seats rooms tables")
"""Nouns. A function can book some of them for a person."""
TEXTS = (
    "see you on Monday", "the kite is ready", "dinner is late", "we meet at noon",
    "call me back", "please bring the book", "thank you", "happy birthday",
)  # fmt: skip
"""Texts that functions send."""

_STARTS = grammar.words("b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kr pl sh st th tr")
_MIDDLES = grammar.words("a e i o u ai ea oo ou")
_ENDS = ("", "", "n", "r", "l", "s", "t", "m", "x", "nd", "ck")


def syllables(rng: random.Random) -> str:
    """Return an invented word in lower case."""
    parts = (
        rng.choice(_STARTS) + rng.choice(_MIDDLES) + (rng.choice(_ENDS) if rng.random() < 0.6 else "")
        for _ in range(rng.choice((1, 2, 2, 3)))
    )
    return "".join(parts)


def person(rng: random.Random) -> str:
    """Return a name of a person."""
    return rng.choice(stories.NAMES)


def place(rng: random.Random) -> str:
    """Return a name of a place."""
    return rng.choice(sql.CITIES)


def number(rng: random.Random) -> int:
    """Return a whole number of at most two digits."""
    return rng.randint(0, rng.choice((9, 20, 99)))
