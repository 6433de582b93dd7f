# SPDX-License-Identifier: Apache-2.0
"""Grammars of chat outputs accept what the format's parser reads as calls that match the schemas, and nothing else."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.parser_vectors import TOOL_CALL_FORMATS as TOOL_CALL_PARSERS
from support.parser_vectors import hermes, make_tokenizers
from support.written_calls import Calls, written_calls

from quire_engine.parsers.output_grammar import compose_grammar
from quire_engine.parsers.output_parser import create_parser
from quire_engine.parsers.parser_names import ParserNames
from quire_engine.structured_outputs.compiler import GrammarCompiler
from quire_engine.structured_outputs.grammar_text import compose_grammar_text
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_server.openai.tools import normalize_tools
from quire_spec.errors import InvalidArgument
from quire_spec.model.capabilities import REASONING_PARSERS
from quire_spec.protocol.parsed_output import OutputParsing, merge_events

EOS = 1
PROPERTIES = {
    "n": {"type": "integer"},
    "s": {"type": "string"},
    "e": {"enum": ["x", "y z"]},
    "b": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/none"}]},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {"none": {"type": "null"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "g.h", "parameters": {"type": "object"}}},
]
REQUIRED, AUTO, NAMED = OutputParsing("required"), OutputParsing("auto"), OutputParsing("function", "f")
SINGLE = OutputParsing("required", parallel_tool_calls=False)
ONE = ("f", {"n": 1, "s": "}] </x>", "e": "y z", "b": True})
TWO = [("f", {"n": 1}), ("g.h", {})]
WITHOUT_QUOTES = ("qwen3_coder", "qwen3_xml", "seed_oss", "minimax_m2", "glm45", "glm47")
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def written(parser: str, calls: Calls, has_tokens: bool) -> str:
    """Return an output with calls."""
    return (ANALYSIS if parser == "openai" else "") + written_calls(parser, calls, has_tokens)


class Checker:
    """Checks outputs against the grammars of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [EOS])

    def accepts(
        self,
        names: ParserNames,
        parsing: OutputParsing,
        text: str,
        reasoning: str = "possible",
        answer: Any = None,
        tools: Any = TOOLS,
    ) -> bool:
        """Return whether an output can be this text."""
        constraint = compose_grammar(names, self.tokenizer, parsing, tools, reasoning, answer)
        assert constraint is not None
        grammar = self._compiler.create(compose_grammar_text(constraint))
        token_ids = [*self.tokenizer.encode(text, add_special_tokens=False), EOS]
        return all(map(grammar.accept_token, token_ids))

    def calls(self, names: ParserNames, text: str) -> list[tuple[str, Any]]:
        """Return what the parser finds."""
        parser = create_parser(names, self.tokenizer, tools=TOOLS)
        output = merge_events(parser.feed(self.tokenizer.encode(text, add_special_tokens=False), text, True))
        assert not output.content
        return [(call.name, json.loads(call.arguments)) for call in output.tool_calls]


@pytest.fixture(scope="module")
def checkers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checker]:
    tokenizers = make_tokenizers(tmp_path_factory.mktemp("tokenizer"))
    return {kind: Checker(tokenizer) for kind, tokenizer in tokenizers.items()}


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_grammar_and_parser_agree(checkers: dict[str, Checker], parser: str) -> None:
    names = ParserNames(parser, "openai_gptoss" if parser == "openai" else None)
    kinds = ["marked"] if parser == "openai" else ["marked", "plain"]
    for kind in kinds:
        checker, is_marked = checkers[kind], kind == "marked"
        one = written(parser, [ONE], is_marked)
        assert checker.calls(names, one) == [ONE]
        assert all(checker.accepts(names, parsing, one) for parsing in (REQUIRED, AUTO, NAMED, SINGLE))
        if parser != "openai":
            two = written(parser, TWO, is_marked)
            assert checker.calls(names, two) == TWO
            accepted = [checker.accepts(names, parsing, two) for parsing in (REQUIRED, AUTO, NAMED, SINGLE)]
            assert accepted == [True, True, False, False]
        for wrong in ({"n": "1"}, {"s": "a"}, {"n": 1, "e": "z"}, {"n": 1, "other": 2}):
            text = written(parser, [("f", wrong)], is_marked)
            # In the formats without quotes a text looks like a number.
            if parser not in WITHOUT_QUOTES or wrong != {"n": "1"}:
                assert not checker.accepts(names, REQUIRED, text) and not checker.accepts(names, AUTO, text), text
        assert not checker.accepts(names, REQUIRED, written(parser, [("other", {})], is_marked))
        text = "<|channel|>final<|message|>Hello" if parser == "openai" else "Hello"
        assert checker.accepts(names, AUTO, text) and not checker.accepts(names, REQUIRED, text)
        assert not checker.accepts(names, REQUIRED, "")


def test_the_number_of_a_call_is_short(checkers: dict[str, Checker]) -> None:
    """A model that repeats a digit would not get any further."""
    names, text = ParserNames("kimi_k2"), written("kimi_k2", [("f", {"n": 1})], True)
    for checker in checkers.values():
        assert checker.accepts(names, REQUIRED, text.replace("f:0", "f:12"))
        assert not checker.accepts(names, REQUIRED, text.replace("f:0", "f:1234"))


