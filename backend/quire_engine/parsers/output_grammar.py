# SPDX-License-Identifier: Apache-2.0
"""The grammar of a chat output: reasoning, then tool calls, text or a constrained answer.

The text process builds this grammar if the request requires a tool call, names a function or contains a strict tool. It
also builds the grammar if the request constrains the answer of a reasoning model. The grammar refers to JSON schemas.
It is compiled together with these schemas in the process that checks constraints.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quire_engine.parsers.call_grammar import CallGrammar, Marks
from quire_engine.parsers.formats import harmony
from quire_engine.parsers.formats.tool_formats import TOOL_FORMATS
from quire_engine.parsers.parser_names import HARMONY, REASONING_MARKS, ParserNames
from quire_engine.parsers.tool import Tool
from quire_engine.structured_outputs.composed_constraint import ANSWER, ComposedConstraint, quote
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import InvalidArgument
from quire_spec.protocol.parsed_output import OutputParsing


def compose_grammar(
    names: ParserNames,
    tokenizer: Tokenizer,
    parsing: OutputParsing,
    tools: Sequence[Mapping[str, Any]],
    reasoning: str,
    answer: Mapping[str, Any] | None,
) -> ComposedConstraint | None:
    """Return the constraint of a chat output.

    The result is None if the output has no constraint, or if `answer` alone is its constraint. `reasoning` is the state
    of the reasoning at the end of the prompt, as `reasoning_state` returns it. `answer` is the constraint that the
    request itself contains, as JSON.
    """
    is_required = parsing.tool_choice in ("required", "function")
    assert answer is None or not is_required, "admission rejects a format of an answer that cannot occur"
    if names.is_template:
        _check_without_grammar(names, parsing, tools, answer is not None)
        return None
    calls = _calls(names, tokenizer, parsing, tools, is_required or answer is not None)
    if calls is None and (answer is None or names.reasoning_parser is None):
        return None
    marks = _marks(tokenizer)
    parts = {} if answer is None else {ANSWER: answer}
    # Where the output is searched for calls, text is what the parser does not read as a call.
    rules = [f"TEXT: {marks.text_without(()) if calls is None else calls.text}"]
    bodies = [] if answer is None else [f"@{ANSWER}"]
    if calls is not None:
        rules += calls.rules
        parts |= {name: _json_part(schema) for name, schema in calls.parts.items()}
    if names.is_harmony:
        text = f"@{ANSWER}" if answer is not None else "TEXT"
        prefix = harmony.messages_before_answer(marks, can_have_text=not is_required and answer is None)
        bodies = [] if calls is None else [_required(calls, marks)]
        bodies += [] if is_required else [harmony.answer_message(marks, text)]
    else:
        prefix = _reasoning(names, marks, reasoning, rules)
        if calls is not None:
            bodies = [_required(calls, marks)] if is_required else _optional(calls, marks, rules, bodies)
    return ComposedConstraint("\n".join([f"start: {prefix} ({' | '.join(bodies)})", *rules]), parts)


def _check_without_grammar(
    names: ParserNames, parsing: OutputParsing, tools: Sequence[Mapping[str, Any]], has_answer: bool
) -> None:
    """Raise InvalidArgument if a request needs a grammar. A response template describes how outputs are read, but not
    how they are written."""
    can_call = parsing.tool_choice != "none" and names.tool_call_parser is not None
    reason = "not possible, because the response template of this model gives no grammar of its outputs"
    if can_call and parsing.tool_choice != "auto":
        raise InvalidArgument(f"tool_choice: {parsing.tool_choice} is {reason}; use auto")
    if can_call and any(tool["function"].get("strict") for tool in tools):
        raise InvalidArgument(f"tools: strict is {reason}; leave it out")
    if has_answer and (can_call or names.reasoning_parser is not None):
        raise InvalidArgument(
            f"response_format: {reason}; leave it out, or start the server with another tool_call_parser and "
            "reasoning_parser"
        )


def _calls(
    names: ParserNames,
    tokenizer: Tokenizer,
    parsing: OutputParsing,
    tools: Sequence[Mapping[str, Any]],
    is_needed: bool,
) -> CallGrammar | None:
    """Return the grammar of the calls. Return None in two cases: if calls are not allowed; or if no tool is strict and
    the grammar is not needed."""
    if parsing.function is not None:
        tools = [tool for tool in tools if tool["function"]["name"] == parsing.function]
    is_strict = any(tool["function"].get("strict") for tool in tools)
    if parsing.tool_choice == "none" or not (is_needed or is_strict):
        return None
    assert names.tool_call_parser is not None, "admission rejects tools without a parser"
    enforces_all = parsing.tool_choice != "auto"
    enforced = [Tool.from_request(tool, enforces_all or bool(tool["function"].get("strict"))) for tool in tools]
    # A function that tool_choice names is called only once.
    parallel = parsing.parallel_tool_calls and parsing.function is None
    is_harmony = names.tool_call_parser == HARMONY
    grammar = harmony.call_grammar if is_harmony else TOOL_FORMATS[names.tool_call_parser].grammar
    return grammar(enforced, _marks(tokenizer), parallel)


def _required(calls: CallGrammar, marks: Marks) -> str:
    call = f"{marks.terminal(calls.start) if calls.start else ''} {calls.call}"
    return call if calls.separator is None else f"{call} ({quote(calls.separator) if calls.separator else ''} {call})*"


def _optional(calls: CallGrammar, marks: Marks, rules: list[str], answers: Sequence[str]) -> list[str]:
    """Return the alternatives of an output in which calls are optional.

    If the answer is constrained, an output consists either of calls or of the answer. Otherwise, calls can come between
    texts, provided that the format has a mark before calls.
    """
    if answers:
        return [_required(calls, marks), *answers]
    if not calls.start:
        return [calls.call, "TEXT"]
    until = _until(calls.start, marks, "call_begin", rules)
    return [f"({until} {calls.call})* TEXT" if calls.separator is not None else f"{until} {calls.call} | TEXT"]


def _reasoning(names: ParserNames, marks: Marks, state: str, rules: list[str]) -> str:
    """Return the grammar expression that matches the reasoning before the answer."""
    if names.reasoning_parser not in REASONING_MARKS or state == "done":
        return ""
    reasoning = REASONING_MARKS[names.reasoning_parser]
    thoughts = f'{_until(reasoning.ends[0], marks, "thoughts", rules)} ("\\n\\n" | "\\n")?'
    label = quote(reasoning.label) if reasoning.label else ""
    return thoughts if state == "open" else f"({marks.terminal(reasoning.starts[0])} {label} {thoughts})?"


def _until(mark: str, marks: Marks, name: str, rules: list[str]) -> str:
    """Return the expression for any text that ends with a mark."""
    if mark in marks.special:
        return f"TEXT {marks.terminal(mark)}"
    if mark in marks.token_ids:
        # The parser recognises only the token. The same characters in other tokens would be text.
        rules.append(f"{name.upper()}: TEXT & {marks.text_without([mark])}")
        return f"{name.upper()} {marks.terminal(mark)}"
    rules.append(f"{name}[lazy]: TEXT_BEFORE_{name.upper()} {quote(mark)}")
    rules.append(f"TEXT_BEFORE_{name.upper()}: TEXT")
    return name


def _marks(tokenizer: Tokenizer) -> Marks:
    ids = {text: i for i, text in tokenizer.added_tokens.items()}
    return Marks(ids, frozenset(text for text, i in ids.items() if i in tokenizer.special_token_ids))


def _json_part(schema: Mapping[str, Any]) -> dict[str, Any]:
    # Templates write tools with a space after commas and colons, so a model expects them.
    return {"json": dict(schema), "whitespace_pattern": " ?"}
