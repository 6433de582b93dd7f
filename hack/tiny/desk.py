# SPDX-License-Identifier: Apache-2.0
"""Support-desk questions with their answers, from `desk.txt`: the base model's plain prose besides stories."""

import random

import grammar

_TOPICS = grammar.load("desk.txt")


def exchange(rng: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    question, *answer = rng.choice(_TOPICS).tell(rng, {})
    return question, " ".join(answer)


def written(question: str, answer: str) -> str:
    """The form in which a model reads and continues an exchange."""
    return f"Question: {question}\nAnswer: {answer}"


def document(rng: random.Random) -> str:
    """One exchange in written form."""
    return written(*exchange(rng))
