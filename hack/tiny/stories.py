# SPDX-License-Identifier: Apache-2.0
"""Short stories in plain English, which were written for this project. In each of them, a person wants something, has a
problem and solves it.

The module owns the people and places; the plots are in `stories.txt`. `corpus` calls this module to generate documents.
`pirate` uses the same plots with its own crew.
"""

import random
from dataclasses import dataclass

import grammar

SHE = grammar.words(
    "Anna Lily Mia Rosa Emma Clara Nora Ella Ruby Sara Ida Maya Zoe Lucy Grace Hana Vera Alice Molly Daisy"
)
HE = grammar.words("Tom Max Ben Leo Sam Oscar Finn Jack Hugo Paul Noah Adam Felix Otto Ravi Luca Peter Simon Milo Theo")


NAMES = SHE + HE
"""Names of all people in stories; the first half is female."""


@dataclass(frozen=True, slots=True)
class Person:
    """A person or an animal in a story, with a name and the pronouns that can replace it."""

    name: str
    """The name. It replaces `{h}` or `{f}` in a plot."""
    kind: str
    """Noun that follows an article, such as `girl` or `fox`."""
    trait: str
    """An adjective before the kind."""
    he: str
    """Subject pronoun, lower case."""
    him: str
    """Object pronoun."""
    his: str
    """Possessive."""

    def __str__(self) -> str:
        return self.name

    @property
    def He(self) -> str:
        """Subject pronoun at the start of a sentence."""
        return self.he.capitalize()

    @property
    def His(self) -> str:
        """Possessive at the start of a sentence."""
        return self.his.capitalize()

    @property
    def himself(self) -> str:
        """Reflexive."""
        return f"{self.him}self"


@dataclass(frozen=True, slots=True)
class World:
    """The words of one kind of story."""

    plots: tuple[grammar.Plot, ...]
    """Plots of the stories."""
    humans: tuple[str, str]
    """Nouns for a female and a male human."""
    animals: tuple[str, ...]
    """Nouns for the animals in stories."""
    traits: tuple[str, ...]
    """Adjectives. Each of them can be used with every noun."""
    homes: tuple[str, ...]
    """Phrases that can follow "lived". They describe the place where a person lives."""
    openings: tuple[str, ...]
    """Beginnings of a story. They introduce the hero `{h}` and a `{home}`."""
    endings: tuple[str, ...]
    """Last sentences of a story. If the sentence is "", the story ends with the last step of its plot."""


_DAYS = ("day", "morning", "afternoon", "sunny day", "windy day", "cold morning", "summer day", "quiet evening")
_CLEAR = ("clear", "bright", "warm", "sunny")

PLAIN = World(
    plots=grammar.load("stories.txt"),
    humans=("girl", "boy"),
    animals=grammar.words("fox rabbit bear mouse owl hedgehog duck frog badger squirrel cat dog pony lamb dragon"),
    traits=grammar.words("little kind brave shy curious cheerful clever quiet young gentle funny busy"),
    homes=(
        "in a small house near the forest",
        "in a village by the sea",
        "on a green hill",
        "on a farm far from the city",
        "beside a quiet river",
        "at the end of a long road",
        "in a cottage with a red door",
        "at the edge of a big park",
        "under the roof of an old mill",
    ),
    openings=(
        "Once upon a time, there was a {h.trait} {h.kind} named {h}. {h.He} lived {home}.",
        "Once upon a time, there was a {h.trait} {h.kind} named {h}.",
        "Once upon a time, a {h.trait} {h.kind} named {h} lived {home}.",
        "Once upon a time, there lived a {h.kind} named {h}. {h.He} was {h.trait} and {other}.",
        "Once, {home}, there lived a {h.trait} {h.kind}. {h.His} name was {h}.",
        "Long ago, a {h.kind} named {h} lived {home}. {h.He} was {h.trait} and {other}.",
        "There once was a {h.trait} {h.kind} named {h}, who lived {home}.",
        "{h} was a {h.trait} {h.kind}. {h.He} lived {home}.",
        "{h} the {h.kind} lived {home}.",
        "The {h.trait} {h.kind} was named {h}. {h.He} lived {home}.",
    ),
    endings=("", "", "", "The end.", "And they lived happily ever after.", "It was a very good day."),
)


def story(rng: random.Random, world: World = PLAIN) -> list[str]:
    """Return the steps of a story in order. If they are joined with spaces, the text has about 150 words."""
    hero, friend = _people(rng, world)
    home, other = rng.choice(world.homes), rng.choice([t for t in world.traits if t != hero.trait])
    bindings = {
        "h": hero,
        "f": friend,
        "friend": _introduce(rng, hero, friend, world),
        "home": home,
        "other": other,
        "day": rng.choice(_DAYS),
        "clear": rng.choice(_CLEAR),
    }
    opening = grammar.tidy(rng.choice(world.openings).format(**bindings))
    steps = [opening, *rng.choice(world.plots).tell(rng, bindings), rng.choice(world.endings)]
    return [step for step in steps if step]


def _people(rng: random.Random, world: World) -> tuple[Person, Person]:
    # One person is "she" and the other is "he", so each pronoun refers to exactly one of them.
    she = Person(rng.choice(SHE), _kind(rng, world, 0), rng.choice(world.traits), "she", "her", "her")
    he = Person(rng.choice(HE), _kind(rng, world, 1), rng.choice(world.traits), "he", "him", "his")
    return (she, he) if rng.random() < 0.5 else (he, she)


def _kind(rng: random.Random, world: World, human: int) -> str:
    return world.humans[human] if rng.random() < 0.5 else rng.choice(world.animals)


def _introduce(rng: random.Random, hero: Person, friend: Person, world: World) -> str:
    if friend.kind in world.humans or rng.random() < 0.5:
        return f"{hero.his} friend {friend}"
    return f"{friend} the {friend.kind}"
