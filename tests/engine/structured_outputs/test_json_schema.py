# SPDX-License-Identifier: Apache-2.0
"""Schemas that llguidance accepts and does not enforce are rejected, and rewritten schemas keep their meaning."""

from pathlib import Path

import pytest

from quire_engine import StructuredOutputsParams
from quire_engine.structured_outputs.compiler import GrammarCompiler
from quire_engine.structured_outputs.grammar_text import to_grammar_text
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import InvalidArgument

TOKENIZER = Tokenizer(Path(__file__).parents[3] / "examples/models/tiny")
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, [1])
INTEGER = {"type": "integer"}


def accepts(schema, text, **options):
    constraint = StructuredOutputsParams(json=schema, **options)
    matcher = COMPILER.create(to_grammar_text(constraint)).matcher
    return matcher.consume_tokens(TOKENIZER.encode(text, add_special_tokens=False)) and matcher.is_accepting()


@pytest.mark.parametrize(
    "schema",
    [
        {"minProperties": 2, "additionalProperties": INTEGER},  # "z" twice
        {"type": "object", "required": ["a", "a"], "minProperties": 2},
        {"patternProperties": {"^a": INTEGER}, "additionalProperties": False, "minProperties": 2},
        {"const": "a\x01b"},  # the character would be left out
        {"enum": [["a\x0bb"]]},
        {"properties": {"\x02": INTEGER}},
        {"type": "string", "pattern": "^a\x01b$"},
        {"type": "string", "pattern": r"^a\x01b$"},
        {"type": "string", "pattern": r"^a\u001fb$"},
        {"type": "string", "pattern": r"^a\cAb$"},
        {"patternProperties": {r"^a\x{1}b$": INTEGER}},
        {"$ref": "#/hidden", "hidden": {"const": "\x03"}},
        {"not": {}},
        {"allOf": [{"unevaluatedProperties": False, "$ref": "#/$defs/a"}], "$defs": {"a": {}}},
        {"x-guidance": {"lenient": True}, "uniqueItems": True},
        {"properties": {"a": {"x-guidance": {"lenient": True}, "uniqueItems": True}}},
        {"x-guidance": {"coerce_one_of": True}, "oneOf": [INTEGER, {"type": "number"}]},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"type": "array", "uniqueItems": True},
        {"type": "object", "propertyNames": {"not": {"const": "a"}}},
        {"type": "object", "propertyNames": {"maxLength": 2}, "patternProperties": {"a": {}}},
        {"minProperties": 2.0, "additionalProperties": INTEGER},
    ],
    ids=str,
)
def test_rejects_what_would_not_be_enforced(schema):
    with pytest.raises(InvalidArgument, match="structured_outputs: "):
        accepts(schema, "1")


def test_an_escape_cannot_hide_the_name_of_a_property():
    schema = {"type": "object", "properties": {"a": INTEGER}}
    assert accepts(schema, '{"a":1,"b":"x"}')
    for text in (r'{"a":1,"\u0061":"x"}', '{"a":1,"a":"x"}', '{"a":"x"}', r'{"\u0061":"x"}'):
        assert not accepts(schema, text)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False}, '{"a":1}', '{"b":1}'),
        ({"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": {"const": 2}}, "[1,2]", "[1,3]"),
        ({"type": "array", "items": INTEGER, "unevaluatedItems": False}, "[1,2]", '["a"]'),
        ({"type": "array", "items": INTEGER, "uniqueItems": False}, "[1,1]", "[null]"),
        ({"type": "array", "items": INTEGER, "contains": {}, "minContains": 0}, "[]", "[null]"),
        ({"then": False, "else": False, "const": 1}, "1", "2"),
        ({"properties": {"if": INTEGER, "then": {"const": "x"}}, "type": "object"}, '{"then":"x"}', '{"if":""}'),
        ({"$ref": "#node", "$defs": {"a": {"$dynamicAnchor": "node", "const": 1}}}, "1", "2"),
        ({"type": "string", "format": "password"}, '"x"', "1"),  # an unknown format is an annotation
        ({"type": "string", "format": "date"}, '"2024-02-29"', '"x"'),
        ({"type": "string", "format": "date"}, '"2000-02-29"', '"1900-02-29"'),
        ({"type": "string", "format": "date-time"}, '"2023-02-28T23:59:59Z"', '"2023-02-29T00:00:00Z"'),
        ({"type": "string", "format": "time"}, '"23:59:59Z"', '"23:59:60Z"'),
        ({"type": "string", "format": "date", "pattern": "^2"}, '"2024-12-31"', '"1999-12-31"'),
        ({"type": "object", "properties": {"format": {"format": "path"}}}, '{"format":"x"}', "1"),
        ({**INTEGER, "minimum": -(2**63), "maximum": 2**63 - 1}, "9223372036854775807", "9223372036854775808"),
        ({**INTEGER, "minimum": -(2**63)}, "-9223372036854774784", "-9223372036854775809"),
        ({"type": "number", "minimum": 0, "maximum": 1.7976931348623157e308}, "1.5", "-1"),
        ({"$ref": "#/$defs/Box[int]", "$defs": {"Box[int]": INTEGER}}, "1", '"x"'),
        ({"$ref": "#/$defs/50%{é} a~1b", "$defs": {"50%{é} a/b": INTEGER}}, "1", '"x"'),
        ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, "[1,2]", "[1,2,3]"),
        ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, '"ab"', '"abc"'),
        ({"enum": [1.0, 3]}, "1", "2"),
        ({"type": "array", "maxItems": 1, "uniqueItems": True}, "[1]", "[1,1]"),
        ({"type": "string", "uniqueItems": True, "propertyNames": {"maxLength": 1}}, '"aa"', "[1,1]"),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INTEGER},
         '{"aa":1}', '{"a":""}'),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
         '{"b":1}', '{"c":1}'),
        ({"type": "object", "propertyNames": {"$ref": "#/$defs/E"}, "$defs": {"E": {"const": "a"}}},
         '{"a":1}', '{"c":1}'),
        ({"type": "object", "propertyNames": {"enum": ["a"]}, "properties": {"a": {}, "b": {}}}, '{"a":1}', '{"b":1}'),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, '{"ab":1}', '{"b":1}'),
        ({"type": "object", "propertyNames": {"minLength": 1, "maxLength": 2}}, '{"日本":1}', '{"":1}'),
        ({"type": "object", "propertyNames": {"$ref": "#/$defs/N"}, "$defs": {"N": {"maxLength": 2.0}}},
         '{"ab":1}', '{"abc":1}'),
        ({"type": "string", "format": ["date"], "maxLength": 1}, '"a"', '"ab"'),
    ],
)  # fmt: skip
def test_rewritten_schemas_keep_their_meaning(schema, valid, invalid):
    assert accepts(schema, valid)
    assert not accepts(schema, invalid)


def test_options_of_a_constraint():
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": INTEGER}}}}
    for text in ('{"a":{"b":1,"c":2}}', '{"a":{},"c":2}'):
        assert accepts(schema, text)
        assert not accepts(schema, text, disable_additional_properties=True)
    assert accepts(schema, '{"a":{"b":1}}', disable_additional_properties=True)
    spaced = '{ "a" : {\n}}'
    assert not accepts(schema, spaced)
    assert accepts(schema, spaced, disable_any_whitespace=False)
    assert not accepts(schema, spaced, whitespace_pattern=" ")
    assert accepts(schema, '{ "a": { }}', whitespace_pattern=" ") or accepts(
        schema, '{ "a": {} }', whitespace_pattern=" "
    )
