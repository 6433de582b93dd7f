# SPDX-License-Identifier: Apache-2.0
"""Questions to a support desk, and their answers. The base model learns plain prose from them and from the stories.

`desk.txt` contains the questions and the answers.
"""

import random

import grammar

_TOPICS = grammar.load("desk.txt")


def exchange(rng: random.Random) -> tuple[str, str]:
    """Return a question and its answer."""
    question, *answer = rng.choice(_TOPICS).tell(rng, {})
    return question, " ".join(answer)


def written(question: str, answer: str) -> str:
    """Return an exchange as text. A model reads such a text and continues it."""
    return f"Question: {question}\nAnswer: {answer}"


def document(rng: random.Random) -> str:
    """Return one text that contains a question and its answer."""
    return written(*exchange(rng))
