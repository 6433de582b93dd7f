# SPDX-License-Identifier: Apache-2.0
"""Words and values that requests are made of: those that training draws, and those that it never sees.

Owns both word lists, so that a test can prove that they share nothing. `tools` and `objects` draw from here.
"""

import random
from dataclasses import dataclass

import grammar
import sql
import stories

NUMBER_KEYS = frozenset(grammar.words("age price year size count weight height score"))
"""Keys of JSON answers whose values are numbers."""
FLAG_KEYS = frozenset(grammar.words("open new paid ready"))
"""Keys of JSON answers whose values are true or false."""


@dataclass(frozen=True, slots=True)
class Words:
    """Nouns, verbs and values of requests."""

    verbs: tuple[str, ...]
    """For looking something up."""
    nouns: tuple[str, ...]
    """What is looked up or set."""
    people: tuple[str, ...]
    places: tuple[str, ...]
    sums: tuple[str, ...]
    """What can be done with two numbers."""
    letters: tuple[str, ...]
    """What can be sent to a person."""
    orders: tuple[str, ...]
    """What can be booked, in the plural."""
    keys: tuple[str, ...]
    """Of JSON answers."""
    invented: float
    """Share of nouns and of values that are random syllables."""


TRAINED = Words(
    verbs=grammar.words("get find show read check look_up list load search"),
    nouns=grammar.words(
        "weather time price address phone balance status temperature distance population age score rating stock order"
        " invoice ticket account salary birthday owner color size weight speed height route news menu calendar profile"
        " schedule budget report history forecast capital river bridge garden music lamp door engine volume brightness"
        " language currency language title author length level rank team contract delivery package room key"
    ),
    people=stories.NAMES + grammar.words("Karl Greta Ivan Maria David Julia Robert Helen Frank Susan Omar Layla Yuki"),
    places=sql.CITIES + grammar.words("Madison Geneva Cairo Sydney Toronto Munich Seoul Dakar Havana Porto Delhi"),
    sums=grammar.words("add multiply subtract divide compare sum mix connect join"),
    letters=grammar.words("message letter note email card reminder"),
    orders=grammar.words("tickets seats rooms tables flights books chairs lessons bikes boxes"),
    keys=grammar.words(
        "name city age price year color size open title owner team count weight new paid status country"
    ),
    invented=0.3,
)
"""What training draws."""

UNSEEN = Words(
    verbs=grammar.words("fetch query retrieve view"),
    nouns=grammar.words("humidity pollution traffic altitude deadline subscription warranty mileage elevation voltage"),
    people=grammar.words("Priya Kwame Bjorn Chiara Dmitri Esther Gustav Xavier Ingrid Mateo"),
    places=grammar.words("Kyoto Nairobi Bogota Reykjavik Zagreb Lagos Hanoi Tunis Quito Perth"),
    sums=grammar.words("combine blend merge match"),
    letters=grammar.words("telegram memo postcard fax"),
    orders=grammar.words("cabins tents tours massages"),
    keys=grammar.words("brand score height ready job street planet hobby"),
    invented=0.0,
)
"""What only tests draw."""

_STARTS = grammar.words("b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kr pl sh st th tr")
_MIDDLES = grammar.words("a e i o u ai ea oo ou")
_ENDS = ("", "", "n", "r", "l", "s", "t", "m", "x", "nd", "ck")
_TEXTS = grammar.words(
    "the kite is ready see you on Monday we meet at noon please bring the book dinner is late call me back thank you"
)


def syllables(rng: random.Random) -> str:
    """Return an invented word, lower case."""
    parts = (
        rng.choice(_STARTS) + rng.choice(_MIDDLES) + (rng.choice(_ENDS) if rng.random() < 0.6 else "")
        for _ in range(rng.choice((1, 2, 2, 3)))
    )
    return "".join(parts)


def noun(rng: random.Random, words: Words) -> str:
    """Return a noun."""
    return syllables(rng) if rng.random() < words.invented else rng.choice(words.nouns)


def person(rng: random.Random, words: Words) -> str:
    """Return a name of a person."""
    return syllables(rng).capitalize() if rng.random() < words.invented else rng.choice(words.people)


def place(rng: random.Random, words: Words) -> str:
    """Return a name of a place."""
    return syllables(rng).capitalize() if rng.random() < words.invented else rng.choice(words.places)


def number(rng: random.Random) -> int:
    """Return a whole number, mostly a small one."""
    return rng.randint(0, rng.choice((9, 20, 100, 100, 1000, 9999)))


def text(rng: random.Random) -> str:
    """Return a few words without a quote."""
    return " ".join(rng.choices(_TEXTS, k=rng.randint(2, 6)))
