# SPDX-License-Identifier: Apache-2.0
"""Functions, requests that need one of them, the calls, and answers from what a function returned.

Owns the kinds of functions. `corpus` draws conversations from here; `values` brings the words.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import values
from turns import Chat, Message, said, system_turn, written_call

_OPENINGS = ("", "", "", "Please ", "Can you ", "I want to ")
_PAIRS = ("numbers", "values", "amounts")
_UNITS = ("days", "hours", "weeks", "years")


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the assistant may call."""

    name: str
    description: str
    parameters: Mapping[str, str]
    """JSON type of each parameter, in the order of a call."""

    def definition(self) -> Message:
        """Return the function as clients of the OpenAI API define it."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Task:
    """A request and the call or calls that it needs."""

    function: Function
    request: str
    calls: Sequence[Mapping[str, object]]
    """Arguments of each call."""
    result: Mapping[str, object]
    """What the function returns for the first call."""
    answer: str
    """What to say then."""


def task(rng: random.Random, words: values.Words) -> Task:
    """Draw a function of any kind with a request."""
    kinds = (_look_up, _look_up, _look_up, _compute, _compute, _send, _set, _book, _show)
    return rng.choice(kinds)(rng, words)


def chat(rng: random.Random, words: values.Words, responded: float = 0.3, most: int = 3) -> Chat:
    """Up to `most` functions and a request for each; some calls go on to the answer from their results."""
    tasks: dict[str, Task] = {}
    for _ in range(rng.randint(1, most)):
        other = task(rng, words)
        # Two functions with one noun would leave open which one is asked for.
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
    """What a request names: the noun, or for two numbers the verb."""
    return function.name.split("_")[0] if "two" in function.description.split() else function.name.split("_")[-1]


def _ask(rng: random.Random, sentence: str) -> str:
    asked = rng.choice(_OPENINGS) + sentence
    return asked[0].upper() + asked[1:] + ("?" if asked.startswith("Can") else rng.choice(("", ".")))


def _look_up(rng: random.Random, words: values.Words) -> Task:
    verb, noun = rng.choice(words.verbs), values.noun(rng, words)
    if rng.random() < 0.5:
        link, parameter, draw = "in", rng.choice(("city", "place", "town", "location")), values.place
    else:
        link, parameter = rng.choice(("of", "for")), rng.choice(("person", "user", "customer", "name", "guest"))
        draw = values.person
    value = draw(rng, words)
    said_verb = verb.replace("_", " ")
    what = f"the {noun} {link}"
    way = rng.randrange(4)
    parameters, arguments, tail, about = {parameter: "string"}, {parameter: value}, "", ""
    if rng.random() < 0.2:
        unit, count = rng.choice(_UNITS), rng.randint(2, 30)
        parameters[unit], arguments[unit] = "integer", count
        tail, about = f" for {count} {unit}", f" for some {unit}"
    calls = [arguments]
    if not tail and rng.random() < 0.1 and (second := draw(rng, words)) != value:
        calls.append({parameter: second})
        tail = f" and {link} {second}"
    asked = (
        _ask(rng, f"{said_verb} {what} {value}{tail}"),
        f"What is {what} {value}{tail}?",
        f"Tell me {what} {value}{tail}.",
        f"{noun} {link} {value}{tail}",
    )[way]
    function = Function(f"{verb}_{noun}", f"{said_verb.capitalize()} {what} a {parameter}{about}", parameters)
    found = values.number(rng) if rng.random() < 0.6 else values.place(rng, words)
    return Task(function, asked, calls, {noun: found}, f"The {noun} {link} {value} is {found}.")


def _compute(rng: random.Random, words: values.Words) -> Task:
    verb = values.syllables(rng) if rng.random() < words.invented else rng.choice(words.sums)
    things = rng.choice(_PAIRS)
    first, second = rng.choice((("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")))
    arguments = {first: values.number(rng), second: values.number(rng)}
    pair = f"{arguments[first]} and {arguments[second]}"
    asked = (
        f"What do you get when you {verb} {pair}?"
        if rng.random() < 0.15
        else _ask(rng, f"{verb} {rng.choice(('', '', 'the ' + things + ' '))}{pair}")
    )
    result = values.number(rng)
    kind = rng.choice(("integer", "number"))
    name = rng.choice((verb, f"{verb}_{things}"))
    function = Function(name, f"{verb.capitalize()} two {things}", dict.fromkeys(arguments, kind))
    return Task(function, asked, [arguments], {"result": result}, f"The result is {result}.")


def _send(rng: random.Random, words: values.Words) -> Task:
    verb, letter = rng.choice(("send", "write", "post", "mail")), rng.choice(words.letters)
    to, body = rng.choice(("to", "recipient", "person")), rng.choice(("text", "content", "body"))
    name, text = values.person(rng, words), values.text(rng)
    function = Function(
        f"{verb}_{letter}", f"{verb.capitalize()} a {letter} to a person", {to: "string", body: "string"}
    )
    asked = _ask(rng, f"{verb} a {letter} to {name}").rstrip(".?") + f": {text}"
    return Task(function, asked, [{to: name, body: text}], {"status": "sent"}, f"The {letter} to {name} is sent.")


def _set(rng: random.Random, words: values.Words) -> Task:
    verb, noun = rng.choice(("set", "change")), values.noun(rng, words)
    parameter, level = rng.choice(("level", "value", "target")), values.number(rng)
    function = Function(f"{verb}_{noun}", f"{verb.capitalize()} the {noun} to a {parameter}", {parameter: "integer"})
    asked = _ask(rng, f"{verb} the {noun} to {level}")
    return Task(function, asked, [{parameter: level}], {parameter: level}, f"The {noun} is now {level}.")


def _book(rng: random.Random, words: values.Words) -> Task:
    verb, things, count = rng.choice(("book", "buy", "order")), rng.choice(words.orders), rng.randint(1, 40)
    name = values.person(rng, words)
    who = rng.choice(("person", "guest", "customer"))
    function = Function(
        f"{verb}_{things}", f"{verb.capitalize()} some {things} for a {who}", {"count": "integer", who: "string"}
    )
    asked = _ask(rng, f"{verb} {count} {things} for {name}")
    number = values.number(rng)
    return Task(
        function, asked, [{"count": count, who: name}], {"number": number}, f"Done. The number for {name} is {number}."
    )


def _show(rng: random.Random, words: values.Words) -> Task:
    verb, noun = rng.choice(words.verbs), values.noun(rng, words)
    said_verb = verb.replace("_", " ")
    function = Function(f"{verb}_{noun}", f"{said_verb.capitalize()} the {noun}", {})
    asked = rng.choice((_ask(rng, f"{said_verb} the {noun}"), f"What is the {noun}?"))
    found = values.number(rng)
    return Task(function, asked, [{}], {noun: found}, f"The {noun} is {found}.")
