# SPDX-License-Identifier: Apache-2.0
"""A compiled grammar, and the matchers that sequences get from it.

Copies of a matcher share one lexer. The lexer adds states while masks are computed, never removes them, and fails for
all copies once it has used up a limit. A sequence whose lexer has failed therefore continues with another one: it
repeats its tokens, which takes about 3 us per token. The limits thus apply to one sequence, not to all sequences
together.
"""

import time
from collections.abc import Callable, Sequence

from llguidance import LLMatcher

from quire_spec.errors import InvalidArgument

MAX_ERROR_CHARS = 300
_MAX_RENEWAL_S = 0.25
"""A grammar that takes longer to compile is not compiled again for a running sequence, because all sequences would wait
for it."""
_TOKENS_PER_RENEWAL = 256
"""From the third lexer on, a sequence gets another lexer only after it has written this number of tokens."""
_REPEATED_TOKENS = 32
"""After this number of repeated tokens a mask is computed, because a mask resets the limit for the work of a step."""


class CompiledGrammar:
    """A compiled grammar. Its copies share its lexer."""

    def __init__(self, text: str, matcher: LLMatcher, compile_s: float) -> None:
        """`matcher` is in its initial state. It took `compile_s` seconds of CPU time."""
        self.text = text
        self._matcher = matcher
        start = time.thread_time()
        # The first mask builds most of the lexer.
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        self.first_token_id = None if matcher.is_error() or not mask else (mask & -mask).bit_length() - 1
        """A token that can begin an output; None if there is none."""
        self.compile_s = compile_s + time.thread_time() - start
        """CPU time of the compilation and of the first mask."""

    def copy(self) -> LLMatcher:
        """Return a matcher in its initial state."""
        return self._matcher.deep_copy()

    @property
    def is_exhausted(self) -> bool:
        """True if the lexer has failed. It then rejects the token that it has accepted before."""
        return self.first_token_id is not None and not self.copy().try_consume_tokens([self.first_token_id])


class MatcherSource:
    """The matchers of one sequence."""

    def __init__(
        self,
        compiled: CompiledGrammar,
        compile_shared: Callable[[str], CompiledGrammar],
        compile_own: Callable[[str], CompiledGrammar],
    ) -> None:
        """`compile_shared` returns a grammar that sequences share. `compile_own` returns a new one."""
        self._compiled = compiled
        self._compile_shared, self._compile_own = compile_shared, compile_own
        self._num_renewals = self._num_tokens = 0
        """Number of renewals, and number of tokens at the last one."""

    @property
    def is_exhausted(self) -> bool:
        """True if the lexer has failed."""
        return self._compiled.is_exhausted

    def create(self) -> LLMatcher:
        """Return a matcher in its initial state."""
        return self._compiled.copy()

    def renew(self, token_ids: Sequence[int]) -> LLMatcher | None:
        """Return a matcher with another lexer that has accepted these tokens. Return None if the lexer has not failed,
        or if another lexer fails, too."""
        old = self._compiled
        if (
            old.compile_s > _MAX_RENEWAL_S
            or (self._num_renewals >= 2 and len(token_ids) - self._num_tokens < _TOKENS_PER_RENEWAL)
            or not self.is_exhausted
        ):
            return None
        self._num_renewals, self._num_tokens = self._num_renewals + 1, len(token_ids)
        try:
            # The first time, all sequences of the failed lexer share the next one. If one of them uses up that one as
            # well, each gets its own.
            compile_again = self._compile_shared if self._num_renewals == 1 else self._compile_own
            self._compiled = compile_again(old.text)
        except InvalidArgument:
            return None
        matcher = self.create()
        for start in range(0, len(token_ids), _REPEATED_TOKENS):
            repeated = list(token_ids[start : start + _REPEATED_TOKENS])
            if matcher.try_consume_tokens(repeated) < len(repeated):
                return None
            matcher.compute_bitmask()
        return matcher


def describe_error(matcher: LLMatcher) -> str:
    """Return the error message of a matcher, as one line of limited length."""
    text = " ".join(str(matcher.get_error()).replace("<non-verbose/>", "").split())
    if "NoExtensionBias" in text:
        return "no text matches the rest of the constraint; change it"
    return text[:MAX_ERROR_CHARS]
