# SPDX-License-Identifier: Apache-2.0
"""Constraints through the `openai` client and a real front, text and core process: all forms, hostile ones, deaths."""

import json
import re
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

import openai
import pytest
from support.openai_front import TINY
from tokenizers import Tokenizer

pytestmark = pytest.mark.timeout(120)

STORY = "Once upon a time"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def complete(client, constraint=None, **fields):
    """Return the text of a request whose output ends by itself."""
    extra = {} if constraint is None else {"structured_outputs": constraint}
    fields = {"model": "base", "prompt": STORY, "max_tokens": 60, "temperature": 1, "seed": 3} | fields
    completion = client.completions.create(extra_body=extra | fields.pop("extra_body", {}), **fields)
    assert completion.choices[0].finish_reason == "stop"
    return completion.choices[0].text


def check_person(text):
    person = json.loads(text)
    assert list(person) == ["name", "age"] and isinstance(person["age"], int)
    assert not re.search(r"[{:,]\s", text.replace(json.dumps(person["name"], ensure_ascii=False), ""))


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": PERSON}},
        {"structured_outputs": {"json": json.dumps(PERSON)}},
        {"guided_json": PERSON},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}},
        {"response_format": {"type": "json_object", "schema": PERSON}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_all_names_of_a_schema_give_the_same_output(client, fields):
    text = complete(client, extra_body=fields)
    check_person(text)
    assert text == complete(client, {"json": PERSON})


def test_other_constraints(client):
    assert complete(client, {"choice": ["red", "green"]}) in ("red", "green")
    assert complete(client, extra_body={"guided_choice": ["red"]}) == "red"
    assert re.fullmatch(r"\d{3}-[ab]+", complete(client, {"regex": r"\d{3}-[ab]{1,3}"}))
    assert set(complete(client, {"grammar": 'root ::= "ab" | "cd" root'})) <= set("abcd")
    assert set(complete(client, {"grammar": 'start: "x" ("y" | "z")'})) < set("xyz")


def test_structural_tag(client):
    """The story begins with a comma, which begins the structure."""
    tag = {"structures": [{"begin": ",<", "schema": {"const": 7}, "end": ">"}], "triggers": [","]}
    completion = client.completions.create(
        model="base", prompt=STORY, temperature=0, extra_body={"response_format": {"type": "structural_tag", **tag}}
    )
    assert completion.choices[0].text.startswith(",<7>")


def test_whitespace_only_on_request(client):
    space = str(Tokenizer.from_file(str(TINY / "tokenizer.json")).token_to_id("\u0120"))
    spaced = complete(client, {"json": PERSON, "whitespace_pattern": " "}, logit_bias={space: 100})
    assert re.fullmatch(r'\{ "name" : " *" , "age" : \d+ \}', spaced)
    check_person(complete(client, {"json": PERSON}, logit_bias={space: 100}))


def test_outputs_of_one_request_each_match(client):
    choices = client.completions.create(
        model="base", prompt=STORY, max_tokens=60, n=4, extra_body={"structured_outputs": {"json": PERSON}}
    ).choices
    assert len({choice.text for choice in choices}) > 1
    for choice in choices:
        check_person(choice.text)


def test_a_streamed_output_is_equal(client):
    fields = {"model": "base", "prompt": STORY, "max_tokens": 60, "temperature": 0}
    constraint = {"structured_outputs": {"json": PERSON}}
    chunks = list(client.completions.create(stream=True, extra_body=constraint, **fields))
    assert "".join(chunk.choices[0].text for chunk in chunks) == complete(client, temperature=0, extra_body=constraint)


def test_tokens_that_precede_the_constraint(client):
    """The constraint begins after a full stop, before which the output cannot end."""
    text = complete(client, {"choice": ["END"], "begin_after_token_ids": [15]}, temperature=0)
    assert text.endswith(".END") and len(text) > 10


def test_the_end_of_a_constraint_wins_over_min_tokens_and_ignore_eos(client):
    assert complete(client, {"choice": ["red"]}, extra_body={"min_tokens": 30, "ignore_eos": True}) == "red"


def test_max_tokens_cuts_json(client):
    choice = client.completions.create(
        model="base", prompt=STORY, max_tokens=3, extra_body={"structured_outputs": {"json": PERSON}}
    ).choices[0]
    assert choice.finish_reason == "length" and choice.text.startswith('{"n')


def test_no_token_is_left(client):
    """The constraint allows no token that another parameter allows: an error, not a loop."""
    with pytest.raises(openai.BadRequestError, match="exclude all tokens that the constraint allows here"):
        complete(client, {"choice": ["red"]}, extra_body={"allowed_token_ids": [5, 6]})
    assert complete(client, {"choice": [""]}) == ""


def deep(levels, leaf):
    schema = leaf
    for _ in range(levels):
        schema = {"oneOf": [schema, {"type": "object", "properties": {"a": schema}}]}
    return schema


def product(num_choices, num_alternatives):
    choices = [
        [
            {"properties": {f"k{i}{j}": {"type": "string", "pattern": f"a{{{j}}}b{{{i}}}"}}}
            for j in range(num_alternatives)
        ]
        for i in range(num_choices)
    ]
    return {"allOf": [{"anyOf": choice} for choice in choices]}


HOSTILE = {
    "nested oneOf": {"json": deep(8, {"type": "string"})},
    "product of choices": {"json": product(6, 4)},
    "ambiguous regex": {"regex": "(a|a)*b"},
    "nested repetition": {"regex": "(x{1,1000}){1,1000}"},
    "lookahead": {"regex": "(?=a)b"},
    "NUL": {"regex": "\0"},
    "unclosed": {"regex": "(a"},
    "pattern": {"json": {"type": "string", "pattern": "(x{1,1000}){1,1000}"}},
    "long string": {"json": {"type": "string", "minLength": 10**9, "maxLength": 10**9}},
    "long list": {"json": {"type": "array", "minItems": 10**9}},
    "large enum": {"json": {"enum": [f"value{i}" for i in range(100_000)]}},
    "large schema": {"json": {"description": "x" * 5_000_000}},
    "deep schema": {"json": json.loads('{"items":' * 200 + "{}" + "}" * 200)},
    "reference to itself": {"json": {"$ref": "#"}},
    "references in a circle": {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "remote reference": {"json": {"$ref": "http://127.0.0.1:9/schema.json"}},
    "other draft": {"json": {"$schema": "http://json-schema.org/draft-03/schema#", "$ref": "http://json-schema.org/x"}},
    "left recursion": {"grammar": "start: start start | start start start | \"a\" | \"\""},
    "not a grammar": {"grammar": "start: ((("},
    "missing rule": {"grammar": "start: nothing"},
    "nothing": {"json": False},
    "byte outside UTF-8": {"regex": r"(?-u:\xff)"},
    "two constraints": {"regex": "a", "choice": ["b"]},
    "no constraint": {},
    "wrong type": {"regex": 7},
    "unknown": {"jsn": {}},
}  # fmt: skip


def test_hostile_constraints_end_and_hurt_nobody(client, front):
    """Each ends with an error or a bounded output, while the tokens of another stream keep their pace."""
    times, done = [], threading.Event()

    def stream():
        while not done.is_set():
            for _ in client.completions.create(model="base", prompt=STORY, max_tokens=200, stream=True,
                                               extra_body={"ignore_eos": True}):  # fmt: skip
                times.append(time.monotonic())

    thread = threading.Thread(target=stream)
    thread.start()
    served = []
    try:
        for name, constraint in HOSTILE.items():
            try:
                client.with_options(max_retries=0).completions.create(
                    model="base", prompt="A", max_tokens=8, extra_body={"structured_outputs": constraint}
                )
                served.append(name)
            except openai.BadRequestError as error:
                assert len(str(error)) < 1200, name
    finally:
        done.set()
        thread.join()
    bounded = {"ambiguous regex", "nested repetition", "pattern", "NUL", "long list", "left recursion", "long string"}
    assert set(served) <= bounded | {"nested oneOf"}
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert max(gaps) < 1.5, sorted(gaps)[-5:]


def check_workers(front):
    """Return the processes that check constraints."""
    return front.text_workers("quire_engine.structured_outputs.check_worker")


def test_a_killed_worker_is_replaced(client, front):
    complete(client, {"choice": ["one"]})
    workers = check_workers(front)
    assert len(workers) == 2
    for worker in workers:
        assert Path(f"/proc/{worker.pid}/oom_score_adj").read_text() == "1000\n"
        worker.send_signal(signal.SIGKILL)
    # The first request may meet a dead worker; that one is an error, and the next ones are served.
    texts = []
    while len(texts) < 2:
        try:
            texts.append(complete(client, {"choice": [f"text{len(texts)}"]}))
        except openai.BadRequestError as error:
            assert "memory" in str(error)
    assert texts == ["text0", "text1"]
    assert not {worker.pid for worker in workers} & {worker.pid for worker in check_workers(front)}
