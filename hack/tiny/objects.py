# SPDX-License-Identifier: Apache-2.0
"""Requests for an answer in JSON, and the object that answers each request.

The module contains the sentences that state the values. `corpus` calls it.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass

import values
from turns import Chat, said, system_turn


@dataclass(frozen=True, slots=True)
class ObjectRequest:
    """A request and the object that answers it. The request is a text that states values and asks for some of their
    keys."""

    question: str
    answer: Mapping[str, object]


def request(rng: random.Random) -> ObjectRequest:
    """Choose some keys at random, state a value for each, and request all or some of these keys."""
    keys = rng.sample(values.KEYS, rng.randint(1, 3))
    stated = {key: _value(rng, key) for key in keys}
    text = " ".join(_sentence(rng, key, value) for key, value in stated.items())
    asked = keys if rng.random() < 0.7 else [key for key in keys if rng.random() < 0.6] or keys[:1]
    named = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])} and {asked[-1]}"
    lead = f"{rng.choice(('Answer in JSON', 'Return JSON', 'Give me JSON', 'Use JSON'))} with {named}"
    question = f"{lead}: {text}" if rng.random() < 0.6 else f"{text} {lead}."
    return ObjectRequest(question, {key: stated[key] for key in asked})


def _value(rng: random.Random, key: str) -> object:
    if key in values.NUMBER_KEYS:
        return values.number(rng)
    if key in values.FLAG_KEYS:
        return rng.random() < 0.5
    return values.place(rng) if key == "city" else values.person(rng)


def _sentence(rng: random.Random, key: str, value: object) -> str:
    if isinstance(value, bool):
        return f"It is {'' if value else 'not '}{key}."
    return rng.choice((f"The {key} is {value}.", f"{key.capitalize()}: {value}."))


def chat(rng: random.Random) -> Chat:
    """Return a conversation with one request and its answer."""
    asked = request(rng)
    reply = json.dumps(asked.answer, ensure_ascii=False)
    return Chat([*system_turn(rng), said("user", asked.question)], reply)
