# SPDX-License-Identifier: Apache-2.0
"""Parsers of chat outputs: every vector gives the same result however its tokens are grouped."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.parser_vectors import (
    ALL_MARKS,
    TOOLS,
    VECTORS,
    Vector,
    expected,
    groups,
    hermes,
    make_tokenizers,
    normalized,
)
from support.parser_vectors import REASONING_FORMATS as REASONING_PARSERS
from support.parser_vectors import TOOL_CALL_FORMATS as TOOL_CALL_PARSERS

from quire_engine import SamplingParams
from quire_engine.parsers.output_parser import OutputParser, create_parser, reasoning_state
from quire_engine.parsers.parser_names import ParserNames
from quire_engine.tokenization.detokenizer import IncrementalDetokenizer
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.protocol.parsed_output import Event, ParsedOutput, ToolCall, merge_events


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    tokenizers = make_tokenizers(tmp_path_factory.mktemp("tokenizer"))
    # Special tokens that are not marks of the format are left out, so they are not part of these texts.
    return {kind: tokenizers[kind] for kind in ("plain", "marked")}


def parser_of(vector: Vector, tokenizer: Tokenizer | None) -> OutputParser:
    names = ParserNames(vector.tool_call_parser, vector.reasoning_parser)
    return create_parser(names, tokenizer, tools=TOOLS, is_reasoning_open=vector.is_open)


def parse_tokens(vector: Vector, tokenizer: Tokenizer, size: int, stop: list[str]) -> list[Event]:
    """Parse groups of `size` tokens; with a stop string, text lags behind the tokens."""
    token_ids = tokenizer.encode(vector.text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(skip_special_tokens=False, stop=stop))
    parser, events = parser_of(vector, tokenizer), []
    for start in range(0, len(token_ids), size):
        group, finished = token_ids[start : start + size], start + size >= len(token_ids)
        events += parser.feed(group, detokenizer.update(group, finished).text, finished)
    return events


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector.tool_call_parser}-{vector.text[:30]!r}")
def test_every_split_gives_the_same_result(vector: Vector, tokenizers: dict[str, Tokenizer]) -> None:
    for size in groups(len(vector.text)):
        parser, events = parser_of(vector, None), []
        for start in range(0, len(vector.text), size):
            events += parser.feed([], vector.text[start : start + size], start + size >= len(vector.text))
        assert normalized(vector, merge_events(events)) == expected(vector), size
    for name, tokenizer in tokenizers.items():
        for size in groups(len(tokenizer.encode(vector.text, add_special_tokens=False))):
            for stop in ([], ["never in any text"]):
                result = normalized(vector, merge_events(parse_tokens(vector, tokenizer, size, stop)))
                assert result == expected(vector), (name, size, stop)


PIECES = (
    *(
        *ALL_MARKS,
        "<function=f>",
        "<parameter=n>",
        "call:f{n:",
        "f\n",
        '{"name": "f", "arguments": ',
        "f(a=",
        "1",
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ",",
        ":",
        '"',
        "'",
        "\\",
        "true",
        " ",
        "\n",
        "a",
        "日",
        "🙂",
        "; ",
        "<s>",
        "<",
        "=",
        "f",
    ),
    *("commentary", "analysis", " to=functions.f "),
)


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from(PIECES), max_size=25).map("".join),
    st.sampled_from((None, *TOOL_CALL_PARSERS)),
    st.sampled_from((None, *REASONING_PARSERS)),
    st.booleans(),
    st.integers(1, 7),
)
def test_any_text_gives_the_same_events_in_every_split(
    tokenizers: dict[str, Tokenizer],
    text: str,
    tool_call_parser: str | None,
    reasoning_parser: str | None,
    is_open: bool,
    size: int,
) -> None:
    vector = Vector(tool_call_parser, text, reasoning_parser=reasoning_parser, is_open=is_open)
    for tokenizer in tokenizers.values():
        parts, whole = (parse_tokens(vector, tokenizer, n, []) for n in (size, len(text) + 1))
        assert merge_events(parts) == merge_events(whole)


def test_mark_written_as_ordinary_text_is_text(tokenizers: dict[str, Tokenizer]) -> None:
    """With a token of its own, only the token is a mark."""
    text = hermes("f", "{}")
    written = [i for char in text for i in tokenizers["marked"].encode(char, add_special_tokens=False)]
    real = tokenizers["marked"].encode(text, add_special_tokens=False)
    assert len(real) < len(written)
    for size in (1, 7, 10_000):
        vector = Vector("hermes", text)
        detokenizer = IncrementalDetokenizer(tokenizers["marked"], SamplingParams(skip_special_tokens=False))
        parser, events, token_ids = parser_of(vector, tokenizers["marked"]), [], written + real
        for start in range(0, len(token_ids), size):
            group, finished = token_ids[start : start + size], start + size >= len(token_ids)
            events += parser.feed(group, detokenizer.update(group, finished).text, finished)
        assert merge_events(events) == ParsedOutput(text, "", (ToolCall("f", "{}"),)), size


def test_parsers_are_found_from_the_template() -> None:
    for template, names in (
        ("<tool_call>{{ message }}</tool_call> </think>", ("hermes", "qwen3")),
        ("<tool_call><function=f></tool_call></think>", ("qwen3_coder", "qwen3")),
        ("[TOOL_CALLS]", ("mistral", None)),
        ("<|python_start|>", ("llama4_pythonic", None)),
        ("<|start|>assistant<|channel|>final", ("openai", "openai_gptoss")),
        ("'<｜tool▁calls▁begin｜>' + '```json' </think>", ("deepseek_v3", "deepseek_v3")),
        ("'<｜tool▁calls▁begin｜>' </think>", ("deepseek_v31", "deepseek_v3")),
        ("<seed:tool_call>\\n<function= </seed:think>", ("seed_oss", "seed_oss")),
        ("<minimax:tool_call> </think>", ("minimax_m2", "minimax_m2")),
        ("<|tool_call> <|channel>", ("gemma4", "gemma4")),
        ("<start_function_call>", ("functiongemma", None)),
        ("<|tool_calls_section_begin|> </think>", ("kimi_k2", "kimi_k2")),
        ("<|tool_call|> Here is my thought process:", ("granite", "granite")),
        ("<|tool|> <|/tool|>", ("phi4_mini_json", None)),
        ("<|tool_list_start|>", ("lfm2", None)),
        ("<tool_calls> </think> <answer>", ("hunyuan_a13b", "hunyuan_a13b")),
        ("<function_calls> </think>", ("olmo3", "olmo3")),
        ("<tool_call>f<arg_key></arg_key>\\n<arg_value> </think>", ("glm45", "glm45")),
        ("<tool_call>f<arg_key></arg_key><arg_value> </think>", ("glm47", "glm47")),
        ("<tool_call> <response> </think>", ("ernie45", "ernie45")),
        ("{{ messages }}", (None, None)),
    ):
        assert ParserNames.detect(template) == ParserNames(*names)
    assert ParserNames.detect("", ["<|channel|>", "<|constrain|>"]).tool_call_parser == "openai"
    found = ParserNames("hermes", "qwen3")
    assert found.configured("auto", "auto") == found
    assert found.configured("none", "mistral") == ParserNames(None, "mistral")


def test_the_prompt_decides_whether_the_output_begins_with_reasoning() -> None:
    for parser, states in (("qwen3", ("possible", "open", "done")), ("deepseek_r1", ("open", "open", "done"))):
        names = ParserNames(None, parser)
        prompts = ("Hi.<think> a", "Hi.<think>\n", "Hi.<think>\n\n</think>\n\n")
        assert tuple(reasoning_state(names, prompt) for prompt in prompts) == states
    assert reasoning_state(ParserNames(), "<think>") == "possible"


@pytest.mark.parametrize(
    ("prefill", "state"),
    [("<think>\n12 plus 7", "open"), ("<think>a</think>b", "done"), ("b", "possible"), ("a</think>b<think>c", "open")],
)
def test_an_output_can_continue_reasoning(prefill: str, state: str) -> None:
    assert reasoning_state(ParserNames(None, "qwen3"), f"Hi.{prefill}", prefill) == state


def test_each_parser_has_vectors() -> None:
    assert {vector.tool_call_parser for vector in VECTORS if vector.calls} == set(TOOL_CALL_PARSERS)
    assert {vector.reasoning_parser for vector in VECTORS if vector.reasoning} >= set(REASONING_PARSERS)


@pytest.mark.parametrize(
    ("parser", "head", "body"),
    [
        ("hermes", '<tool_call>{"', '\\"'),
        ("hermes", '<tool_call>{"name": "', "x"),
        ("hermes", '<tool_call>{"arguments": {"a": "', "x"),
        ("llama3_json", "", '{"name": '),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>", "</parameter>"),
        ("glm45", "<tool_call>", "x"),
        ("gemma4", "<|tool_call>call:f{a:[", "["),
        ("gemma4", '<|tool_call>call:f{n:<|"|>', "x"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>", "x"),
        ("xlam", "", "```json\n"),
    ],
)
def test_time_is_linear_in_the_length_of_an_output(parser: str, head: str, body: str) -> None:
    def seconds(num_chars: int) -> float:
        output_parser = create_parser(ParserNames(parser), None, tools=TOOLS)
        output_parser.feed([], head)
        start = time.process_time()
        for _ in range(num_chars // (8 * len(body))):
            output_parser.feed([], body * 8)
        output_parser.feed([], "", True)
        return time.process_time() - start

    short, long = (min(seconds(num_chars) for _ in range(2)) for num_chars in (50_000, 200_000))
    assert long < 10 * short + 0.1


def test_no_mark_begins_another_mark() -> None:
    """The lexer would recognise the shorter mark before the longer one has arrived."""
    for name in TOOL_CALL_PARSERS:
        for reasoning in (None, *REASONING_PARSERS):
            marks = create_parser(ParserNames(name, reasoning), None)._format.marks
            assert not [(a, b) for a in marks for b in marks if a != b and b.startswith(a)], (name, reasoning)


def test_each_configurable_parser_exists() -> None:
    for name in TOOL_CALL_PARSERS:
        create_parser(ParserNames(tool_call_parser=name), None)
    for name in REASONING_PARSERS:
        create_parser(ParserNames(reasoning_parser=name), None)
