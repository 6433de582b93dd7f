# SPDX-License-Identifier: Apache-2.0
"""The parser of one chat output. It extracts content, reasoning and tool calls while token ids and text arrive.

    parser = create_parser(ParserNames("hermes", "qwen3"), tokenizer, tools=tools)
    for delta in deltas:
        events = parser.feed(delta.token_ids, delta.text, delta.finished)

The result does not depend on how tokens are grouped into deltas.
"""

import secrets
import string
import uuid
from collections.abc import Callable, Sequence

import msgspec

from quire_engine.parsers.format import CallsOrAnswer, ContentFormat, Format, PlainText
from quire_engine.parsers.formats.harmony import HarmonyFormat
from quire_engine.parsers.formats.tool_formats import TOOL_FORMATS, Tools, names_of
from quire_engine.parsers.lexer import Lexer
from quire_engine.parsers.parser_names import REASONING_MARKS, ParserNames
from quire_engine.parsers.reasoning import ReasoningFormat
from quire_engine.parsers.response_template.response_format import ResponseTemplateFormat
from quire_engine.parsers.response_template.template import load_response_template
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.protocol.parsed_output import Event, ToolCallArguments, ToolCallStart, join_neighbours


class OutputParser:
    """The parser of one output."""

    def __init__(
        self,
        output_format: Format,
        lexer: Lexer,
        new_call_id: Callable[[], str],
        parallel_tool_calls: bool,
    ) -> None:
        """If `parallel_tool_calls` is False, the parser returns only the first call and drops all others."""
        self.num_reasoning_tokens = 0
        """Number of reasoning tokens so far, without the marks."""
        self._format = output_format
        self._lexer = lexer
        self._new_call_id = new_call_id
        self._parallel_tool_calls = parallel_tool_calls

    def feed(self, token_ids: Sequence[int], text: str, finished: bool = False) -> list[Event]:
        """Return the events that result from the next tokens. For `token_ids` and `text` see `Lexer.feed`."""
        events: list[Event] = []
        for lexeme in self._lexer.feed(token_ids, text, finished):
            events.extend(self._format.feed(lexeme))
            if (
                not lexeme.is_mark
                and isinstance(self._format, ReasoningFormat | HarmonyFormat | ResponseTemplateFormat)
                and self._format.in_reasoning
            ):
                self.num_reasoning_tokens += lexeme.num_tokens
        if finished:
            events.extend(self._format.finish())
        return join_neighbours(map(self._with_id, filter(self._is_wanted, events)))

    def _is_wanted(self, event: Event) -> bool:
        return self._parallel_tool_calls or not isinstance(event, ToolCallStart | ToolCallArguments) or not event.index

    def _with_id(self, event: Event) -> Event:
        if not isinstance(event, ToolCallStart) or event.id:
            return event
        return msgspec.structs.replace(event, id=self._new_call_id())


def create_parser(
    names: ParserNames,
    tokenizer: Tokenizer | None,
    prompt_token_ids: Sequence[int] | None = None,
    tools: Tools = (),
    is_reasoning_open: bool = False,
    parallel_tool_calls: bool = True,
    skip_special_tokens: bool = True,
    has_constrained_answer: bool = False,
) -> OutputParser:
    """Return the parser of one output.

    Set `is_reasoning_open` if the prompt ends with the mark that begins the reasoning, and `has_constrained_answer` if
    an output without calls must match a constraint. For the other arguments see `OutputParser` and `Lexer`.
    """
    output_format: Format
    if names.is_template:
        assert tokenizer is not None, "a response template needs the text of the prompt"
        output_format = ResponseTemplateFormat(
            load_response_template(tokenizer.response_template),
            tools,
            tokenizer.decode(prompt_token_ids or [], skip_special_tokens=False),
            names.tool_call_parser is not None,
            names.reasoning_parser is not None,
        )
        # The template describes outputs with all special tokens.
        skip_special_tokens = False
    elif names.is_harmony:
        output_format = HarmonyFormat(names_of(tools))
    else:
        tool_format = TOOL_FORMATS.get(names.tool_call_parser or "")
        answer: ContentFormat = PlainText() if tool_format is None else tool_format.create(tools)
        if has_constrained_answer and not (tool_format is not None and tool_format.can_lead):
            answer = CallsOrAnswer(answer)
        output_format = answer
        if names.reasoning_parser is not None:
            output_format = ReasoningFormat(answer, REASONING_MARKS[names.reasoning_parser], is_reasoning_open)
    lexer = Lexer(output_format.marks, tokenizer, prompt_token_ids, skip_special_tokens)
    new_call_id = _mistral_call_id if names.tool_call_parser == "mistral" else _call_id
    return OutputParser(output_format, lexer, new_call_id, parallel_tool_calls)


def reasoning_state(names: ParserNames, prompt: str, prefill: str = "") -> str:
    """Return the state of the reasoning at the end of a rendered prompt.

    The state is "open" if the reasoning has begun, "done" if it has ended, and "possible" if the prompt ends without a
    mark. `prefill` is the text of the last message if the output continues it.
    """
    marks = REASONING_MARKS.get(names.reasoning_parser or "")
    if marks is None:
        return "possible"
    text = prompt.rstrip()
    begin, end = (max(prefill.rfind(mark) for mark in kind) for kind in (marks.starts, marks.ends))
    if max(begin, end) >= 0:
        return "open" if begin > end else "done"
    if text.endswith(marks.ends):
        return "done"
    # Only some templates of these models write the start mark, but the outputs always begin with reasoning.
    return "open" if marks.is_always_open or text.endswith(marks.starts) else "possible"


def _call_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def _mistral_call_id() -> str:
    """Return a call id that Mistral's chat templates accept: 9 letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
