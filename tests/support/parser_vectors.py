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
    "x": {"type": "float"},
    "d": {"type": "string", "format": "date"},
    "r": {"anyOf": [{"$ref": "#/$defs/item"}, {"type": "null"}]},
    "a": {"allOf": [{"$ref": "#/$defs/item"}]},
    "e": {"enum": [1, 2]},
    "c": {"const": 5},
}
PARAMETERS = {"type": "object", "properties": SCHEMA, "$defs": {"item": {"type": "object"}}}
TOOLS = ({"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},)


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


def qwen(**parameters: str) -> str:
    """Return a call of f in the format of Qwen3-Coder."""
    body = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in parameters.items())
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


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
    # Marks inside strings of a call are text, and arguments are always an object.
    Vector("hermes", hermes("f", '{"s": "use </tool_call> or <tool_call> here"}'),
           (("f", {"s": "use </tool_call> or <tool_call> here"}),)),
    Vector("hermes", '<tool_call>{"name": "f", "arguments": {"s": "1"}, "parameters": {"s": "2"}}</tool_call>',
           (("f", {"s": "1"}),)),
    Vector("hermes", hermes("f", "null") + hermes("g", "[]") + hermes("h", '"x"'), (("f", {}), ("g", {}), ("h", {}))),
    Vector("hermes", '<tool_call>{"name": "f", "arguments": {}}\nDone.', (("f", {}),), "Done."),
    Vector("hermes", '<tool_call>{"name": "f", "arguments": {}}\n' + hermes("g", "{}"), (("f", {}), ("g", {}))),
    Vector("hermes", hermes(r"\ud83d", r'"{\"s\": \"\ud83d\ude00 \ud83d\"}"'),
           (("\ufffd", {"s": "\U0001f600 \ufffd"}),)),
    # A call ends reasoning whose end mark is missing.
    Vector("hermes", "I need it.\n" + hermes("f", "{}"), (("f", {}),), "", "I need it.", "qwen3", is_open=True),
    Vector("qwen3_coder", "I need it." + qwen(n="1"), (("f", {"n": 1}),), "", "I need it.", "qwen3", is_open=True),
    Vector("mistral", "[THINK]Hm.[TOOL_CALLS]f[ARGS]{}", (("f", {}),), "", "Hm.", "mistral"),
    Vector("hermes", "a</think>\n</think>\n\nb", (), "b", "a", "qwen3", is_open=True),
    Vector("hermes", hermes("f", '{"s": "</think>"}'), (("f", {"s": "</think>"}),), "", "", "qwen3"),
    # Values of Qwen3-Coder: types behind references, numbers and strings that JSON does not have, missing end marks.
    Vector("qwen3_coder", qwen(r='{"x": 4}', a='{"x": 4}', e="2", c="5", x="3.14", d="2024-02-29"),
           (("f", {"r": {"x": 4}, "a": {"x": 4}, "e": 2, "c": 5, "x": 3.14, "d": "2024-02-29"}),)),
    Vector("qwen3_coder", qwen(d='"2024-02-29"', r="null", b="None"),
           (("f", {"d": "2024-02-29", "r": None, "b": None}),)),
    Vector("qwen3_coder", qwen(x="1E400"), (("f", None),), arguments=('{"x": 1E400}',)),
    Vector("qwen3_coder", qwen(x="NaN", o='{"a": NaN}', a="Infinity"),
           (("f", {"x": "NaN", "o": '{"a": NaN}', "a": "Infinity"}),)),
    Vector("qwen3_coder", qwen(o="{'c': '\\ud83d'}", s="\\ud83d"), (("f", {"o": {"c": "\ufffd"}, "s": "\\ud83d"}),)),
    Vector("qwen3_coder", qwen(s="end with </parameter> here", o='{"a": "</parameter></function>"}'),
           (("f", {"s": "end with </parameter> here", "o": {"a": "</parameter></function>"}}),)),
    Vector("qwen3_coder", "<tool_call><function=f>\n<parameter=s>\nDallas\n<parameter=t>\nTX\n</function></tool_call>",
           (("f", {"s": "Dallas", "t": "TX"}),)),
    Vector("qwen3_coder", "<tool_call><function=f><parameter=n>1</parameter>", (("f", {"n": 1}),)),
    Vector("qwen3_coder", "<tool_call><function=f><parameter=n>1</parameter><tool_call><function=g></function>Ok",
           (("f", {"n": 1}), ("g", {})), "Ok"),
    # Without a mark, an object is a call only if it names a tool and has arguments.
    Vector("llama3_json", '{"name": "Alice", "age": 30}', content='{"name": "Alice", "age": 30}'),
    Vector("llama3_json", '{"name": "Alice", "parameters": {}}', content='{"name": "Alice", "parameters": {}}'),
    Vector("llama3_json", '{"name": "f"}', content='{"name": "f"}'),
    Vector("llama3_json", '{"a": {"name": "f", "parameters": {}}}', content='{"a": {"name": "f", "parameters": {}}}'),
    Vector("llama3_json", '<|python_tag|>{"name": "search", "parameters": {}}', (("search", {}),)),
    Vector("llama3_json", 'Here: {} is it:\n{"type": "function", "name": "f", "parameters": {"a": "<|python_tag|>"}}',
           (("f", {"a": "<|python_tag|>"}),), "Here: {} is it:"),
    Vector("pythonic", '[get-weather(a-b="x", from=1), f(class=[True])]',
           (("get-weather", {"a-b": "x", "from": 1}), ("f", {"class": [True]}))),
    Vector("pythonic", "[g(a=1)]", content="[g(a=1)]"),
    Vector("pythonic", "<|python_start|>[g(a=1)]", (("g", {"a": 1}),)),
    Vector("pythonic", '[f(a=1), f(b="x, ]"), f(c="cu', (("f", {"a": 1}), ("f", {"b": "x, ]"}))),
    Vector("pythonic", "[f(a=1e400)]", (("f", None),), arguments=('{"a": 1e400}',)),
    Vector("pythonic", r"""[f(a="\ud83d\ude00 hi", b='\ud83d', c='<|python_end|>')]""",
           (("f", {"a": "\U0001f600 hi", "b": "\ufffd", "c": "<|python_end|>"}),)),
    Vector("pythonic", "[f(a=nan)]", content="[f(a=nan)]"),
    Vector("mistral", '[TOOL_CALLS] {"name": "add", "arguments": {"a": 1}}', (("add", {"a": 1}),)),
    Vector("mistral", "[TOOL_CALLS]f", (("f", {}),)),
    Vector("mistral", "[TOOL_CALLS] no call {x}", content=" no call {x}"),
    Vector("mistral", '[TOOL_CALLS]f[ARGS]{"s": "[TOOL_CALLS]"} Done it.',
           (("f", {"s": "[TOOL_CALLS]"}),), " Done it."),
    Vector("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}] Ok', (("f", {}),), " Ok"),
    Vector("openai", "<|channel|>commentary to=get_weather json<|message|>{}<|call|>", (("get_weather", {}),)),
    Vector("openai", "<|channel|>commentary to=browser.search<|message|>{}<|call|><|start|>assistant<|channel|>final"
           "<|message|>Hi<|return|>", (), "Hi"),
    Vector("openai", '<|channel|>final {"answer": "hi"}<|return|>', (), '{"answer": "hi"}'),
    Vector("openai", "No header.", (), "No header."),
    Vector("openai", "<|channel|>analysis<|message|>a<|end|><|start|>assis", (), "", "a"),
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
    """Return a tokenizer with a token for each mark, one with a special token for each mark, and one without."""
    plain = Tokenizer(save_tokenizer(byte_level(), folder / "plain"))
    marked = byte_level()
    marked.add_tokens(list(MARKS))
    special = byte_level()
    special.add_special_tokens(list(MARKS))
    return {
        "plain": plain,
        "marked": Tokenizer(save_tokenizer(marked, folder / "marked")),
        "special": Tokenizer(save_tokenizer(special, folder / "special")),
    }
