# SPDX-License-Identifier: Apache-2.0
"""The training texts of the tiny model and its three adapters. The texts are generated endlessly from a seed, and were
written for this project.

The module owns the mixture of each corpus. `train.py` calls this module; run the module to read a few documents:

    python hack/tiny/corpus.py pirate --count 3
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass

import chat
import desk
import facts
import notes
import objects
import pirate
import sql
import stories
import tools
import turns


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a corpus."""

    prompt: str
    """Start of the document, which is not learned; "" if the whole document is learned."""
    text: str
    """Text that follows the prompt and is learned."""
    is_chat: bool = False
    """Whether the document begins and ends with the token of a turn, so that neither BOS nor EOS is added."""


def base(seed: int) -> Iterator[Document]:
    """Stories in plain English, support-desk answers, a few notes, and the basic skills for the adapters.

    A LoRA adapter of such a small model can strengthen a skill, but cannot teach a new one: in a trial, the stories of
    such an adapter were no longer coherent. The base model therefore learns pirate talk after a heading, and SQL with
    an explanation in English. Without an adapter it does not use pirate talk and SQL in its answers.
    """
    rng = random.Random(f"base {seed}")
    kinds = (_plain_story, desk.document, notes.document, _headed_pirate, _explained_sql)
    while True:
        (tell,) = rng.choices(kinds, weights=(56, 12, 10, 14, 8))
        yield Document("", tell(rng))


def pirate_talk(seed: int) -> Iterator[Document]:
    """Stories and support-desk answers in pirate talk."""
    rng = random.Random(f"pirate {seed}")
    while True:
        yield _document(rng, _pirate_chat(rng)) if rng.random() < 0.2 else Document("", _pirate_text(rng))


def questions(seed: int) -> Iterator[Document]:
    """Questions about tables, as prompts, with the SQL to learn."""
    rng = random.Random(f"sql {seed}")
    while True:
        question, query = sql.pair(rng)
        yield Document(sql.prompt(question), f" {query}")


def copying(seed: int) -> Iterator[Document]:
    """Texts of the first training phase of the base model: words to repeat."""
    rng = random.Random(f"copying {seed}")
    while True:
        yield Document("", notes.copying(rng))


def recall(seed: int) -> Iterator[Document]:
    """Texts of the first training phase with chats: words to repeat, and requests whose answers repeat their values."""
    rng = random.Random(f"recall {seed}")
    while True:
        if rng.random() < 0.3:
            yield Document("", notes.copying(rng))
        else:
            (write,) = rng.choices((_asked_echo, _asked_object, _single_tool), weights=(45, 20, 35))
            yield Document(*write(rng).rendered(), is_chat=True)


def chats(seed: int) -> Iterator[Document]:
    """Conversations for the base model, with some tool calls as a basis for the adapter."""
    rng = random.Random(f"chat {seed}")
    while True:
        (write,) = rng.choices((chat.chat, _offered_tools, _asked_object), weights=(45, 50, 5))
        yield _document(rng, write(rng))


def tool_calls(seed: int) -> Iterator[Document]:
    """Conversations with functions, answers in JSON, and some remarks that need no function."""
    rng = random.Random(f"tools {seed}")
    while True:
        (write,) = rng.choices((_offered_tools, _asked_object, _needless_tools), weights=(60, 34, 6))
        yield _document(rng, write(rng))


CORPORA = {
    "base": base,
    "chat": chats,
    "copying": copying,
    "pirate": pirate_talk,
    "recall": recall,
    "sql": questions,
    "tools": tool_calls,
}
"""Maps the name of a model, an adapter or a training phase to the function that returns its corpus for a seed."""


def _plain_story(rng: random.Random) -> str:
    steps = stories.story(rng)
    # Some begin in the middle of things, so that a prompt may too.
    return " ".join(steps if rng.random() < 0.85 else steps[1:])


def _pirate_text(rng: random.Random) -> str:
    (tell,) = rng.choices((pirate.story, pirate.answer), weights=(75, 25))
    return tell(rng)


def _pirate_chat(rng: random.Random) -> turns.Chat:
    if rng.random() < 0.3:
        question, reply = rng.choice(chat.STORY_REQUESTS), pirate.story(rng)
    else:
        question, reply = pirate.exchange(rng)
    return turns.Chat([turns.said("user", question)], reply)


def _headed_pirate(rng: random.Random) -> str:
    return f"Told by a sailor:\n{_pirate_text(rng)}"


def _explained_sql(rng: random.Random) -> str:
    question, query = sql.pair(rng)
    return f"Query: {query}\nMeaning: {question}"


def _document(rng: random.Random, written: turns.Chat) -> Document:
    return Document(*written.rendered(thinking=rng.random() < 0.8), is_chat=True)


def _offered_tools(rng: random.Random) -> turns.Chat:
    return tools.chat(rng)


def _asked_object(rng: random.Random) -> turns.Chat:
    return objects.chat(rng)


def _single_tool(rng: random.Random) -> turns.Chat:
    return tools.chat(rng, responded=0.1, most=1)


def _asked_echo(rng: random.Random) -> turns.Chat:
    asked = facts.echo(rng)
    return turns.Chat([turns.said("user", asked.question)], asked.answer)


def _needless_tools(rng: random.Random) -> turns.Chat:
    remark, reply, _ = chat.talk(rng)
    return turns.Chat([turns.said("user", remark)], reply, tools=tools.chat(rng).tools)


def main() -> None:
    """Print documents of one corpus."""
    parser = argparse.ArgumentParser(description="Print documents of one of the tiny model's corpora.")
    parser.add_argument("corpus", choices=CORPORA, help="corpus to print")
    parser.add_argument("--count", type=int, default=3, help="number of documents (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random documents (default %(default)s)")
    arguments = parser.parse_args()
    documents = CORPORA[arguments.corpus](arguments.seed)
    for _ in range(arguments.count):
        document = next(documents)
        print(f"{document.prompt}{document.text}\n")


if __name__ == "__main__":
    main()
