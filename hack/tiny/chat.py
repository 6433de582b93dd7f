# SPDX-License-Identifier: Apache-2.0
"""Simple conversations: greetings, support questions, requests for a story, and questions that need some thought.

The base model learns these conversations. `corpus` calls this module.
"""

import random

import desk
import facts
import stories
from turns import Chat, Message, said, system_turn

_TALK = (
    (("Hello!", "Hi!", "Hello", "Good morning!", "Hi there"), ("Hello! How can I help you?", "Hi! How can I help?")),
    (
        ("Who are you?", "What are you?", "What is your name?"),
        ("I am tiny, a small model that tells stories and answers questions.",),
    ),
    (
        ("What can you do?", "How can you help me?"),
        ("I can tell you a short story, answer a question, or add two small numbers.",),
    ),
    (("Thank you!", "Thanks", "Thank you very much."), ("You are welcome!", "You are welcome. Have a nice day!")),
    (("Goodbye!", "Bye", "See you later."), ("Goodbye! Have a nice day!",)),
)


STORY_REQUESTS = ("Tell me a story.", "Please tell me a short story.", "Write a story.")
Exchange = tuple[str, str, str]
"""A question, its answer, and the reasoning that comes before the answer ("" if there is none)."""


def talk(rng: random.Random) -> Exchange:
    """Return a short remark, such as a greeting, and the reply to it."""
    remarks, replies = rng.choice(_TALK)
    return rng.choice(remarks), rng.choice(replies), ""


def chat(rng: random.Random) -> Chat:
    """Return a conversation of one or two exchanges."""
    messages: list[Message] = system_turn(rng)
    if rng.random() < 0.25:
        question, answer, _ = rng.choice((talk, _support, _fact))(rng)
        messages += [said("user", question), said("assistant", answer)]
    question, answer, reasoning = rng.choice((talk, _support, _support, _story, _fact, _fact, _fact))(rng)
    return Chat([*messages, said("user", question)], answer, reasoning)


def _fact(rng: random.Random) -> Exchange:
    asked = facts.fact(rng)
    return asked.question, asked.answer, asked.reasoning


def _support(rng: random.Random) -> Exchange:
    return (*desk.exchange(rng), "")


def _story(rng: random.Random) -> Exchange:
    return rng.choice(STORY_REQUESTS), " ".join(stories.story(rng)), ""
