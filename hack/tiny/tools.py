# SPDX-License-Identifier: Apache-2.0
"""Conversations about functions. They contain a request that needs a function, the calls of the function, and an answer
that uses the result.

The module defines the kinds of functions. `corpus` calls this module to generate conversations, and `values` provides
the words.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import values
from turns import Chat, Message, said, system_turn, written_call

_OPENINGS = ("", "", "", "Please ", "Can you ", "I want to ")


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the assistant may call."""

    name: str
    description: str
    parameters: Mapping[str, str]
    """Maps each parameter to its JSON type. The parameters have the same order as in a call."""

    def definition(self) -> Message:
        """Return the definition of the function, in the form of the OpenAI API."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Task:
    """A request, and the calls of a function that are needed to answer it."""

    function: Function
    request: str
    calls: Sequence[Mapping[str, object]]
    """The arguments of each call."""
    result: Mapping[str, object]
    """What the function returns for the first call."""
    answer: str
    """The answer that the assistant gives after it has received the result."""


def task(rng: random.Random) -> Task:
    """Choose a random function of any kind, and return it with a request that needs it."""
    kinds = (_look_up, _look_up, _look_up, _compute, _send, _set, _book)
    return rng.choice(kinds)(rng)


def chat(rng: random.Random, responded: float = 0.3, most: int = 3) -> Chat:
    """Return a conversation that contains one request for each of its functions. It has at most `most` functions. After
    some of the calls, the conversation contains a result and an answer."""
    tasks: dict[str, Task] = {}
    for _ in range(rng.randint(1, most)):
        other = task(rng)
        # If two functions had the same noun, a question would not show which of them it needs.
        tasks.setdefault(_subject(other.function), other)
    definitions = [wanted.function.definition() for wanted in tasks.values()]
    order = list(tasks.values())
    rng.shuffle(order)
    turns = system_turn(rng)
    for wanted in order:
        turns += [said("user", wanted.request), _calling(wanted)]
        if len(wanted.calls) == 1 and rng.random() < responded:
            result = json.dumps(wanted.result, ensure_ascii=False)
            turns += [said("tool", result), said("assistant", wanted.answer)]
    last = turns.pop()
    calls = last.get("tool_calls", ())
    reply = "\n".join(written_call(**call["function"]) for call in calls) or last["content"]
    return Chat(turns, reply, tools=definitions)


def _calling(wanted: Task) -> Message:
    name = wanted.function.name
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}} for arguments in wanted.calls]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _subject(function: Function) -> str:
    """Return the last word of the function's name. It is a noun, and the request contains the same noun."""
    return function.name.split("_")[-1]


def _ask(rng: random.Random, sentence: str) -> str:
    asked = rng.choice(_OPENINGS) + sentence
    return asked[0].upper() + asked[1:] + ("?" if asked.startswith("Can") else rng.choice(("", ".")))


def _look_up(rng: random.Random) -> Task:
    if rng.random() < 0.5:
        noun, link, parameter, draw = rng.choice(values.PLACE_NOUNS), "in", "city", values.place
    else:
        noun, link, parameter, draw = rng.choice(values.PERSON_NOUNS), "of", "name", values.person
    verb, value = rng.choice(values.VERBS), draw(rng)
    what = f"the {noun} {link}"
    calls, tail = [{parameter: value}], ""
    if rng.random() < 0.1 and (second := draw(rng)) != value:
        calls.append({parameter: second})
        tail = f" and {link} {second}"
    asked = rng.choice(
        (
            _ask(rng, f"{verb} {what} {value}{tail}"),
            f"What is {what} {value}{tail}?",
            f"Tell me {what} {value}{tail}.",
        )
    )
    function = Function(f"{verb}_{noun}", f"{verb.capitalize()} {what} a {parameter}", {parameter: "string"})
    found = values.number(rng)
    return Task(function, asked, calls, {noun: found}, f"The {noun} {link} {value} is {found}.")


def _compute(rng: random.Random) -> Task:
    verb = rng.choice(("add", "multiply"))
    arguments = {"a": values.number(rng), "b": values.number(rng)}
    result = values.number(rng)
    function = Function(f"{verb}_numbers", f"{verb.capitalize()} two numbers", dict.fromkeys(arguments, "integer"))
    asked = _ask(rng, f"{verb} {arguments['a']} and {arguments['b']}")
    return Task(function, asked, [arguments], {"result": result}, f"The result is {result}.")


def _send(rng: random.Random) -> Task:
    letter, name, text = rng.choice(values.LETTERS), values.person(rng), rng.choice(values.TEXTS)
    function = Function(f"send_{letter}", f"Send a {letter} to a person", {"to": "string", "text": "string"})
    asked = _ask(rng, f"send a {letter} to {name}").rstrip(".?") + f": {text}"
    return Task(function, asked, [{"to": name, "text": text}], {"status": "sent"}, f"The {letter} to {name} is sent.")


def _set(rng: random.Random) -> Task:
    noun, level = rng.choice(values.SETTINGS), values.number(rng)
    function = Function(f"set_{noun}", f"Set the {noun} to a level", {"level": "integer"})
    asked = _ask(rng, f"set the {noun} to {level}")
    return Task(function, asked, [{"level": level}], {"level": level}, f"The {noun} is now {level}.")


def _book(rng: random.Random) -> Task:
    things, count, name = rng.choice(values.ORDERS), rng.randint(2, 20), values.person(rng)
    function = Function(f"book_{things}", f"Book some {things} for a person", {"count": "integer", "name": "string"})
    asked = _ask(rng, f"book {count} {things} for {name}")
    number = values.number(rng)
    answer = f"Done. The number for {name} is {number}."
    return Task(function, asked, [{"count": count, "name": name}], {"number": number}, answer)
