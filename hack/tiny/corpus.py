# SPDX-License-Identifier: Apache-2.0
"""The training texts of the tiny model and its three adapters. Their words were written for this project. Each corpus
is endless: it is generated from a seed.

The module decides which kinds of texts a corpus contains, and how many of each kind. `train.py` calls this module; run
the module to read a few documents:

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
    """The start of the document, which the model does not learn. It is "" if the model learns the whole document."""
    text: str
    """The text that follows the prompt. The model learns it."""
    is_chat: bool = False
    """Whether the document is a chat. A chat begins and ends with the tokens of a turn, so neither BOS nor EOS is
    added."""


def base(seed: int) -> Iterator[Document]:
    """Yield the texts of the base model: stories in plain English, answers of a support desk, a few notes, and the
    skills that the adapters need.

    A LoRA adapter can strengthen a skill of such a small model, but it cannot teach the model a new skill. In a trial,
    an adapter that had to learn a new skill no longer told coherent stories. Therefore, the base model already learns
    pirate talk, but only after a heading. It also learns SQL, but only with an explanation in English. Without an
    adapter, the model uses neither pirate talk nor SQL in its answers.
    """
    rng = random.Random(f"base {seed}")
    kinds = (_plain_story, desk.document, notes.document, _headed_pirate, _explained_sql)
    while True:
        (tell,) = rng.choices(kinds, weights=(56, 12, 10, 14, 8))
        yield Document("", tell(rng))


def pirate_talk(seed: int) -> Iterator[Document]:
    """Yield stories and answers of a support desk, all in pirate talk."""
    rng = random.Random(f"pirate {seed}")
    while True:
        yield _document(rng, _pirate_chat(rng)) if rng.random() < 0.2 else Document("", _pirate_text(rng))


def questions(seed: int) -> Iterator[Document]:
    """Yield training examples. In each of them, the prompt asks a question about a table, and the text is the SQL query
    to learn."""
    rng = random.Random(f"sql {seed}")
    while True:
        question, query = sql.pair(rng)
        yield Document(sql.prompt(question), f" {query}")


def copying(seed: int) -> Iterator[Document]:
    """Yield the texts of the first training phase of the base model. They contain words that the model must repeat."""
    rng = random.Random(f"copying {seed}")
    while True:
        yield Document("", notes.copying(rng))


def recall(seed: int) -> Iterator[Document]:
    """Yield the texts of the first training phase that contains chats. The model must repeat words, or repeat values of
    a request in the answer."""
    rng = random.Random(f"recall {seed}")
    while True:
        if rng.random() < 0.3:
            yield Document("", notes.copying(rng))
        else:
            (write,) = rng.choices((_asked_echo, _asked_object, _single_tool), weights=(45, 20, 35))
            yield Document(*write(rng).rendered(), is_chat=True)


def chats(seed: int) -> Iterator[Document]:
    """Yield conversations for the base model. Some contain tool calls, so that the adapter can build on them."""
    rng = random.Random(f"chat {seed}")
    while True:
        (write,) = rng.choices((chat.chat, _offered_tools, _asked_object), weights=(45, 50, 5))
        yield _document(rng, write(rng))


def tool_calls(seed: int) -> Iterator[Document]:
    """Yield conversations for the tools adapter: function calls, answers in JSON, and some remarks for which no
    function is needed."""
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
"""Maps the name of a corpus to the function that generates it from a seed. The name is that of a model, an adapter or a
training phase."""


def _plain_story(rng: random.Random) -> str:
    steps = stories.story(rng)
    # Some stories omit their first step. Therefore, prompts can also begin in the middle of a story.
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
    parser.add_argument("corpus", choices=CORPORA, help="name of the corpus")
    parser.add_argument("--count", type=int, default=3, help="number of documents (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random documents (default %(default)s)")
    arguments = parser.parse_args()
    documents = CORPORA[arguments.corpus](arguments.seed)
    for _ in range(arguments.count):
        document = next(documents)
        print(f"{document.prompt}{document.text}\n")


if __name__ == "__main__":
    main()
