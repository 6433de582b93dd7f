# SPDX-License-Identifier: Apache-2.0
"""The parser of a checkpoint's response template gives what transformers' parse_response gives, at any chunking.

The templates are those of the documentation of transformers 5 (chat_response_parsing.md), and others with each content
type and each kind of mark.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.parser_vectors import TOOLS
from support.tokenizer import byte_level, save_tokenizer
from transformers.utils.chat_parsing import parse_response

from quire_engine import SamplingParams
from quire_engine.parsers.lexer import Lexeme
from quire_engine.parsers.output_grammar import compose_grammar
from quire_engine.parsers.output_parser import create_parser
from quire_engine.parsers.parser_names import RESPONSE_TEMPLATE, ParserNames
from quire_engine.parsers.response_template.response_format import ResponseTemplateFormat
from quire_engine.parsers.response_template.template import load_response_template
from quire_engine.tokenization.detokenizer import IncrementalDetokenizer
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import ConfigError, InvalidArgument
from quire_spec.protocol.parsed_output import OutputParsing, ParsedOutput, merge_events

THINK = {"open": "<think>", "close": "</think>"}
CALL = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
END = {"close": "<|im_end|>"}


def template(calls: dict[str, Any], content: dict[str, Any] = END, thinking: dict[str, Any] = THINK) -> dict[str, Any]:
    fields = {"thinking": thinking, "tool_calls": calls, "content": content}
    return {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": fields}


TAGS = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True}
SMOLLM = template({**TAGS, "content": "json", "transform": CALL})
QWEN = template(
    {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
        "close": "</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
            "value_parser": {"name": "json", "args": {"allow_non_json": True}},
        },
        "transform": NAMED,
    }
)
HARMONY = template(
    {
        "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
        "close": "<|call|>",
        "repeats": True,
        "content": "json",
        "transform": NAMED,
    },
    {"open": "<|channel|>final<|message|>", "close": ["<|end|>", "<|return|>"]},
    {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
)
COHERE = template(
    {
        "open": "<|START_ACTION|>",
        "close": "<|END_ACTION|>",
        "content": "json",
        "transform_each": True,
        "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
    },
    {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
    {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
)
GEMMA = template(
    {
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
        "close": "<tool_call|>",
        "repeats": True,
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": NAMED,
    },
    {"close": "<turn|>"},
    {"open": "<|channel>thought\n", "close": "<channel|>"},
)
LFM = template(
    {
        "open": "<|tool_call_start|>",
        "close": "<|tool_call_end|>",
        "content": "python-call-list",
        "transform_each": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
    }
)
LINES = template(
    {
        "open": ["<a>", "<a>>"],
        "close_pattern": r"</a(?P<name>\w*)>",
        "repeats": True,
        "content": "kv-lines",
        "content_args": {"kv_sep": "=", "value_parser": {"name": "json", "args": {"allow_non_json": True}}},
        "transform": NAMED,
    }
)
OUTPUTS: list[tuple[dict[str, Any], str, str]] = [
    (SMOLLM, "", '<think>\nI greet.\n</think>\n\n<tool_call>{"name": "f", "arguments": {"a": "Hi"}}</tool_call>'),
    (SMOLLM, "<|im_start|>assistant\n<think>\n", 'Hm.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"n": "7"}}'
     '\n</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'),
    (SMOLLM, "<think>x<|im_start|>assistant\n", " Hello <b> 日本 🙂 <|im_end|>"),
    (SMOLLM, "", "Hello <think"),
    (QWEN, "", "<think>Hm <tool</think><tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n<parameter=s>\n[x\n"
     "</parameter>\n</function>\n</tool_call>\n<tool_call><function=g></function></tool_call>"),
    (QWEN, "", "Hello <tool_call> <function and more"),
    (HARMONY, "", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
     '<|constrain|>json<|message|>{"n": 1}<|call|>'),
    (HARMONY, "", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>"),
    (COHERE, "", '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[{"tool_name": "f", "parameters": {"n": 1}}, '
     '{"tool_name": "g", "parameters": {}}]<|END_ACTION|>'),
    (COHERE, "", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hi.<|END_RESPONSE|>"),
    (GEMMA, "", '<|channel>thought\nHm.<channel|><|tool_call>call:f{s:<|"|>a, {b: 1}<|"|>,n:5,o:{k:[true]}}'
     "<tool_call|>"),
    (GEMMA, "", "Hi.<turn|>"),
    (LFM, "", "<|tool_call_start|>[f(n=5, s='x, ]', o={'k': [True, None]}), g()]<|tool_call_end|>"),
    (LINES, "", "<a>>n = 5\ns = x = y\n\nno</af><a>o = {\"k\": 1}</ag>"),
]  # fmt: skip


def parser(spec: dict[str, Any], prompt: str = "", **options: bool) -> ResponseTemplateFormat:
    return ResponseTemplateFormat(load_response_template(json.dumps(spec)), TOOLS, prompt, **options)


def parse(output_format: ResponseTemplateFormat, text: str, size: int) -> ParsedOutput:
    events = [event for i in range(0, len(text), size) for event in output_format.feed(Lexeme(text[i : i + size]))]
    return merge_events([*events, *output_format.finish()])


def reference(spec: dict[str, Any], prompt: str, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    message = parse_response(text, spec, prefix=prompt, tools=list(TOOLS))
    functions = [call["function"] for call in message.get("tool_calls", [])]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return message.get("content", ""), message.get("thinking", ""), calls


@pytest.mark.parametrize(("spec", "prompt", "text"), OUTPUTS, ids=lambda value: str(value)[:30])
def test_outputs_equal_those_of_transformers(spec: dict[str, Any], prompt: str, text: str) -> None:
    for size in (1, 2, 3, 7, len(text)):
        output = parse(parser(spec, prompt), text, size)
        calls = [(call.name, json.loads(call.arguments)) for call in output.tool_calls]
        assert (output.content, output.reasoning, calls) == reference(spec, prompt, text), size


PIECES = sorted({piece for _, _, text in OUTPUTS for piece in text.replace(">", ">\n").replace("<", "\n<").split("\n")})


@settings(max_examples=200)
@given(
    st.sampled_from([SMOLLM, QWEN, HARMONY, COHERE, GEMMA, LFM, LINES]),
    st.lists(st.sampled_from(PIECES) | st.sampled_from("\n {}[]\"'a<"), max_size=20).map("".join),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
)
def test_any_text_gives_the_same_output_at_any_chunking(
    spec: dict[str, Any], text: str, size: int, has_calls: bool, has_reasoning: bool
) -> None:
    options = {"has_calls": has_calls, "has_reasoning": has_reasoning}
    whole = parse(parser(spec, **options), text, len(text) + 1)
    assert parse(parser(spec, **options), text, size) == whole
    assert has_reasoning or not whole.reasoning
    assert has_calls or not whole.tool_calls


@settings(max_examples=200)
@given(
    st.sampled_from([SMOLLM, COHERE, GEMMA, LFM]),
    st.lists(st.sampled_from([text for _, _, text in OUTPUTS]), max_size=1).map("".join),
    st.text("ab <>|{}\n", max_size=20),
)
def test_text_before_an_output_equals_transformers(spec: dict[str, Any], output: str, text: str) -> None:
    try:
        content, thinking, calls = reference(spec, "", text + output)
    except (ValueError, KeyError):
        return
    found = parse(parser(spec), text + output, 3)
    assert found.reasoning == thinking and [call.name for call in found.tool_calls] == [name for name, _ in calls]
    # transformers keeps only the last of several texts between other fields.
    assert found.content.endswith(content)


def test_what_is_no_call_is_content() -> None:
    for text in ("<tool_call>{broken</tool_call>", '<tool_call>{"a": 1}</tool_call>', "<tool_call>[1]", "<tool_call>"):
        assert parse(parser(SMOLLM), f"Hi {text}", 2) == ParsedOutput(f"Hi{text}", "", ())
    text = f"<tool_call>{' ' * 70_000}</tool_call>"
    assert parse(parser(SMOLLM), text, 4000).content == text
    assert parse(parser(SMOLLM, has_calls=False), '<tool_call>{"name": "f"}</tool_call>', 3).content.startswith("<tool")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    marked = byte_level()
    marked.add_special_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>"])
    folder = tmp_path_factory.mktemp("template")
    return Tokenizer(save_tokenizer(marked, folder, response_template=SMOLLM))


def test_special_tokens_are_read(tokenizer: Tokenizer) -> None:
    names = ParserNames(RESPONSE_TEMPLATE, RESPONSE_TEMPLATE)
    names.check_template(tokenizer.response_template)
    prompt = tokenizer.encode(
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<think>\n", add_special_tokens=False
    )
    text = 'Hm.\n</think>\n\n<tool_call>{"name": "f", "arguments": {"n": "5"}}</tool_call>'
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for size in (1, 4, len(token_ids)):
        output_parser, events = create_parser(names, tokenizer, prompt, TOOLS), []
        detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(skip_special_tokens=False))
        for start in range(0, len(token_ids), size):
            group, finished = token_ids[start : start + size], start + size >= len(token_ids)
            events += output_parser.feed(group, detokenizer.update(group, finished).text, finished)
        output = merge_events(events)
        assert output.reasoning == "Hm." and not output.content
        assert [(call.name, call.arguments) for call in output.tool_calls] == [("f", '{"n": 5}')]


def test_names_are_found_and_checked(tmp_path: Path) -> None:
    text = json.dumps(SMOLLM)
    assert ParserNames.detect("{{ messages }}", (), text) == ParserNames(RESPONSE_TEMPLATE, RESPONSE_TEMPLATE)
    assert ParserNames.detect("<tool_call></think>", (), text) == ParserNames("hermes", "qwen3")
    plain = json.dumps({"start_anchor": "a", "fields": {"content": {}}})
    assert ParserNames.detect("{{ messages }}", (), plain) == ParserNames()
    with pytest.raises(ConfigError, match=r"response_template cannot be combined with hermes"):
        ParserNames("hermes", RESPONSE_TEMPLATE).check_template(text)
    with pytest.raises(ConfigError, match=r"needs response_template in tokenizer_config\.json"):
        ParserNames(RESPONSE_TEMPLATE).check_template("")
    ParserNames("hermes", "qwen3").check_template("")


def test_what_needs_a_grammar_is_refused(tokenizer: Tokenizer) -> None:
    names = ParserNames(RESPONSE_TEMPLATE, RESPONSE_TEMPLATE)
    tools: list[dict[str, Any]] = [dict(tool) for tool in TOOLS]
    strict = [{"type": "function", "function": {**tools[0]["function"], "strict": True}}]
    for parsing, offered, answer, field in (
        (OutputParsing("required"), tools, None, "tool_choice: required"),
        (OutputParsing("function", "f"), tools, None, "tool_choice: function"),
        (OutputParsing("auto"), strict, None, "tools: strict"),
        (OutputParsing("none"), [], {"json": {}}, "response_format"),
    ):
        with pytest.raises(InvalidArgument, match=f"{field}.* no grammar"):
            compose_grammar(names, tokenizer, parsing, offered, "possible", answer)
    assert compose_grammar(names, tokenizer, OutputParsing("auto"), tools, "possible", None) is None
    assert (
        compose_grammar(ParserNames(RESPONSE_TEMPLATE), tokenizer, OutputParsing("none"), [], "done", {"json": {}})
        is None
    )


FIELDS = {"content": {}}


@pytest.mark.parametrize(
    "spec",
    [
        [],
        {},
        {"fields": FIELDS},
        {"start_anchor": "a", "fields": {}},
        {"start_anchor": "", "fields": FIELDS},
        {"start_anchor": "a", "start_anchor_pattern": "a", "fields": FIELDS},
        {"start_anchor_pattern": "(", "fields": FIELDS},
        {"start_anchor": "a", "fields": FIELDS, "version": 2},
        {"start_anchor": "a", "fields": {"content": {"unknown": 1}}},
        {"start_anchor": "a", "fields": {"content": {}, "thinking": {}}},
        {"start_anchor": "a", "fields": {"citations": {"open": "a"}}},
        {"start_anchor": "a", "fields": {"content": {"content": "json"}}},
        {"start_anchor": "a", "fields": {"tool_calls": {"open": [1], "content": "json"}}},
        {"start_anchor": "a", "fields": {"tool_calls": {"open": "a", "content": "yaml"}}},
        {"start_anchor": "a", "fields": {"tool_calls": {"open": "a", "content": "xml-inline"}}},
        {"start_anchor": "a", "fields": {"tool_calls": {"open": "a", "content": "json", "content_args": [1]}}},
    ],
    ids=str,
)
def test_a_wrong_template_is_named(spec: Any) -> None:
    with pytest.raises(ConfigError, match="response_template"):
        load_response_template(json.dumps(spec))


def seconds(spec: dict[str, Any], text: str) -> float:
    start = time.process_time()
    parse(parser(spec), text, 50)
    return time.process_time() - start


@pytest.mark.parametrize(
    "piece", ["<think>", "<|channel|>commentary to=functions.f", "<tool_call>", "<|tool_call>call:f"]
)
@pytest.mark.parametrize("spec", [SMOLLM, HARMONY, GEMMA], ids=["smollm", "harmony", "gemma"])
def test_time_is_linear_in_the_length_of_marks_without_an_end(spec: dict[str, Any], piece: str) -> None:
    num = 50_000 // len(piece)
    short, long = (min(seconds(spec, piece * times) for _ in range(2)) for times in (num, 4 * num))
    assert long < 10 * short + 0.1


def test_text_that_is_too_long_for_a_pattern_is_content() -> None:
    text = f"<|channel|>commentary to=functions.f {'x' * 70_000}<|message|>{{}}<|call|>"
    outputs = [parse(parser(HARMONY), f"<|channel|>analysis<|message|>a<|end|>{text}", size) for size in (7, 10**6)]
    assert outputs == [ParsedOutput(text, "a", ())] * 2
