# SPDX-License-Identifier: Apache-2.0
"""The parser of one output of a chat: content, reasoning and tool calls from token ids and text, as they arrive.

    parser = create_parser("hermes", "qwen3", tokenizer, tools=tools, is_reasoning_open=False)
    for delta in deltas:
        events = parser.feed(delta.token_ids, delta.text, delta.finished)

The result does not depend on how tokens are grouped into deltas.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quire_engine.parsers.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments
from quire_engine.parsers.format import Format, PlainText
from quire_engine.parsers.harmony import HarmonyFormat
from quire_engine.parsers.hermes import HermesFormat
from quire_engine.parsers.lexer import Lexer
from quire_engine.parsers.llama_json import LlamaJsonFormat
from quire_engine.parsers.mistral import MistralFormat
from quire_engine.parsers.pythonic import PythonicFormat
from quire_engine.parsers.qwen_xml import QwenXmlFormat
from quire_engine.parsers.reasoning import ContentFormat, ReasoningFormat
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import InvalidArgument

_Tools = Sequence[Mapping[str, Any]]
_HARMONY = "openai"
_FORMATS: dict[str, Callable[[_Tools], ContentFormat]] = {
    "hermes": lambda tools: HermesFormat(),
    "qwen3_coder": QwenXmlFormat,
    "qwen3_xml": QwenXmlFormat,
    "llama3_json": lambda tools: LlamaJsonFormat(),
    "llama4_json": lambda tools: LlamaJsonFormat(),
    "pythonic": lambda tools: PythonicFormat(),
    "llama4_pythonic": lambda tools: PythonicFormat(),
    "mistral": lambda tools: MistralFormat(),
    _HARMONY: lambda tools: HarmonyFormat(),
}
_REASONING_MARKS = {
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
_HARMONY_REASONING = "openai_gptoss"
TOOL_CALL_PARSERS = tuple(_FORMATS)
"""Names as of vLLM's --tool-call-parser."""
REASONING_PARSERS = (*_REASONING_MARKS, _HARMONY_REASONING)
"""Names as of vLLM's --reasoning-parser."""


class OutputParser:
    """The parser of one output."""

    def __init__(self, output_format: Format, lexer: Lexer) -> None:
        self._format = output_format
        self._lexer = lexer

    @property
    def is_reasoning_open(self) -> bool:
        """Whether the answer has not begun; a grammar begins when it does."""
        return isinstance(self._format, ReasoningFormat) and self._format.is_open

    def feed(self, token_ids: Sequence[int], text: str, finished: bool = False) -> list[Event]:
        """Return what the next tokens add. For `token_ids` and `text` see `Lexer.feed`."""
        events: list[Event] = []
        for lexeme in self._lexer.feed(token_ids, text, finished):
            events.extend(self._format.feed(lexeme))
        if finished:
            events.extend(self._format.finish())
        return _join(events)


def create_parser(
    tool_call_parser: str | None,
    reasoning_parser: str | None,
    tokenizer: Tokenizer | None,
    prompt_token_ids: Sequence[int] | None = None,
    tools: _Tools = (),
    is_reasoning_open: bool = False,
) -> OutputParser:
    """Return the parser of one output; a name of None leaves calls or reasoning in the content.

    `is_reasoning_open`: the template ended the prompt with the mark that begins the reasoning.

    Raises:
        InvalidArgument: a name is unknown.
    """
    if tool_call_parser is not None and tool_call_parser not in _FORMATS:
        raise InvalidArgument(f"toolCallParser: unknown, got {tool_call_parser!r}; use {', '.join(TOOL_CALL_PARSERS)}")
    if reasoning_parser is not None and reasoning_parser not in REASONING_PARSERS:
        raise InvalidArgument(f"reasoningParser: unknown, got {reasoning_parser!r}; use {', '.join(REASONING_PARSERS)}")
    output_format: Format
    if tool_call_parser == _HARMONY or reasoning_parser == _HARMONY_REASONING:
        output_format = HarmonyFormat()
    else:
        answer: ContentFormat = PlainText() if tool_call_parser is None else _FORMATS[tool_call_parser](tools)
        output_format = answer
        if reasoning_parser is not None:
            start, end = _REASONING_MARKS[reasoning_parser]
            output_format = ReasoningFormat(answer, start, end, is_reasoning_open)
    return OutputParser(output_format, Lexer(output_format.marks, tokenizer, prompt_token_ids))


def detect_parsers(template: str, added_tokens: Iterable[str] = ()) -> tuple[str | None, str | None]:
    """Return the names of the parsers of tool calls and of reasoning that a checkpoint needs, from its template.

    `added_tokens` are those of its tokenizer.
    """
    known = set(added_tokens)
    if "<|channel|>" in template or {"<|channel|>", "<|constrain|>"} <= known:
        return _HARMONY, _HARMONY_REASONING
    reasoning = "qwen3" if "</think>" in template else "mistral" if "[/THINK]" in template else None
    for name, mark in (
        ("qwen3_coder", "<function="),
        ("hermes", "<tool_call>"),
        ("mistral", "[TOOL_CALLS]"),
        ("llama4_pythonic", "<|python_start|>"),
        ("llama3_json", "<|python_tag|>"),
        ("llama3_json", '"parameters": '),
    ):
        if mark in template:
            return name, reasoning
    return ("pythonic" if "[func_name" in template else None), reasoning


def _join(events: Sequence[Event]) -> list[Event]:
    """Join neighbours of one kind, so that a delta has few events."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            joined[-1] = ContentDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            joined[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == event.index:
            joined[-1] = ToolCallArguments(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined
