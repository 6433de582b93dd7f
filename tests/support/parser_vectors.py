# SPDX-License-Identifier: Apache-2.0
"""Outputs of chat models in each format, and what is in them. Known defects of other parsers are among them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.tokenizer import byte_level, save_tokenizer
from support.written_calls import written_calls

from quire_engine.parsers.formats.harmony import HarmonyFormat
from quire_engine.parsers.formats.tool_formats import TOOL_FORMATS
from quire_engine.parsers.parser_names import REASONING_MARKS, RESPONSE_TEMPLATE
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.model.capabilities import REASONING_PARSERS, TOOL_CALL_PARSERS
from quire_spec.protocol.parsed_output import ParsedOutput, ToolCall

TOOL_CALL_FORMATS = tuple(name for name in TOOL_CALL_PARSERS if name != RESPONSE_TEMPLATE)
REASONING_FORMATS = tuple(name for name in REASONING_PARSERS if name != RESPONSE_TEMPLATE)
"""The formats that do not depend on the checkpoint. test_response_template.py tests the other one."""
_WRITTEN_MARKS = frozenset(
    {"<function=", "</function>", "<parameter=", ">", "</parameter>", "<invoke name=", "</invoke>", "<parameter name="}
    | {"functools[", "```", "<function_calls>", "</function_calls>", "<tool_calls>", "</tool_calls>"}
    | {"<answer>", "</answer>", *REASONING_MARKS["granite"].starts, *REASONING_MARKS["granite"].ends}
)
"""Marks that no tokenizer has as a token."""
ALL_MARKS = sorted(
    {mark for tool_format in TOOL_FORMATS.values() for mark in tool_format.create(()).marks}
    | {mark for marks in REASONING_MARKS.values() for mark in (*marks.starts, *marks.ends, *(marks.answer or ()))}
    | HarmonyFormat.marks
)
MARKS = tuple(mark for mark in ALL_MARKS if mark not in _WRITTEN_MARKS)
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


WITHOUT_TEXT = ("openai", "xlam", "pythonic", "llama4_pythonic")
"""Formats in which calls begin the output, or no text can precede them."""
MANY_CALLS = [
    ("f", {"n": 5, "s": "a, b: {c} [d] é🙂 </x>\n=1", "o": {"k": [True, None, {"t": "x"}], "u": -1.5}, "b": None}),
    ("f", {"s": "5", "x": 2.5}),
]
# Source: tests/tool_parsers/test_granite_tool_parser.py and tests/reasoning/test_granite_reasoning_parser.py of vLLM;
# chat template of ibm-granite/granite-3.3-8b-instruct.
GRANITE = [
    Vector("granite", '<|tool_call|> [{"name": "f", "arguments": {"a": "x"}}]', (("f", {"a": "x"}),)),
    Vector(
        "granite",
        '<tool_call> [\n  {"arguments": {"a": 1}, "name": "f"},\n  {"name": "g", "arguments": {}}\n]',
        (("f", {"a": 1}), ("g", {})),
    ),
    Vector("granite", 'Wait.\n<|tool_call|> [{"name": "f", "arguments": {}}]\nDone.', (("f", {}),), "Wait.Done."),
    Vector("granite", '<|tool_call|> {"name": "f", "arguments": {}}', (("f", {}),)),
    Vector("granite", '<|tool_call|> [{"name": "f", "arguments": {', (("f", None),), arguments=("{",)),
    Vector("granite", '<|tool_call|>[{"a": 1}] x', content='<|tool_call|>[{"a": 1}] x'),
    Vector("granite", '<|tool_call|>[{"name": "f", "arguments": {}}, {"a": 1}, {"name": "g"}]', (("f", {}), ("g", {}))),
    Vector(None, "Here is my thought process:\nHm.\nHere is my response: Hi", (), " Hi", "Hm.", "granite"),
    Vector(None, "Here's my thought process: Hm. Here's my response:\nHi", (), "Hi", " Hm. ", "granite"),
    Vector(None, "Here is my answer: x", (), "Here is my answer: x", "", "granite"),
]
# Source: tests/tool_parsers/test_phi4mini_tool_parser.py of vLLM; model card of microsoft/Phi-4-mini-instruct.
PHI = [
    Vector("phi4_mini_json", 'functools[\n {"name": "f", "arguments": {"a": "]"}}]', (("f", {"a": "]"}),)),
    Vector(
        "phi4_mini_json",
        "from functools import cache\nfunctools[1]\n",
        content="from functools import cache\nfunctools[1]\n",
    ),
]
# Source: tests/tool_parsers/test_hunyuan_a13b_tool_parser.py and vllm/reasoning/hunyuan_a13b_reasoning_parser.py of
# vLLM.
HUNYUAN = [
    Vector(
        "hunyuan_a13b",
        'Ok<tool_calls>[{"name": "f", "arguments": {"a": {"b": 1}}}]</tool_calls>!',
        (("f", {"a": {"b": 1}}),),
        "Ok!",
    ),
    Vector("hunyuan_a13b", '<tool_calls>[{"name": "f", "arguments": {}}', (("f", {}),)),
    Vector("hunyuan_a13b", "<think>\nHm.\n</think>\n<answer>\nHi\n</answer>", (), "Hi\n", "Hm.", "hunyuan_a13b"),
    Vector(
        "hunyuan_a13b",
        '<think>\n\n</think>\n<answer>\n<tool_calls>[{"name": "f", "arguments": {"a": "<answer>"}}]'
        "</tool_calls>\n</answer>",
        (("f", {"a": "<answer>"}),),
        "",
        "",
        "hunyuan_a13b",
    ),
    Vector(None, "<answer>x</answer> y</answer>\n", (), "x</answer> y", "", "hunyuan_a13b"),
]
# Source: tests/tool_parsers/test_xlam_tool_parser.py of vLLM.
XLAM = [
    Vector(
        "xlam", '[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]', (("f", {"a": 1}), ("f", {}))
    ),
    Vector("xlam", 'Ok.\n```json\n[{"name": "f", "arguments": {"a": "```"}}]\n```', (("f", {"a": "```"}),), "Ok."),
    Vector("xlam", 'Ok.[TOOL_CALLS][{"name": "g", "arguments": {}}]', (("g", {}),), "Ok."),
    Vector("xlam", 'Ok.<tool_call>[{"name": "g", "arguments": {}}]</tool_call>', (("g", {}),), "Ok."),
    Vector("xlam", '<think>Hm.</think>[{"name": "f", "arguments": {}}]', (("f", {}),), "<think>Hm.</think>"),
    Vector("xlam", '<think>Hm.</think>[{"name": "f", "arguments": {}}]', (("f", {}),), "", "Hm.", "qwen3"),
    Vector("xlam", '```json\n{"name": "Alice"}\n```\n', content='```json\n{"name": "Alice"}\n```\n'),
    Vector("xlam", '[{"name": "Alice", "arguments": {}}]', content='[{"name": "Alice", "arguments": {}}]'),
]
# Source: tests/tool_parsers/test_ernie45_moe_tool_parser.py and vllm/reasoning/ernie45_reasoning_parser.py of vLLM.
ERNIE = [
    Vector("ernie45", "a\n</think>\n\n\n" + hermes("f", "{}") + "\n", (("f", {}),), "", "a", "ernie45", is_open=True),
    Vector("ernie45", "a\n</think>\n\n<response>\nb\n</response>\n", (), "b\n", "a", "ernie45", is_open=True),
]
# Source: tests/tool_parsers/test_seed_oss_tool_parser.py of vLLM; chat template of Seed-OSS-36B-Instruct.
SEED = [
    Vector(
        "seed_oss",
        "<seed:think>Use <seed:tool_call>.</seed:think>\n" + written_calls("seed_oss", [("f", {"n": 1})]),
        (("f", {"n": 1}),),
        "",
        "Use <seed:tool_call>.",
        "seed_oss",
    ),
    Vector(
        "seed_oss",
        "<seed:tool_call>\n<function=f>\n<parameter=s>\na</parameter>\n</function>\n</seed:tool_call>",
        (("f", {"s": "\na"}),),
    ),
]
# Source: tests/tool_parsers/test_minimax_m2_tool_parser.py of vLLM; chat template of MiniMaxAI/MiniMax-M2.
MINIMAX = [
    Vector(
        "minimax_m2",
        'Ok. <minimax:tool_call><invoke name="f"><parameter name="n">5</parameter></invoke>'
        "<invoke name=g></invoke></minimax:tool_call>",
        (("f", {"n": 5}), ("g", {})),
        "Ok. ",
    ),
    Vector("minimax_m2", "Hm.\n</think>\n\nHi", (), "Hi", "Hm.", "minimax_m2", is_open=True),
]
# Source: tests/tool_parsers/test_glm4_moe_tool_parser.py and test_glm47_moe_tool_parser.py of vLLM; chat templates of
# zai-org/GLM-4.5 and GLM-4.7.
GLM = [
    Vector(name, text, calls, content)
    for name in ("glm45", "glm47")
    for text, calls, content in (
        (
            "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n"
            "<arg_key>s</arg_key>\n<arg_value> a\n</arg_value>\n</tool_call>",
            (("f", {"n": 5, "s": " a\n"}),),
            "",
        ),
        ("Ok.<tool_call>g</tool_call> Hi", (("g", {}),), "Ok. Hi"),
        (
            "<tool_call>f<arg_key>s</arg_key><arg_value>use </arg_value> here</arg_value></tool_call>",
            (("f", {"s": "use </arg_value> here"}),),
            "",
        ),
        (
            '<tool_call>f<arg_key>o</arg_key><arg_value>{"a": "</arg_value>"}</arg_value></tool_call>',
            (("f", {"o": {"a": "</arg_value>"}}),),
            "",
        ),
        ("<tool_call>f<arg_key>n</arg_key><arg_value>5</arg_value>", (("f", {"n": 5}),), ""),
        ("<tool_call>", (), "<tool_call>"),
    )
] + [
    Vector(name, "<think>Hm.</think>\n" + written_calls(name, [("f", {})]), (("f", {}),), "", "Hm.", name)
    for name in ("glm45", "glm47")
]
# Source: tests/tool_parsers/test_deepseekv3_tool_parser.py and test_deepseekv31_tool_parser.py of vLLM; chat templates
# of deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1.
DEEPSEEK = [
    Vector(
        "deepseek_v3",
        "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": "<｜tool▁call▁end｜>"}\n```<｜tool▁call▁end｜>',
        (("f", {"a": "<｜tool▁call▁end｜>"}),),
        "Ok.",
    ),
    Vector("deepseek_v31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1', (("f", None),), arguments=('{"a": 1',)),
    Vector(
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>Hi",
        (("f", {}),),
        "Hi",
    ),
    Vector("deepseek_v31", "a<｜tool▁call▁begin｜>b", content="a<｜tool▁call▁begin｜>b"),
    Vector("deepseek_v31", "Hm.</think>Hi", (), "Hi", "Hm.", "deepseek_v3", is_open=True),
]
# Source: tests/tool_parsers/test_kimi_k2_tool_parser.py of vLLM; docs/tool_call_guidance.md of moonshotai/Kimi-K2.
KIMI = [
    Vector(
        "kimi_k2",
        "Ok.<|tool_calls_section_begin|> <|tool_call_begin|> functions.f:0 <|tool_call_argument_begin|> "
        '{"a": 1} <|tool_call_end|> <|tool_calls_section_end|>',
        (("f", {"a": 1}),),
        "Ok.",
    ),
    Vector(
        "kimi_k2", "<|tool_call_begin|>functions.a.b:12<|tool_call_argument_begin|>{}<|tool_call_end|>", (("a.b", {}),)
    ),
    Vector(
        "kimi_k2",
        "<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}",
        (("f", {}),),
        "",
        "Hm.",
        "kimi_k2",
    ),
]
# Source: tests/tool_parsers/test_lfm2_tool_parser.py of vLLM; chat template of LiquidAI/LFM2-1.2B.
LFM2 = [
    Vector(
        "lfm2",
        "<|tool_call_start|> [f(a='Martha\\'s', b=[1], c=None)]<|tool_call_end|>\nHi",
        (("f", {"a": "Martha's", "b": [1], "c": None}),),
        "Hi",
    ),
    Vector("lfm2", "<|tool_call_start|>[f(a=\"grep ']' x\ny\")]<|tool_call_end|>", (("f", {"a": "grep ']' x\ny"}),)),
    Vector("lfm2", "[f(a=1)]", content="[f(a=1)]"),
    Vector("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", content="[]"),
]
# Source: tests/tool_parsers/test_olmo3_tool_parser.py of vLLM.
OLMO = [
    Vector(
        "olmo3",
        "<function_calls>f(a='x', b={'c': null}, d=true)\ng()</function_calls>",
        (("f", {"a": "x", "b": {"c": None}, "d": True}), ("g", {})),
    ),
    Vector(
        "olmo3",
        "Ok.\n<function_calls>\nf(a='</function_calls>\n')\n</function_calls>\nHi",
        (("f", {"a": "</function_calls>\n"}),),
        "Ok.Hi",
    ),
    Vector("olmo3", "<function_calls>f(x=1])</function_calls>", content="<function_calls>f(x=1])"),
    Vector("olmo3", "<think>Hm.</think>Hi", (), "Hi", "Hm.", "olmo3"),
]
# Source: tests/tool_parsers/test_gemma4_tool_parser.py and test_functiongemma_tool_parser.py of vLLM; chat templates of
# google/gemma-4-E2B-it and functiongemma-270m-it.
GEMMA = [
    Vector(
        "gemma4",
        '<|tool_call>call:get-weather{a:<|"|>Paris, France<|"|>,b:42,c:3.14,d:true,e:null}<tool_call|>',
        (("get-weather", {"a": "Paris, France", "b": 42, "c": 3.14, "d": True, "e": None}),),
    ),
    Vector(
        "gemma4",
        '<|tool_call>call:g{a:{<|"|>3<|"|>:<|"|>x"}]\n<|"|>},b:[<|"|>a<|"|>,[42,true]],c:[]}<tool_call|>',
        (("g", {"a": {"3": 'x"}]\n'}, "b": ["a", [42, True]], "c": []}),),
    ),
    Vector(
        "functiongemma",
        '<start_function_call>call:g{a:{"k": ["x\\n<escape>", 1]}, "b" : Paris }<end_function_call>',
        (("g", {"a": {"k": ["x\n<escape>", 1]}, "b": "Paris"}),),
    ),
    Vector("gemma4", "<|tool_call>call:g{a:,b:[1,],c:2<tool_call|>Hi", (("g", {"a": "", "b": [1], "c": 2}),), "Hi"),
    Vector("gemma4", '<|tool_call>call:g{a:<|"|>cut', (("g", None),), arguments=('{"a": "cut',)),
    Vector("gemma4", "<|tool_call>go {x}<tool_call|>!", content="<|tool_call>go {x}!"),
    Vector(
        "gemma4",
        '<|tool_call>call:f{n:<|"|>42<|"|>,s:42,b:<|"|>x<|"|>}<tool_call|>',
        (("f", {"n": 42, "s": "42", "b": "x"}),),
    ),
    Vector("gemma4", "<|channel>thought\nHm.\n<channel|>Hi", (), "Hi", "Hm.", "gemma4"),
    Vector("gemma4", "<|channel>thought\n<channel|>Hi", (), "Hi", "", "gemma4"),
    Vector(None, "<|channel>though it<channel|>Hi", (), "Hi", "though it", "gemma4"),
    Vector(
        "functiongemma",
        "<start_function_call>call:g{a:<escape>NYC<escape>b:<escape>c<escape>,}<end_function_call>"
        "<start_function_call>call:f{}<end_function_call>",
        (("g", {"a": "NYC", "b": "c"}), ("f", {})),
    ),
    Vector(
        "functiongemma",
        "<start_function_call>call:f{n:<escape>42<escape>,b:<escape>true<escape>}<end_function_call>",
        (("f", {"n": 42, "b": True}),),
    ),
]
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
    Vector("hermes", '<tool_call>{"name": {"a": "b"}, "arguments": {}}</tool_call>',
           content='<tool_call>{"name": {"a": "b"}, "arguments": {}}'),
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
    *GRANITE,
    *PHI,
    *HUNYUAN,
    *XLAM,
    *ERNIE,
    *SEED,
    *MINIMAX,
    *GLM,
    *DEEPSEEK,
    *KIMI,
    *LFM2,
    *OLMO,
    *GEMMA,
    *(
        Vector(name, "Wait.\n" + written_calls(name, calls) if name not in WITHOUT_TEXT else written_calls(name, calls),
               tuple(calls), "" if name in WITHOUT_TEXT else "Wait.")
        for name in TOOL_CALL_FORMATS
        for calls in (MANY_CALLS[:1] if name == "openai" else MANY_CALLS, [("f", {})])
    ),
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
