# SPDX-License-Identifier: Apache-2.0
"""The texts that the tiny model and its two adapters are trained on: endless, seeded, and ours to ship.

Owns the mixture of each corpus. `train.py` draws from here; run it to read a few documents:

    python hack/tiny/corpus.py pirate --count 3
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass

import desk
import notes
import pirate
import sql
import stories


@dataclass(frozen=True, slots=True)
class Document:
    """One text to learn."""

    prompt: str
    """Given, not learned; "" when the whole text is learned."""
    text: str
    """What follows the prompt."""


def base(seed: int) -> Iterator[Document]:
    """Stories in plain English, support-desk answers, a few notes, and what the adapters build on.

    A low-rank adapter of a model this small can bring out a skill but hardly teach one (tried: its stories fall
    apart). So the base model meets pirate talk, but only behind a heading, and SQL, but only explained in English:
    without an adapter it never uses either.
    """
    rng = random.Random(f"base {seed}")
    kinds = (_plain_story, desk.document, notes.document, _headed_pirate, _explained_sql)
    while True:
        (tell,) = rng.choices(kinds, weights=(56, 12, 10, 14, 8))
        yield Document("", tell(rng))


def pirate_talk(seed: int) -> Iterator[Document]:
    """The same kinds of text as told by a pirate."""
    rng = random.Random(f"pirate {seed}")
    while True:
        yield Document("", _pirate_text(rng))


def questions(seed: int) -> Iterator[Document]:
    """Questions about tables, as prompts, with the SQL to learn."""
    rng = random.Random(f"sql {seed}")
    while True:
        question, query = sql.pair(rng)
        yield Document(sql.prompt(question), f" {query}")


def copying(seed: int) -> Iterator[Document]:
    """What the base model begins with: words to repeat."""
    rng = random.Random(f"copying {seed}")
    while True:
        yield Document("", notes.copying(rng))


CORPORA = {"base": base, "copying": copying, "pirate": pirate_talk, "sql": questions}
"""Each corpus by name (the model's, the adapter's, or that of a phase of training); called with a seed."""


def _plain_story(rng: random.Random) -> str:
    steps = stories.story(rng)
    # Some begin in the middle of things, so that a prompt may too.
    return " ".join(steps if rng.random() < 0.85 else steps[1:])


def _pirate_text(rng: random.Random) -> str:
    (tell,) = rng.choices((pirate.story, pirate.answer), weights=(75, 25))
    return tell(rng)


def _headed_pirate(rng: random.Random) -> str:
    return f"Told by a sailor:\n{_pirate_text(rng)}"


def _explained_sql(rng: random.Random) -> str:
    question, query = sql.pair(rng)
    return f"Query: {query}\nMeaning: {question}"


def main() -> None:
    """Print documents of one corpus."""
    parser = argparse.ArgumentParser(description="Print documents of one of the tiny model's corpora.")
    parser.add_argument("corpus", choices=CORPORA, help="whose documents")
    parser.add_argument("--count", type=int, default=3, help="how many (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same documents (default %(default)s)")
    arguments = parser.parse_args()
    documents = CORPORA[arguments.corpus](arguments.seed)
    for _ in range(arguments.count):
        document = next(documents)
        print(f"{document.prompt}{document.text}\n")


if __name__ == "__main__":
    main()
