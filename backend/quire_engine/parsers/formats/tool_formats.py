# SPDX-License-Identifier: Apache-2.0
"""The table of the tool call formats: the parser and the grammar of each name.

The names are those of vLLM's --tool-call-parser. Harmony is not in the table, because its messages contain the answer,
too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire_engine.parsers.call_grammar import CallGrammar, Marks
from quire_engine.parsers.format import ContentFormat
from quire_engine.parsers.formats import gemma, llama_json, marked_json, mistral, named_json, pythonic, xml_calls
from quire_engine.parsers.formats.gemma import GemmaFormat, GemmaMarks
from quire_engine.parsers.formats.llama_json import LlamaJsonFormat
from quire_engine.parsers.formats.marked_json import JsonMarks, MarkedJsonFormat
from quire_engine.parsers.formats.mistral import MistralFormat
from quire_engine.parsers.formats.named_json import NamedJsonFormat, NamedJsonMarks
from quire_engine.parsers.formats.pythonic import PythonicFormat, PythonicMarks
from quire_engine.parsers.formats.xml_calls import XmlCallsFormat, XmlMarks
from quire_engine.parsers.tool import Tool

Tools = Sequence[Mapping[str, Any]]
"""The tools of a request, in the form of the OpenAI API."""
Grammar = Callable[[Sequence[Tool], Marks, bool], CallGrammar]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls."""

    create: Callable[[Tools], ContentFormat]
    """Returns the parser of one output."""
    grammar: Grammar
    """Returns the grammar of calls of the given tools. The third argument is False if only one call is allowed."""
    can_lead: bool = False
    """True if calls can stand without a mark at the beginning of the answer."""


def names_of(tools: Tools) -> frozenset[str] | None:
    """Return the names of the tools of a request; None if the request has no tools."""
    return frozenset(str(tool["function"]["name"]) for tool in tools) or None


def _marked_json(syntax: JsonMarks) -> ToolFormat:
    return ToolFormat(
        lambda tools: MarkedJsonFormat(syntax, names_of(tools)),
        lambda tools, marks, parallel: marked_json.call_grammar(syntax, tools, marks, parallel),
        syntax.can_lead,
    )


def _named_json(syntax: NamedJsonMarks) -> ToolFormat:
    return ToolFormat(
        lambda tools: NamedJsonFormat(syntax),
        lambda tools, marks, parallel: named_json.call_grammar(syntax, tools, marks, parallel),
    )


def _pythonic(syntax: PythonicMarks) -> ToolFormat:
    return ToolFormat(
        lambda tools: PythonicFormat(syntax, names_of(tools)),
        lambda tools, marks, parallel: pythonic.call_grammar(syntax, tools, marks, parallel),
        syntax.can_lead,
    )


def _xml(syntax: XmlMarks) -> ToolFormat:
    return ToolFormat(
        lambda tools: XmlCallsFormat(syntax, tools),
        lambda tools, marks, parallel: xml_calls.call_grammar(syntax, tools, marks, parallel),
    )


def _gemma(syntax: GemmaMarks) -> ToolFormat:
    return ToolFormat(
        lambda tools: GemmaFormat(syntax, tools),
        lambda tools, marks, parallel: gemma.call_grammar(syntax, tools, marks, parallel),
    )


_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_HERMES = _marked_json(JsonMarks((_CALL,), _CALL_END, before="\n", after="\n"))
_QWEN = _xml(
    XmlMarks(
        *(_CALL, _CALL_END, "<function=", "</function>", "<parameter=", ">", "</parameter>"),
        *("\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n"),
    )
)
_LLAMA = ToolFormat(lambda tools: LlamaJsonFormat(names_of(tools)), llama_json.call_grammar, can_lead=True)
_PYTHONIC = _pythonic(PythonicMarks("<|python_start|>", "<|python_end|>", can_lead=True))
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_GLM = (_CALL, _CALL_END, "", "", "<arg_key>", "<arg_value>", "</arg_value>")
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": _HERMES,
    "granite4": _HERMES,
    "ernie45": _HERMES,
    "granite": _marked_json(JsonMarks(("<|tool_call|>", _CALL), is_list=True)),
    "phi4_mini_json": _marked_json(JsonMarks(("functools[",), is_list=True)),
    "hunyuan_a13b": _marked_json(JsonMarks(("<tool_calls>",), "</tool_calls>", is_list=True)),
    "xlam": _marked_json(
        JsonMarks(
            ("[TOOL_CALLS]", _CALL),
            _CALL_END,
            is_list=True,
            fence="```",
            can_lead=True,
            lead="</think>",
        )
    ),
    "qwen3_coder": _QWEN,
    "qwen3_xml": _QWEN,
    "seed_oss": _xml(
        XmlMarks(
            *("<seed:tool_call>", "</seed:tool_call>", "<function=", "</function>", "<parameter=", ">", "</parameter>"),
            *("\n<function={}>\n", "<parameter={}>", "</parameter>\n", "</function>\n"),
        )
    ),
    "minimax_m2": _xml(
        XmlMarks(
            *("<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=", "</invoke>"),
            *("<parameter name=", ">", "</parameter>"),
            *('\n<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n", "</invoke>\n"),
        )
    ),
    "glm45": _xml(
        XmlMarks(*_GLM, "{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "", other="</arg_key>")
    ),
    "glm47": _xml(XmlMarks(*_GLM, "{}", "<arg_key>{}</arg_key><arg_value>", "</arg_value>", "", other="</arg_key>")),
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "lfm2": _pythonic(PythonicMarks("<|tool_call_start|>", "<|tool_call_end|>")),
    "olmo3": _pythonic(PythonicMarks("<function_calls>", "</function_calls>", has_lines=True)),
    "mistral": ToolFormat(lambda tools: MistralFormat(), mistral.call_grammar),
    "deepseek_v3": _named_json(
        NamedJsonMarks(*_DEEPSEEK, "function<｜tool▁sep｜>{name}\n```json\n", tail="\n```", between="\n")
    ),
    "deepseek_v31": _named_json(NamedJsonMarks(*_DEEPSEEK, "{name}<｜tool▁sep｜>")),
    "kimi_k2": _named_json(
        NamedJsonMarks(
            *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
            *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
            "functions.{name}:{index}<|tool_call_argument_begin|>",
        )
    ),
    "gemma4": _gemma(GemmaMarks("<|tool_call>", "<tool_call|>", '<|"|>')),
    "functiongemma": _gemma(GemmaMarks("<start_function_call>", "<end_function_call>", "<escape>")),
}
