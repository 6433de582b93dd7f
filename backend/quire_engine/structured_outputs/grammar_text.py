# SPDX-License-Identifier: Apache-2.0
"""Converts a constraint to its grammar text, in llguidance's notation.

The text process checks this text, and the core compiles it. The module consists of pure functions. They run in a
process that may die, because a hostile constraint can make them slow.
"""

import json
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from quire_engine.structured_outputs.composed_constraint import ANSWER, ComposedConstraint, quote
from quire_engine.structured_outputs.json_schema import prepare_schema
from quire_spec.engine.structured_outputs import StructuredOutputsParams
from quire_spec.errors import InvalidArgument

MAX_TAGS = 256
"""Maximum number of structures of a structural tag."""
_MAX_TAG_CHARS = 1024


def document_to_grammar_text(document: dict[str, Any]) -> str:
    """Return the grammar of a constraint, given as the result of its `to_mapping`. Raises the errors of
    `to_grammar_text`."""
    if "lark" in document:
        return compose_grammar_text(ComposedConstraint(**document))
    return to_grammar_text(StructuredOutputsParams.from_mapping(document))


def to_grammar_text(params: StructuredOutputsParams) -> str:
    """Return the grammar of a constraint.

    Raises:
        InvalidArgument: the constraint uses something that no grammar can enforce, or is malformed.
    """
    if params.json is not None:
        assert not isinstance(params.json, str), "a text was parsed"
        return _json_grammar(params.json, params)
    if params.json_object:
        return _json_grammar({"type": "object"}, params)
    if params.regex is not None:
        return str(LLMatcher.grammar_from_regex(params.regex))
    if params.choice is not None:
        # All strings are in one terminal, because 10,000 separate terminals would take seconds to compile.
        return str(LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(quote, params.choice))))
    if params.grammar is not None:
        return _parse_grammar(params.grammar)
    assert isinstance(params.structural_tag, dict), "exactly one constraint is set"
    return _structural_tag_grammar(params.structural_tag, params)


def compose_grammar_text(constraint: ComposedConstraint) -> str:
    """Return the grammar of a composed constraint. Raises the same errors as `to_grammar_text`."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": constraint.lark}]
    for name, part in constraint.parts.items():
        try:
            text = to_grammar_text(StructuredOutputsParams.from_mapping(part))
        except InvalidArgument as error:
            if name != ANSWER:
                reason = str(error).removeprefix("sampling parameter ").removeprefix("'structured_outputs': ")
                raise InvalidArgument(f"tools: the parameters of a tool are not supported: {reason}") from None
            raise
        # The grammar text of a choice, a grammar or a structural tag is in Lark. The grammar text of a schema or a
        # regular expression is in JSON.
        [grammar] = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
        grammars.append({**grammar, "name": name})
    return json.dumps({"grammars": grammars})


def _json_options(params: StructuredOutputsParams) -> Any:
    """Return llguidance's options for the JSON text that a constraint allows. All options are set, so that a schema can
    never change them.
    """
    return {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": not params.disable_any_whitespace or params.whitespace_pattern is not None,
        "whitespace_pattern": params.whitespace_pattern,
        "coerce_one_of": False,
        "lenient": False,
        # With other escapes, the output could spell the name of a property differently. The property would then count
        # as an additional property, and its schema would not apply.
        "json_allowed_escapes": 'nrtbf"\\',
    }


def _json_grammar(schema: dict[str, Any] | bool, params: StructuredOutputsParams) -> str:
    prepared = prepare_schema(schema, params.disable_additional_properties)
    return str(LLMatcher.grammar_from_json_schema(json.dumps(prepared), overrides=_json_options(params)))


def _parse_grammar(grammar: str) -> str:
    try:
        return str(LLMatcher.grammar_from_lark(any_to_lark(grammar)))
    except Exception as error:  # the converter raises nothing more precise
        raise InvalidArgument(f"structured_outputs: grammar is neither Lark nor GBNF: {str(error)[:200]}") from None


def _structural_tag_grammar(tag: dict[str, Any], params: StructuredOutputsParams) -> str:
    """Return a grammar of free text in which each trigger starts one of the structures.

    Source: `StructTag.to_grammar` of llguidance, which supports only one structure per trigger.
    """
    triggers, structures = _read_tag(tag)
    lines = ["%llguidance {}", "start: (" + " | ".join(f"tag_{i}" for i in range(len(triggers))) + ")* tag_end"]
    lines += ["tag_end: TAG_TEXT", r"TAG_TEXT: /(.|\n)*/"]
    options = _json_options(params)
    for i, trigger in enumerate(triggers):
        bodies = []
        for begin, schema, end in structures:
            if begin.startswith(trigger):
                document = prepare_schema(schema, params.disable_additional_properties)
                document = {"x-guidance": options, **document}
                parts = [begin[len(trigger) :], end]
                head, tail = (quote(part) if part else "" for part in parts)
                bodies.append(f"{head} %json {json.dumps(document)} {tail}")
        lines.append(f"tag_{i}_trigger[lazy]: TAG_TEXT {quote(trigger)}")
        lines += [f"tag_{i}: tag_{i}_trigger (" + " | ".join(f"tag_{i}_{j}" for j in range(len(bodies))) + ")"]
        lines += [f"tag_{i}_{j}: {body}" for j, body in enumerate(bodies)]
    return str(LLMatcher.grammar_from_lark("\n".join(lines)))


def _read_tag(tag: dict[str, Any]) -> tuple[list[str], list[tuple[str, Any, str]]]:
    """Return the triggers of a structural tag, and for each structure its begin, its schema and its end.

    Raises:
        InvalidArgument: the tag is malformed, or exceeds a limit.
    """
    triggers, structures = tag.get("triggers"), tag.get("structures")
    if not (isinstance(triggers, list) and triggers and isinstance(structures, list) and structures):
        raise _tag_error("give lists 'structures' and 'triggers', each with at least one entry")
    if len(triggers) > MAX_TAGS or len(structures) > MAX_TAGS:
        raise _tag_error(f"at most {MAX_TAGS} structures and at most {MAX_TAGS} triggers are allowed")
    if not all(isinstance(trigger, str) and 0 < len(trigger) <= _MAX_TAG_CHARS for trigger in triggers):
        raise _tag_error(f"each trigger must be a string of 1 to {_MAX_TAG_CHARS} characters")
    parsed: list[tuple[str, Any, str]] = []
    for i, structure in enumerate(structures):
        if not isinstance(structure, dict):
            raise _tag_error(f"structures[{i}] must be an object with begin, schema and end")
        begin, end, schema = structure.get("begin", ""), structure.get("end", ""), structure.get("schema", {})
        if not all(isinstance(text, str) and len(text) <= _MAX_TAG_CHARS for text in (begin, end)):
            raise _tag_error(f"structures[{i}]: begin and end must be strings of at most {_MAX_TAG_CHARS} characters")
        if not isinstance(schema, dict | bool):
            raise _tag_error(f"structures[{i}]: schema must be an object")
        if not any(begin.startswith(trigger) for trigger in triggers):
            raise _tag_error(
                f"structures[{i}]: begin does not start with any of the triggers; add a trigger with which it starts"
            )
        parsed.append((begin, schema, end))
    for trigger in triggers:
        if not any(begin.startswith(trigger) for begin, _, _ in parsed):
            raise _tag_error(f"no structure begins with the trigger {trigger[:80]!r}; leave the trigger out")
    return triggers, parsed


def _tag_error(problem: str) -> InvalidArgument:
    return InvalidArgument(f"structured_outputs: structural_tag: {problem}")
