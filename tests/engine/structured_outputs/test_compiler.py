# SPDX-License-Identifier: Apache-2.0
"""Caches of compiled grammars and of checked constraints stay within their limits."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quire_engine import StructuredOutputsParams
from quire_engine.requests.processor import run_without_waiting
from quire_engine.structured_outputs import compiler as compiler_module
from quire_engine.structured_outputs.checker import GrammarChecker
from quire_engine.structured_outputs.compiler import GrammarCompiler
from quire_engine.structured_outputs.grammar_text import to_grammar_text
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import QuireError

TINY = Path(__file__).parents[3] / "examples/models/tiny"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY)


def grammar_text(**constraint):
    return to_grammar_text(StructuredOutputsParams(**constraint))


def test_compiled_grammars_are_bounded(tokenizer, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_CACHE_BYTES", 3 * compiler_module._MIN_BYTES)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [1])
    texts = [grammar_text(choice=[f"text {i}"]) for i in range(6)]
    first = compiler.compile(texts[0])
    for text in texts[1:]:
        assert compiler.compile(text) is compiler.compile(text)
    assert len(compiler._compiled) <= 3
    assert compiler.compile(texts[0]) is not first


def test_copies_are_independent_and_rewind_nothing(tokenizer):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [1])
    text = grammar_text(regex="ab")
    one, other = compiler.create(text), compiler.create(text)
    [a], [b] = (tokenizer.encode(letter, add_special_tokens=False) for letter in "ab")
    assert one.accept_token(a) and one.accept_token(b) and one.is_terminated
    assert not other.accept_token(b) and "exclude all tokens" in other.error
    assert one.accept_token(1)


def test_a_grammar_begins_after_its_tokens(tokenizer):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [1])
    grammar = compiler.create(grammar_text(choice=["a"]), [7, 7, 8])
    assert list(grammar.excluded_token_ids) == [1]
    for token in (7, 7, 7, 8):
        assert not grammar.has_begun
        assert grammar.accept_token(token)
    assert grammar.has_begun and not grammar.is_terminated and list(grammar.excluded_token_ids) == []
    [a] = tokenizer.encode("a", add_special_tokens=False)
    assert grammar.accept_token(a) and grammar.is_terminated


def test_a_vocabulary_larger_than_the_tokenizer(tokenizer):
    """Models pad their vocabulary; the padding is never allowed."""
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size + 70, [1])
    mask = compiler.create(grammar_text(regex="(?s:.*)")).matcher.compute_bitmask()
    allowed = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]
    assert max(allowed) < tokenizer.vocab_size and len(allowed) > tokenizer.vocab_size - 150


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(TINY, 2048, [1], max_cache_bytes=50_000)
    yield checker
    await checker.aclose()


async def test_checked_constraints_are_bounded(checker: GrammarChecker):
    """Hundreds of schemas, one at a time; a worker answers each, and repeated ones come from the cache."""
    for i in range(300):
        await checker.check(StructuredOutputsParams(json={"properties": {f"name{i}": {"type": "string"}}}))
    with pytest.raises(QuireError) as first:
        await checker.check(StructuredOutputsParams(regex="("))
    # The error is in the cache, too.
    with pytest.raises(QuireError) as second:
        run_without_waiting(checker.check(StructuredOutputsParams(regex="(")))
    assert str(first.value) == str(second.value)
    assert checker.num_cached_bytes <= 50_000


async def test_a_cancelled_request_does_not_end_the_check_of_another(checker: GrammarChecker):
    tasks = [asyncio.create_task(checker.check(StructuredOutputsParams(regex="a"))) for _ in range(2)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert isinstance(await tasks[1], str) and tasks[0].cancelled()


async def test_checks_of_cancelled_requests_delay_no_other(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch):
    """A client could otherwise disconnect, and leave more checks in the queue than it could have open requests."""
    await checker.check(StructuredOutputsParams(regex="first"))
    num_asked, ask = 0, checker._workers.ask

    async def ask_in_turn(message: dict[str, object]) -> dict[str, object]:
        nonlocal num_asked
        await asyncio.sleep(0.01)
        num_asked += 1
        return await ask(message)

    monkeypatch.setattr(checker._workers, "ask", ask_in_turn)
    tasks = [asyncio.create_task(checker.check(StructuredOutputsParams(regex=f"b{i}"))) for i in range(50)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # A request with the constraint of a cancelled one starts a new check.
    assert isinstance(await checker.check(StructuredOutputsParams(regex="b7")), str)
    assert num_asked == 1


def test_large_choices_compile_and_run(tokenizer):
    """As separate terminals, 10,000 strings took seconds, and failed at the second token."""
    words = [f"{i * 7919 % 99991:05d} word" for i in range(10_000)]
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [1])
    matcher = compiler.create(grammar_text(choice=words)).matcher
    for token in tokenizer.encode(words[1234], add_special_tokens=False):
        assert matcher.compute_bitmask() and matcher.consume_token(token)
    assert matcher.is_accepting() and not matcher.is_error()
