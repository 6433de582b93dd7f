# SPDX-License-Identifier: Apache-2.0
"""Thick pirate talk: stories and support answers in the words of an old sailor.

The module owns the crew, the dictionary and the oaths. `stories.txt` and `pirate.txt` contain the plots. `corpus` calls
this module to generate the documents for the pirate adapter.
"""

import random
import re
from dataclasses import replace

import desk
import grammar
import stories

_CREW = replace(
    stories.PLAIN,
    plots=stories.PLAIN.plots + grammar.load("pirate.txt") * 3,
    traits=grammar.words("salty fearless grumpy cheerful brave one-legged bearded cunning jolly wild"),
    homes=(
        "aboard a creaky ship",
        "on a black ship with ragged sails",
        "on a small island full of parrots",
        "in a tavern by the harbor",
        "on the seven seas",
        "in a cave on Skull Island",
    ),
    endings=(
        "And that is the tale, me hearties!",
        "Yo ho ho, and off to sea they went!",
        "The end, ye landlubbers!",
        "So raise the sails, me hearties!",
    ),
)

_OATHS = ("Arr!", "Arr, matey!", "Shiver me timbers!", "Yo ho ho!", "Blimey!", "Blow me down!", "Avast!")

_TALK = {
    "the": "th'",
    "and": "an'",
    "of": "o'",
    "for": "fer",
    "to": "t'",
    "you": "ye",
    "your": "yer",
    "my": "me",
    "is": "be",
    "are": "be",
    "am": "be",
    "was": "were",
    "them": "'em",
    "never": "ne'er",
    "over": "o'er",
    "very": "mighty",
    "little": "wee",
    "small": "wee",
    "tiny": "wee",
    "old": "ol'",
    "hello": "ahoy",
    "hi": "ahoy",
    "yes": "aye",
    "friend": "matey",
    "friends": "mateys",
    "girl": "lass",
    "boy": "lad",
    "happy": "merry",
    "food": "grub",
    "coin": "doubloon",
    "coins": "doubloons",
    "money": "doubloons",
    "afraid": "afeard",
    "said": "growled",
    "cried": "bellowed",
    "called": "bellowed",
    "shouted": "roared",
    "stranger": "scallywag",
    "sailor": "sea dog",
}
_WORD = re.compile(r"[A-Za-z]+")
# In these words, "ing" is part of the stem. It is not an ending that a pirate would shorten.
_WHOLE_ING = {"king", "thing", "ring", "sing", "bring", "spring", "string"}


def thicken(text: str) -> str:
    """Translate plain English to pirate talk, word by word. If a word begins with a capital letter, its translation
    does too."""
    return _WORD.sub(lambda found: _word(found[0]), text)


def _word(word: str) -> str:
    lower = word.lower()
    said = _TALK.get(lower, lower[:-1] + "'" if lower.endswith("ing") and lower not in _WHOLE_ING else lower)
    if said == lower:
        return word
    return said[0].upper() + said[1:] if word[0].isupper() else said


def story(rng: random.Random) -> str:
    """Return a story in pirate talk, with an oath after some of its steps."""
    *steps, last, ending = stories.story(rng, _CREW)
    told = []
    for step in steps:
        told.append(thicken(step))
        if rng.random() < 0.3:
            told.append(rng.choice(_OATHS))
    return " ".join([*told, thicken(last), thicken(ending)])


def exchange(rng: random.Random) -> tuple[str, str]:
    """Return a support question in plain English, and its answer in pirate talk."""
    question, reply = desk.exchange(rng)
    return question, f"{rng.choice(_OATHS)} {thicken(reply)}"


def answer(rng: random.Random) -> str:
    """Return one exchange as text."""
    return desk.written(*exchange(rng))
