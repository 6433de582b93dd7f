# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Llama 3: objects `{"name": ..., "parameters": ...}`, which can be preceded by `<|python_tag|>`.

Several calls are separated by semicolons. Text can come before a call. Without the mark, an object is a call only if it
names a tool of the request and has arguments, because an answer can be JSON, too.
"""

from collections.abc import Collection, Iterator, Sequence

from quire_engine.parsers.call_grammar import CallGrammar, Marks, json_calls
from quire_engine.parsers.format import LeadingCalls
from quire_engine.parsers.json_call import CALL_KEYS, JsonCallReader
from quire_engine.parsers.json_reader import JsonValueReader
from quire_engine.parsers.lexer import Lexeme
from quire_engine.parsers.tool import Tool
from quire_spec.protocol.parsed_output import Event

_TAG = "<|python_tag|>"


class LlamaJsonFormat(LeadingCalls):
    """The parser of one output."""

    def __init__(self, known_names: Collection[str] | None = None) -> None:
        """An object without the mark is a call only if its name is one of `known_names`. If that is None, it can have
        any name."""
        super().__init__(_TAG)
        self._known_names = known_names
        self._call: JsonCallReader | None = None
        self._skipped: JsonValueReader | None = None
        """Reader of another object than a call. Calls are not searched inside it."""
        self._between = ""
        """Text that has arrived after the last call and before the next one."""

    @property
    def _in_string(self) -> bool:
        return self._call is not None and self._call.in_string

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme."""
        is_text = not lexeme.is_mark and "{" not in lexeme.text and self._call is None and self._skipped is None
        if is_text and not self._num_calls and (stripped := lexeme.text.rstrip()):
            self._is_marked = False
            text, self._between = self._between + stripped, lexeme.text[len(stripped) :]
            yield from self._content.write(text)
        else:
            yield from super().feed(lexeme)

    def _take(self, char: str) -> Iterator[Event]:
        if self._call is not None:
            yield from self._read_call(self._call, char)
        elif self._skipped is not None:
            self._skipped.feed(char)
            if self._skipped.done or self._skipped.failed:
                self._skipped = None
            yield from self._content.write(char)
        elif char == "{":
            is_certain = self._is_marked or self._num_calls
            self._call = JsonCallReader(self._num_calls, None if is_certain else self._known_names)
            yield from self._call.feed(char)
        elif char.isspace() or (char in ";," and self._num_calls):
            self._between += char
        else:
            self._is_marked = False
            yield from self._content.write(self._between + char)
            self._between = ""

    def _read_call(self, call: JsonCallReader, char: str) -> Iterator[Event]:
        yield from call.feed(char)
        if call.started and (call.done or call.failed):
            self._num_calls += 1
            self._call, self._between = None, ""
            self._content.cut()
        elif call.done or call.failed:
            yield from self._give_up()

    def _give_up(self) -> Iterator[Event]:
        call, self._call, self._is_marked = self._call, None, False
        if call is None or call.started:
            return
        self._skipped = JsonValueReader()
        for char in call.raw:
            self._skipped.feed(char)
        if self._skipped.done or self._skipped.failed:
            self._skipped = None
        text, self._between = self._between + call.raw, ""
        yield from self._content.write(text)

    def finish(self) -> Iterator[Event]:
        """Return the withheld text."""
        yield from self._give_up()
        if not self._num_calls:
            yield from self._content.write(self._between)
        yield from self._content.finish()


def call_grammar(tools: Sequence[Tool], marks: Marks, parallel: bool) -> CallGrammar:
    """Return the grammar of calls."""
    call, rules, parts = json_calls(tools, "parameters")
    text = marks.text_without([_TAG], rf"\{{\s*\"({'|'.join(CALL_KEYS)})\"")
    return CallGrammar("", f'{call} ("; " {call})*' if parallel else call, None, rules, parts, text)
