# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Llama 3: an output that begins with `{` consists of one or more objects `{"name": ..., "parameters":
...}`.

Several calls are separated by semicolons. The calls can be preceded by `<|python_tag|>`.
"""

from collections.abc import Iterator, Sequence

from quire_engine.parsers.call_grammar import CallGrammar, Marks, Tool, json_calls
from quire_engine.parsers.format import LeadingCalls
from quire_engine.parsers.json_call import JsonCallReader
from quire_spec.protocol.parsed_output import Event

_TAG = "<|python_tag|>"


class LlamaJsonFormat(LeadingCalls):
    """The parser of one output."""

    marks = frozenset((_TAG,))
    start_mark = _TAG

    def __init__(self) -> None:
        super().__init__()
        self._call: JsonCallReader | None = None
        self._between = ""
        """Text that has arrived after the last call and before the next one."""

    def _take(self, char: str) -> Iterator[Event]:
        if self._call is None:
            if char == "{":
                self._call = JsonCallReader(self._num_calls)
                yield from self._call.feed(char)
            elif char.isspace() or (char in ";," and self._num_calls):
                self._between += char
            else:
                self._is_content = True
                yield from self._content.write(self._between + char)
                self._between = ""
            return
        call = self._call
        yield from call.feed(char)
        self._num_calls += call.started and call.done
        if call.failed or (call.done and not call.started):
            yield from self._end_as_content()
        elif call.done:
            self._call, self._between = None, ""
            self._content.cut()

    def finish(self) -> Iterator[Event]:
        """Return the withheld text."""
        if self._call is not None:
            yield from self._end_as_content()
        yield from self._content.finish()

    def _end_as_content(self) -> Iterator[Event]:
        call, self._call = self._call, None
        self._is_content = True
        if call is not None and not call.started:
            yield from self._content.write(self._between + call.raw)
        self._between = ""


def call_grammar(tools: Sequence[Tool], marks: Marks, parallel: bool) -> CallGrammar:
    """Return the grammar of calls."""
    call, rules, parts = json_calls(tools, "parameters")
    return CallGrammar("", f'{call} ("; " {call})*' if parallel else call, None, rules, parts)
