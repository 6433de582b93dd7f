# SPDX-License-Identifier: Apache-2.0
"""Support-desk questions with their answers, from `desk.txt`: the base model's plain prose besides stories."""

import random

import grammar

_TOPICS = grammar.load("desk.txt")


def exchange(rng: random.Random) -> tuple[str, str]:
    """Return a question and its answer."""
    question, *answer = rng.choice(_TOPICS).tell(rng, {})
    return question, " ".join(answer)


def written(question: str, answer: str) -> str:
    """Return the text form of an exchange, which a model reads and continues."""
    return f"Question: {question}\nAnswer: {answer}"


def document(rng: random.Random) -> str:
    """Return a question and its answer in their text form."""
    return written(*exchange(rng))
