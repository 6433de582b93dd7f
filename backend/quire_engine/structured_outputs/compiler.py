# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars for the vocabulary of one model, with limits for work and memory. It keeps the latest compiled
grammars.

Each constraint is first compiled in a worker of the text process, which may die. If the constraint is wrong, the
request is rejected with an error. The core then compiles the same text again, and has the same limits. The limits apply
to the amount of work, not to the time. Therefore, if the text process could compile a text, the core can compile it,
too. Thread-safe; llguidance releases the GIL while it compiles.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Self

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from quire_engine.structured_outputs.compiled_grammar import CompiledGrammar, MatcherSource, describe_error
from quire_engine.structured_outputs.grammar import Grammar
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import InvalidArgument

MAX_CACHE_BYTES = 256 * 2**20
_BYTES_PER_CHARACTER = 200
_MIN_BYTES = 2 * 2**20
"""The memory of a compiled grammar is estimated as _MIN_BYTES, plus _BYTES_PER_CHARACTER for each character of its
text. Few lexers have as many states as MAX_LEXER_STATES allows."""
MAX_LEXER_STATES = 50_000
"""Maximum number of states that a lexer can have. The default of llguidance is 250,000 states. This many states take
about 20 MB. A string with `maxLength` takes about 3 states per character. A lexer that reaches the maximum is replaced,
so this is not a limit for the length of an output.
"""
STEP_LEXER_FUEL = 100_000
"""Maximum amount of work for one mask. It is half of llguidance's default, and takes about 7 ms. If a mask took longer,
it would delay the other sequences of the step."""


class GrammarCompiler:
    """Compiles grammars for a tokenizer.

    Raises:
        InvalidArgument: the model has no end-of-sequence token, so no output could end where its grammar ends.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`vocab_size` is the size of the model's vocabulary, which can be larger than the tokenizer's."""
        if not eos_token_ids:
            raise InvalidArgument(
                "structured_outputs: not possible, because the model has no end-of-sequence token; leave it out"
            )
        self._eos_token_ids = sorted(eos_token_ids)
        wrapper = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, self._eos_token_ids[0]))
        self._tokenizer = LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=self._eos_token_ids)
        self._limits = LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES, step_lexer_fuel=STEP_LEXER_FUEL, verbose_errors=False
        )
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._num_bytes = 0

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> Self:
        """Return the compiler for a checkpoint.

        Raises:
            InvalidArgument: the checkpoint has no tokenizer, or the model has no end-of-sequence token.
        """
        tokenizer = Tokenizer.from_folder(folder)
        if tokenizer is None:
            raise InvalidArgument("structured_outputs: not possible, because the model has no tokenizer; leave it out")
        return cls(tokenizer, vocab_size, eos_token_ids)

    def create(self, grammar_text: str, begin_after_token_ids: Collection[int] = ()) -> Grammar:
        """Return the grammar of a new sequence. This is slow unless the grammar is cached.

        Raises:
            InvalidArgument: the grammar is wrong or exceeds a limit, or no token can begin its output.
        """
        source = MatcherSource(self.compile(grammar_text), self.compile, self._build)
        return Grammar(source, tuple(begin_after_token_ids), self._eos_token_ids)

    def check(self, grammar_text: str) -> None:
        """Compile a grammar, but do not keep it. Raises the same errors as `create`."""
        self._build(grammar_text)

    def compile(self, grammar_text: str) -> CompiledGrammar:
        """Compile a grammar, unless it is cached, and keep it for `create`. Raises the same errors as `create`."""
        with self._lock:
            if (cached := self._compiled.get(grammar_text)) is not None and not cached.is_exhausted:
                self._compiled.move_to_end(grammar_text)
                return cached
        compiled = self._build(grammar_text)
        with self._lock:
            if self._compiled.pop(grammar_text, None) is None:
                self._num_bytes += _estimate_bytes(grammar_text)
            self._compiled[grammar_text] = compiled
            while self._num_bytes > MAX_CACHE_BYTES and len(self._compiled) > 1:
                evicted_text, _ = self._compiled.popitem(last=False)
                self._num_bytes -= _estimate_bytes(evicted_text)
        return compiled

    def _build(self, grammar_text: str) -> CompiledGrammar:
        start = time.thread_time()
        matcher = LLMatcher(self._tokenizer, grammar_text, log_level=0, limits=self._limits)
        compiled = CompiledGrammar(grammar_text, matcher, time.thread_time() - start)
        if matcher.is_error():
            raise InvalidArgument(f"structured_outputs: {describe_error(matcher)}")
        if compiled.first_token_id is None:
            raise InvalidArgument(
                "structured_outputs: the constraint does not allow any token to begin an output; change it"
            )
        return compiled


def _estimate_bytes(grammar_text: str) -> int:
    return _MIN_BYTES + _BYTES_PER_CHARACTER * len(grammar_text)


class _Vocabulary:
    """The bytes of each token, in the form that llguidance reads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes.bytes_of(i) for i in range(vocab_size)]
        self.special_token_ids = sorted(i for i in tokenizer.special_token_ids if i < vocab_size)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("the tokenizer encodes text only")
        return self._tokenizer.encode(text, add_special_tokens=False)
