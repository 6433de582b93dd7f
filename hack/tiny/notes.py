# SPDX-License-Identifier: Apache-2.0
"""Texts without a plot: lists, counting, and texts that repeat their words."""

import random

import grammar
import sql
import stories
import values

_NUMBERS = grammar.words("one two three four five six seven eight nine ten eleven twelve")
DAYS = grammar.words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = grammar.words("January February March April May June July August September October November December")
_GOODS = grammar.words("apples bread milk eggs cheese honey tea pears butter rice soap paper candles nuts plums salt")


def document(rng: random.Random) -> str:
    """Return one text: a list, numbers in order, or a row of words."""
    kinds = (_shopping, _count, _calendar, _words_of_sql, copying, copying)
    return rng.choice(kinds)(rng)


def copying(rng: random.Random) -> str:
    """Return a text in which words are repeated. A model must learn to repeat words before it can distinguish the
    people in a story."""
    return rng.choice((_roll_call, _roll_call, _echo))(rng)


def _roll_call(rng: random.Random) -> str:
    present = rng.sample(stories.NAMES, rng.choice((1, 2, 2, 3)))
    return "Roll call: " + " ".join(rng.choices(present, k=rng.randint(8, 20))) + "."


def _echo(rng: random.Random) -> str:
    words = (
        values.syllables(rng) if rng.random() < 0.3 else rng.choice(stories.NAMES + sql.WORDS)
        for _ in range(rng.randint(2, 8))
    )
    line = " ".join([*words, str(rng.randint(1, 9999))])
    return "Say it again: " + "\n".join([line] * rng.choice((2, 3)))


def _shopping(rng: random.Random) -> str:
    goods = rng.sample(_GOODS, rng.randint(3, 7))
    return "Shopping list:\n" + "\n".join(f"{number}. {good}" for number, good in enumerate(goods, start=1))


def _count(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return "Counting in words: " + ", ".join(_NUMBERS[: rng.randint(4, 12)]) + "."
    first, stride = rng.randint(0, 2500), rng.choice((1, 1, 2, 5, 10, 100))
    return "Counting: " + ", ".join(str(first + stride * step) for step in range(rng.randint(5, 12))) + "."


def _calendar(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return "The days of the week: " + ", ".join(DAYS) + "."
    return "The months of the year: " + ", ".join(MONTHS) + "."


def _words_of_sql(rng: random.Random) -> str:
    return "Words of databases: " + " ".join(rng.choices(sql.WORDS, k=rng.randint(15, 40)))