@pytest.mark.parametrize("parameters", [{}, {"parameters": {"type": "object", "properties": {}}}], ids=str)
def test_a_tool_without_parameters_gets_no_arguments(checkers: dict[str, Checker], parameters: dict[str, Any]) -> None:
    names, tools = ParserNames("hermes"), normalize_tools([{"function": {"name": "f", **parameters}}])
    for checker in checkers.values():
        assert checker.accepts(names, REQUIRED, hermes("f", "{}"), tools=tools)
        assert not checker.accepts(names, REQUIRED, hermes("f", '{"a": 1}'), tools=tools)
        strict = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        assert checker.accepts(names, REQUIRED, hermes("f", '{"a": 1}'), tools=strict)


def test_reasoning_comes_before_calls_and_answers(checkers: dict[str, Checker]) -> None:
    names, call, thoughts = ParserNames("hermes", "qwen3"), hermes("f", '{"n": 1}'), "a <b> b\n</think>\n\n"
    answer = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    for checker in checkers.values():
        for text, state in ((call, "possible"), (f"<think>\n{thoughts}{call}", "possible"), (thoughts + call, "open")):
            assert checker.accepts(names, REQUIRED, text, state), text
        assert not checker.accepts(names, REQUIRED, call, "open")
        # The parser ends the reasoning at the mark of a call.
        assert not checker.accepts(names, REQUIRED, "a <tool_call> " + thoughts + call, "open")
        assert not checker.accepts(names, REQUIRED, f"<think>\n{thoughts}{call}", "done")
        assert not checker.accepts(names, REQUIRED, "<think>\n" + thoughts)
        for text in ('{"a":1}', "<think>\n" + thoughts + '{"a":1}', call):
            assert checker.accepts(names, AUTO, text, answer=answer), text
        assert not checker.accepts(names, AUTO, "Hello", answer=answer)
        assert not checker.accepts(names, OutputParsing(), call, answer=answer)
        assert checker.accepts(names, OutputParsing(), "<think>x</think>" + '{"a":1}', answer=answer)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"choice": ["red", "green"]}, "green"),
        ({"regex": "[0-9]{3}"}, "123"),
        ({"grammar": 'start: "x" ("y" | "z")'}, "xz"),
        ({"grammar": 'root ::= "ab" | "cd" root'}, "cdab"),
        ({"json_object": True}, '{"a":1}'),
        (
            {"structural_tag": {"structures": [{"begin": "<a>", "schema": {"const": 7}}], "triggers": ["<a"]}},
            "ok <a>7.",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_answer_of_any_kind_can_follow_reasoning(checkers: dict[str, Checker], answer: Any, text: str) -> None:
    names = ParserNames("hermes", "qwen3")
    for checker in checkers.values():
        for parsing in (OutputParsing("none"), AUTO):
            assert checker.accepts(names, parsing, f"<think>\nHm.</think>\n\n{text}", answer=answer)
            assert checker.accepts(names, parsing, text, answer=answer)
        wrong = "<a>8" if "structural_tag" in answer else "blue"
        assert not checker.accepts(names, OutputParsing("none"), f"<think>Hm.</think>{wrong}", answer=answer)


def test_outputs_without_constraint_have_no_grammar(checkers: dict[str, Checker]) -> None:
    tokenizer, plain_tools = checkers["marked"].tokenizer, TOOLS[1:]
    for parsing, tools, names, answer in (
        (OutputParsing("auto"), plain_tools, ParserNames("hermes", "qwen3"), None),
        (OutputParsing("none"), TOOLS, ParserNames("hermes", "qwen3"), None),
        (OutputParsing("none"), [], ParserNames(None, None), {"choice": ["a"]}),
    ):
        assert compose_grammar(names, tokenizer, parsing, tools, "possible", answer) is None


KEYS = st.sampled_from(["type", "properties", "required", "anyOf", "enum", "$ref", "$defs", "items", 'a\n"\x00'])
SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["object", "string", "#/$defs/a", "é"])
VALUES = st.recursive(
    SCALARS, lambda values: st.lists(values, max_size=3) | st.dictionaries(KEYS, values, max_size=4), max_leaves=12
)


@settings(max_examples=60)
@given(st.dictionaries(KEYS, VALUES, max_size=5), st.sampled_from(TOOL_CALL_PARSERS), st.booleans())
def test_any_schema_gives_a_grammar_or_one_error(
    checkers: dict[str, Checker], schema: dict[str, Any], parser: str, is_strict: bool
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": is_strict}}]
    tokenizer = checkers["marked"].tokenizer
    for reasoning_parser in (None, REASONING_PARSERS[0]):
        names = ParserNames(parser, reasoning_parser)
        create_parser(names, tokenizer, tools=tools).feed([], "<tool_call><function=f><parameter=a>1</parameter>", True)
        try:
            constraint = compose_grammar(names, tokenizer, OutputParsing("required"), tools, "possible", None)
            assert constraint is not None
            checkers["marked"]._compiler.check(compose_grammar_text(constraint))
        except InvalidArgument as error:
            assert str(error).startswith(("tools: ", "structured_outputs: ")), error
