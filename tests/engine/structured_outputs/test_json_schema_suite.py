# SPDX-License-Identifier: Apache-2.0
"""JSON-Schema-Test-Suite: a schema that is served accepts each valid value in some spelling, and no invalid value."""

from pathlib import Path

import pytest
from support import json_schema_suite
from support.json_schema_suite import spellings

from quire_engine import StructuredOutputsParams
from quire_engine.structured_outputs.compiler import GrammarCompiler
from quire_engine.structured_outputs.grammar import Grammar
from quire_engine.structured_outputs.grammar_text import to_grammar_text
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import InvalidArgument

MIN_SERVED = 205
TINY = Path(__file__).parents[3] / "examples/models/tiny"


@pytest.mark.timeout(300)
def test_suite():
    try:
        groups = list(json_schema_suite.groups())
    except OSError as error:
        pytest.skip(str(error))
    tokenizer = Tokenizer(TINY)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [1])

    def accepts(grammar: Grammar, text: str) -> bool:
        matcher = grammar.matcher.deep_copy()
        return matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False)) and matcher.is_accepting()

    served, invalid_accepted, valid_rejected = 0, [], []
    for name, group in groups:
        try:
            grammar = compiler.create(to_grammar_text(StructuredOutputsParams(json=group["schema"])))
        except InvalidArgument:
            continue
        served += 1
        for case in group["tests"]:
            if any(accepts(grammar, text) for text in spellings(case["data"])) != case["valid"]:
                (valid_rejected if case["valid"] else invalid_accepted).append((name, case["description"]))
    assert invalid_accepted == []
    assert valid_rejected == []
    assert served >= MIN_SERVED
