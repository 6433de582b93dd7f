# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars for the vocabulary of one model, with limits for work and memory. It keeps the latest compiled
grammars.

Each constraint is first compiled in a worker of the text process, which may die. If the constraint is wrong, the
request is rejected with an error. The core then compiles the same text again, and has the same limits. The limits apply
to the amount of work, not to the time. Therefore, if the text process could compile a text, the core can compile it,
too. Thread-safe; llguidance releases the GIL while it compiles.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Self

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from quire_engine.structured_outputs.grammar import Grammar
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import InvalidArgument

MAX_CACHE_BYTES = 256 * 2**20
_BYTES_PER_CHARACTER = 200
_MIN_BYTES = 256 * 1024
"""The memory of a compiled grammar is estimated as _MIN_BYTES, plus _BYTES_PER_CHARACTER for each character of its
text."""
MAX_ERROR_CHARS = 300
MAX_LEXER_STATES = 10_000
"""Maximum number of states that the lexer of one grammar can have. The default of llguidance is 250,000 states. A
hostile expression that reaches this maximum takes 3 MB for each sequence.
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
        self._templates: OrderedDict[str, LLMatcher] = OrderedDict()
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
        template = self.compile(grammar_text)
        return Grammar(template.deep_copy(), tuple(begin_after_token_ids), self._eos_token_ids)

    def check(self, grammar_text: str) -> None:
        """Compile a grammar, but do not keep it. Raises the same errors as `create`."""
        self._build_matcher(grammar_text)

    def compile(self, grammar_text: str) -> LLMatcher:
        """Compile a grammar, unless it is cached, and keep it for `create`. Raises the same errors as `create`."""
        with self._lock:
            if (template := self._templates.get(grammar_text)) is not None:
                self._templates.move_to_end(grammar_text)
                return template
        matcher = self._build_matcher(grammar_text)
        with self._lock:
            if grammar_text not in self._templates:
                self._templates[grammar_text] = matcher
                self._num_bytes += _estimate_bytes(grammar_text)
            while self._num_bytes > MAX_CACHE_BYTES and len(self._templates) > 1:
                evicted_text, _ = self._templates.popitem(last=False)
                self._num_bytes -= _estimate_bytes(evicted_text)
        return matcher

    def _build_matcher(self, grammar_text: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar_text, log_level=0, limits=self._limits)
        # The first mask is computed here, because this builds most of the lexer. Every copy of the matcher then starts
        # with this lexer.
        is_empty = not matcher.is_error() and not any(matcher.compute_bitmask())
        if matcher.is_error():
            raise InvalidArgument(f"structured_outputs: {describe_error(matcher)}")
        if is_empty:
            raise InvalidArgument(
                "structured_outputs: the constraint does not allow any token to begin an output; change it"
            )
        return matcher


def describe_error(matcher: LLMatcher) -> str:
    """Return the error message of a matcher, as one line of limited length."""
    return " ".join(str(matcher.get_error()).split())[:MAX_ERROR_CHARS]


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
