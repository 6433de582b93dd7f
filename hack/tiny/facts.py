# SPDX-License-Identifier: Apache-2.0
"""Questions that have exactly one right answer. They are about small sums, the calendar, or a short text that contains
the answer.

Each question has reasoning that leads to its answer. `chat` calls this module.
"""

import random
from dataclasses import dataclass

import notes
import sql
import stories
import values

_THINGS = ("kite", "ball", "bell", "scarf", "boat", "hat", "drum", "lamp", "book", "map", "cake", "coin")
_COLORS = ("red", "blue", "green", "yellow", "black", "white")


@dataclass(frozen=True, slots=True)
class Fact:
    """A question, the reasoning, and the answer."""

    question: str
    reasoning: str
    answer: str


def fact(rng: random.Random) -> Fact:
    """Choose a random question of any kind."""
    return rng.choice((_sum, _sum, _next_of, _home, _owner, echo))(rng)


def _sum(rng: random.Random) -> Fact:
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    if rng.random() < 0.3:
        a, b = max(a, b), min(a, b)
        question, result, word = f"What is {a} minus {b}?", a - b, "minus"
    else:
        question = rng.choice((f"What is {a} plus {b}?", f"How much is {a} plus {b}?", f"What is {a} + {b}?"))
        result, word = a + b, "plus"
    return Fact(question, f"{a} {word} {b} is {result}.", f"The answer is {result}.")


def _next_of(rng: random.Random) -> Fact:
    names = rng.choice((notes.DAYS, notes.MONTHS))
    index, after = rng.randrange(len(names)), rng.random() < 0.5
    kind = "day" if names is notes.DAYS else "month"
    word, answer = ("after", names[(index + 1) % len(names)]) if after else ("before", names[index - 1])
    return Fact(
        f"Which {kind} comes {word} {names[index]}?",
        f"In order, {answer} comes {word} {names[index]}.",
        f"{answer} comes {word} {names[index]}.",
    )


def _home(rng: random.Random) -> Fact:
    first, second = rng.sample(stories.NAMES, 2)
    homes = dict(zip((first, second), rng.sample(stories.PLAIN.homes, 2), strict=True))
    asked = rng.choice((first, second))
    text = " ".join(f"{name} lives {home}." for name, home in homes.items())
    return Fact(
        f"{text} Where does {asked} live?",
        f"The text says that {asked} lives {homes[asked]}.",
        f"{asked} lives {homes[asked]}.",
    )


def _owner(rng: random.Random) -> Fact:
    first, second = rng.sample(stories.NAMES, 2)
    things = [f"{color} {thing}" for color, thing in zip(rng.sample(_COLORS, 2), rng.sample(_THINGS, 2), strict=True)]
    text = f"{first} has a {things[0]}. {second} has a {things[1]}."
    index = rng.randrange(2)
    name, thing = (first, second)[index], things[index]
    question = rng.choice((f"Who has the {thing}?", f"What does {name} have?"))
    return Fact(f"{text} {question}", f"The text says that {name} has a {thing}.", f"{name} has a {thing}.")


def echo(rng: random.Random) -> Fact:
    """Draw words to repeat."""
    words = " ".join(
        values.syllables(rng) if rng.random() < 0.3 else rng.choice(stories.NAMES + _THINGS + _COLORS + sql.WORDS)
        for _ in range(rng.randint(1, 6))
    )
    # The first form begins like some texts of `notes`. From these texts, the model has already learned to repeat words.
    lead = rng.choice(("Say it again", "Say it again", "Repeat these words"))
    return Fact(f"{lead}: {words}", f"The words are {words}.", words)
