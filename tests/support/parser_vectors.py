# SPDX-License-Identifier: Apache-2.0
"""Outputs of chat models in each format, and what is in them. Known defects of other parsers are among them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.tokenizer import byte_level, save_tokenizer

from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.protocol.parsed_output import ParsedOutput, ToolCall

MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<|python_tag|>", "<|python_start|>", "<|python_end|>", "<|channel|>", "<|message|>", "<|end|>"),
    *("<|call|>", "<|return|>", "<|start|>", "<|constrain|>"),
)
SCHEMA = {
    "n": {"type": "integer"},
    "s": {"type": "string"},
    "o": {"type": "object"},
    "b": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
}
TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": SCHEMA}}},)


@dataclass(frozen=True)
class Vector:
    """An output and what is in it."""

    tool_call_parser: str | None
    text: str
    calls: tuple[tuple[str, Any], ...] = ()
    content: str = ""
    reasoning: str = ""
    reasoning_parser: str | None = None
    is_open: bool = False
    arguments: tuple[str, ...] | None = field(default=None)
    """Exact text of arguments, where it is no JSON."""


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ESCAPES = r'{"s": "a \"quoted\" }] \\ \u00e9 {", "l": [1, {"x": null}], "n": -1.5e3}'
VECTORS = [
    Vector(None, "plain <tool_call> text\n", content="plain <tool_call> text\n"),
    Vector("hermes", "no call, 日本 🙂\n\n", content="no call, 日本 🙂\n\n"),
    Vector("hermes", hermes("f", '{"a": "é🙂"}'), (("f", {"a": "é🙂"}),)),
    Vector("hermes", "Wait.\n\n" + hermes("f", ESCAPES), (("f", json.loads(ESCAPES)),), "Wait."),
    Vector("hermes", hermes("f", "{}") + "\n" + hermes("g", '{"a": 1}'), (("f", {}), ("g", {"a": 1}))),
    Vector("hermes", '<tool_call>{"name": "f"}</tool_call>', (("f", {}),)),
    Vector("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', (("f", {"a": 1}),)),
    Vector("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', (("f", {"a": 1}),)),
    Vector("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}} }\n</tool_call>', (("f", {"a": 1}),)),
    Vector("hermes", hermes("f", "{}") + "\nDone.", (("f", {}),), "Done."),
    Vector("hermes", "<tool_call>{broken</tool_call>!", content="<tool_call>{broken!"),
    Vector("hermes", '<tool_call>\n{"name": "f", "arg', (("f", None),), arguments=("",)),
    Vector("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut', (("f", None),), arguments=('{"a": "cut',)),
    Vector("hermes", "<think>\na\n\nb\n</think>\n\n" + hermes("f", "{}"), (("f", {}),), "", "a\n\nb", "qwen3"),
    Vector("hermes", "a </think>\n\nb <think> c\n", (), "b <think> c\n", "a ", "deepseek_r1", is_open=True),
    Vector(None, "<think>\n\n</think>\n\nanswer", (), "answer", "", "qwen3"),
    Vector(None, "<think>\nonly thoughts", (), "", "only thoughts", "qwen3"),
    Vector(None, "\n answer </think> x", (), "\n answer </think> x", "", "qwen3"),
    Vector(
        "qwen3_coder",
        "Sure.\n<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n<parameter=s>\n5 <b>\n\n</parameter>\n"
        '<parameter=o>\n{"k": [true]}\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n<parameter=new>\n7\n'
        "</parameter>\n</function>\n</tool_call>",
        (("f", {"n": 5, "s": "5 <b>\n", "o": {"k": [True]}, "b": True, "new": "7"}),),
        "Sure.",
    ),
    Vector("qwen3_xml", "<tool_call><function=g></function></tool_call>\n<tool_call><function=f><parameter=n>x"
           "</parameter></function></tool_call>", (("g", {}), ("f", {"n": "x"}))),
    Vector("qwen3_coder", "a < b </parameter> and <function", content="a < b </parameter> and <function"),
    Vector("llama3_json", ' {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
           (("f", {"a": 1}), ("g", {}))),
    Vector("llama3_json", '<|python_tag|>{"name": "f", "arguments": {"a": "}"}}', (("f", {"a": "}"}),)),
    Vector("llama3_json", '{"city": "Paris"}\n', content='{"city": "Paris"}\n'),
    Vector("llama3_json", 'Use {"name": "f"}', content='Use {"name": "f"}'),
    Vector("llama3_json", '{"name": broken} and more', content='{"name": broken} and more'),
    Vector("pythonic", '[f(a=1, s="x]", o={"k": [None, true]}), g.h()]',
           (("f", {"a": 1, "s": "x]", "o": {"k": [None, True]}}), ("g.h", {}))),
    Vector("llama4_pythonic", "Hi.<|python_start|>[f(a=-1)]<|python_end|>", (("f", {"a": -1}),), "Hi."),
    Vector("pythonic", "[1, 2]\nx", content="[1, 2]\nx"),
    Vector("pythonic", "[f(a=", content="[f(a="),
    Vector("pythonic", "[f(__import__('os'))]", content="[f(__import__('os'))]"),
    Vector("pythonic", "[" * 5000 + "]" * 5000, content="[" * 5000 + "]" * 5000),
    Vector("mistral", 'Ok.[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
           (("f", {"a": 1}), ("g", {})), "Ok."),
    Vector("mistral", '[TOOL_CALLS]f[ARGS]{"a": [1]}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}', (("f", {"a": [1]}), ("g", {}))),
    Vector("mistral", '[TOOL_CALLS]f{"a": {}}', (("f", {"a": {}}),)),
    Vector(
        "openai",
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
        (("f", {"a": 1}),),
        "",
        "Think.",
        "openai_gptoss",
    ),
    Vector("openai", "<|channel|>commentary<|message|>First. <|end|><|start|>assistant<|channel|>final<|message|>Hi"
           "<|return|>", (), "First. Hi"),
    Vector("openai", "<|start|>assistant to=functions.f<|channel|>commentary json<|message|><|call|>", (("f", {}),)),
]  # fmt: skip


def expected(vector: Vector) -> ParsedOutput:
    texts = vector.arguments or tuple(json.dumps(arguments) for _, arguments in vector.calls)
    calls = tuple(ToolCall(name, text) for (name, _), text in zip(vector.calls, texts, strict=True))
    return ParsedOutput(vector.content, vector.reasoning, calls)


def normalized(vector: Vector, output: ParsedOutput) -> ParsedOutput:
    if vector.arguments is not None:
        return output
    calls = tuple(ToolCall(call.name, json.dumps(json.loads(call.arguments))) for call in output.tool_calls)
    return ParsedOutput(output.content, output.reasoning, calls)


def groups(length: int) -> Iterator[int]:
    # A long output shows bounds, not splits.
    yield from {1, 2, 3, 5, 11, max(1, length // 2), length} if length < 1000 else {7, length}


def make_tokenizers(folder: Path) -> dict[str, Tokenizer]:
    """Return a tokenizer with a token for each mark, and one without."""
    plain = Tokenizer(save_tokenizer(byte_level(), folder / "plain"))
    marked = byte_level()
    marked.add_tokens(list(MARKS))
    return {"plain": plain, "marked": Tokenizer(save_tokenizer(marked, folder / "marked"))}
