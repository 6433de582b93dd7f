# SPDX-License-Identifier: Apache-2.0
"""Limits of a compiled grammar count for one sequence: a sequence that reaches them disturbs no other one."""

import json
import random
from pathlib import Path

import jsonschema
import pytest

from quire_engine import LLM, SamplingParams, StructuredOutputsParams
from quire_engine.structured_outputs import compiled_grammar, compiler
from quire_engine.structured_outputs.compiler import GrammarCompiler
from quire_engine.structured_outputs.grammar import Grammar
from quire_engine.structured_outputs.grammar_text import to_grammar_text
from quire_engine.tokenization.tokenizer import Tokenizer

TINY = Path(__file__).parents[3] / "examples/models/tiny"
TOKENIZER = Tokenizer(TINY)
EOS = 1
WORDS = {i for i in range(TOKENIZER.vocab_size) if TOKENIZER.decode([i]).strip().isalpha()}
LONG = {"type": "string", "maxLength": 5000}


def make_compiler(monkeypatch: pytest.MonkeyPatch, max_states: int) -> GrammarCompiler:
    monkeypatch.setattr(compiler, "MAX_LEXER_STATES", max_states)
    return GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, [EOS])


def write(grammar: Grammar, num_tokens: int, rng: random.Random) -> list[int]:
    """Sample words, as the engine does: a mask, and then a token of the mask."""
    written = []
    for _ in range(num_tokens):
        mask = int.from_bytes(grammar.matcher.compute_bitmask(), "little")
        if grammar.matcher.is_error():
            if grammar.renew_matcher():
                continue
            return written
        allowed = [i for i in range(TOKENIZER.vocab_size) if mask >> i & 1]
        token = rng.choice([i for i in allowed if i in WORDS] or allowed)
        assert grammar.accept_token(token), grammar.error
        written.append(token)
    return written


def test_sequences_of_one_schema_continue_when_their_lexer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, rng = make_compiler(monkeypatch, 5000), random.Random(0)
    text = to_grammar_text(StructuredOutputsParams(json=LONG))
    first = grammars.compile(text)
    greedy, other = grammars.create(text), grammars.create(text)
    outputs: dict[str, list[int]] = {"greedy": write(greedy, 1, rng), "other": write(other, 1, rng)}
    num_rounds = 0
    while not first.is_exhausted:
        outputs["greedy"] += write(greedy, 20, rng)
        num_rounds += 1
    assert num_rounds > 1
    outputs["other"] += write(other, 100, rng)
    outputs["greedy"] += write(greedy, 100, rng)
    outputs["late"] = write(late := grammars.create(text), 100, rng)
    assert grammars.compile(text) is not first
    [quote] = TOKENIZER.encode('"', add_special_tokens=False)
    for name, grammar in {"greedy": greedy, "other": other, "late": late}.items():
        assert grammar.accept_token(quote) and grammar.is_terminated and grammar.accept_token(EOS), grammar.error
        assert len(outputs[name]) >= 100
        jsonschema.validate(json.loads(TOKENIZER.decode([*outputs[name], quote])), LONG)


def test_an_output_that_alone_exceeds_the_limit_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the output is not accepted, so it does not look complete."""
    grammars, rng = make_compiler(monkeypatch, 2000), random.Random(0)
    text = to_grammar_text(StructuredOutputsParams(json=LONG))
    greedy, other = grammars.create(text), grammars.create(text)
    written = write(greedy, 3000, rng)
    assert 200 < len(written) < 3000 and greedy.matcher.is_error()
    assert not greedy.accept_token(EOS) and "too complex for this output" in greedy.error
    assert len(write(other, 150, rng)) >= 149 and not other.error


@pytest.mark.parametrize("max_states", [400, 50_000])
def test_outputs_of_the_engine_are_complete_or_errors(monkeypatch: pytest.MonkeyPatch, max_states: int) -> None:
    monkeypatch.setattr(compiler, "MAX_LEXER_STATES", max_states)
    renewed = []
    renew = compiled_grammar.MatcherSource.renew
    monkeypatch.setattr(
        compiled_grammar.MatcherSource, "renew", lambda *args: renewed.append(renew(*args)) or renewed[-1]
    )
    schema = {"type": "array", "items": {"type": "string", "minLength": 5, "maxLength": 60}, "minItems": 2}
    schema["maxItems"] = 3
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    for fields in ({"async_scheduling": False}, drafts):
        llm = LLM(model=TINY, device="cpu", max_model_len=512, kv_cache_memory_bytes=2**24, **fields)
        params = SamplingParams(max_tokens=400, n=4, seed=1, structured_outputs=StructuredOutputsParams(json=schema))
        for output in llm.generate(["Once upon a time"] * 2, params, use_tqdm=False):
            for completion in output.outputs:
                assert completion.finish_reason == "stop"
                jsonschema.validate(json.loads(completion.text), schema)
    assert any(matcher is not None for matcher in renewed) == (max_states == 400)


def test_an_output_that_cannot_be_completed_is_an_error() -> None:
    """No text matches this grammar, but llguidance allows its beginning."""
    grammar = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, [EOS]).create(
        to_grammar_text(StructuredOutputsParams(grammar='start: "a" b\nb: b'))
    )
    assert write(grammar, 5, random.Random(0)) == TOKENIZER.encode("a", add_special_tokens=False)
    assert not grammar.accept_token(EOS)
    assert grammar.error == "structured_outputs: no text matches the rest of the constraint; change it"
