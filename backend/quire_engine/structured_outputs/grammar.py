# SPDX-License-Identifier: Apache-2.0
"""State of one sequence's grammar: which tokens can come next.

The scheduler advances the grammar with each token of the sequence, and the model runner reads its masks. The methods of
the grammar have the names and meanings of vLLM's StructuredOutputGrammar. The thinking budget is a part of the grammar,
because it also decides which tokens can come next.
"""

from collections.abc import Collection, Sequence

from quire_engine.structured_outputs.compiled_grammar import MatcherSource, describe_error
from quire_engine.structured_outputs.thinking_budget import ThinkingBudget


class Grammar:
    """The grammar of one sequence."""

    __slots__ = (
        *("_eos_token_ids", "_last_token_ids", "_pending_begin", "_source", "_token_ids"),
        *("error", "matcher", "thinking_budget"),
    )

    def __init__(
        self,
        source: MatcherSource | None,
        begin_after_token_ids: tuple[int, ...] = (),
        eos_token_ids: Collection[int] = (),
        thinking_budget: ThinkingBudget | None = None,
    ) -> None:
        """`source` creates the matchers of this sequence. If it is None, any output is allowed."""
        self._source = source
        self.matcher = None if source is None else source.create()
        self._token_ids: list[int] = []
        """Tokens that the matcher has accepted."""
        self.thinking_budget = thinking_budget
        self._pending_begin = begin_after_token_ids
        self._last_token_ids: list[int] = []
        self._eos_token_ids = eos_token_ids
        self.error = ""
        """Reason why the sequence cannot continue; empty while it can."""

    @property
    def has_begun(self) -> bool:
        """True if the constrained part of the output has begun."""
        return not self._pending_begin

    @property
    def is_terminated(self) -> bool:
        """True if only an end-of-sequence token can come next."""
        return self.has_begun and self.matcher is not None and self.matcher.is_stopped()

    @property
    def forced_token_id(self) -> int | None:
        """The only token that the thinking budget allows; None if it allows all tokens.

        The end mark is not forced where the constraint does not allow it, which is inside a character of UTF-8.
        """
        token_id = None if self.thinking_budget is None else self.thinking_budget.forced_token_id
        if token_id is not None and self.has_begun and self.matcher is not None:
            return token_id if self.matcher.validate_tokens([token_id]) else None
        return token_id

    @property
    def excluded_token_ids(self) -> Collection[int]:
        """Tokens that are not allowed before the grammar begins: the tokens that end the sequence."""
        return () if self.has_begun else self._eos_token_ids

    def accept_token(self, token_id: int) -> bool:
        """Advance by a sampled token. Return False if the grammar does not allow it; `error` then states why."""
        if self.thinking_budget is not None and not self.thinking_budget.accept_token(token_id, self.forced_token_id):
            self.error = (
                "thinking_token_budget: the other sampling parameters forbid the mark that ends the reasoning; change "
                "allowed_token_ids, bad_words or logit_bias"
            )
            return False
        if self._pending_begin:
            self._skip_token(token_id)
            return True
        if self.matcher is None:
            return True
        # A matcher that has failed would allow the end of the sequence, so the output would look complete.
        while self.matcher.is_error() or not self.matcher.consume_token(token_id):
            if not self.renew_matcher():
                self.error = f"structured_outputs: {self._describe_failure(describe_error(self.matcher))}"
                return False
        self._token_ids.append(token_id)
        return True

    def renew_matcher(self) -> bool:
        """Replace the matcher if its lexer has failed. Return False if it has not, or if a new lexer fails, too."""
        matcher = None if self._source is None else self._source.renew(self._token_ids)
        if matcher is not None:
            self.matcher = matcher
        return matcher is not None

    def _describe_failure(self, reason: str) -> str:
        if self._source is not None and self._source.is_exhausted:
            return f"the constraint became too complex for this output; simplify it: {reason}"
        if reason.startswith("Parser Error"):
            return (
                "the other sampling parameters exclude all tokens that the constraint allows here; change "
                f"allowed_token_ids, bad_words or logit_bias: {reason}"
            )
        return reason

    def forced_token_ids(self) -> list[int]:
        """Return tokens for the text that must come next.

        The list is empty if the grammar allows more than one text, or if the constrained part has not begun. A model
        can also write the text with other tokens.
        """
        if self._pending_begin or self.matcher is None or self.matcher.is_stopped():
            return []
        return list(self.matcher.compute_ff_tokens())

    def validate_draft(self, token_ids: list[int]) -> list[int]:
        """Return the longest prefix of these tokens that the grammar allows.

        If one of the tokens begins the constrained part, the prefix ends after this token. If one of the tokens ends
        the grammar, the prefix ends before this token.
        """
        if self.thinking_budget is not None:
            # The token that is sampled after the draft must not be forced either.
            token_ids = token_ids[: max(0, self.thinking_budget.num_unforced - 1)]
        if self._pending_begin:
            return token_ids[: self.num_rows_before_begin(token_ids)]
        if self.matcher is None:
            return token_ids
        num_allowed = self.matcher.try_consume_tokens(token_ids)
        ends = num_allowed > 0 and self.matcher.is_stopped()
        self.matcher.rollback(num_allowed)
        return token_ids[: num_allowed - ends]

    def num_rows_before_begin(self, draft_token_ids: Sequence[int]) -> int:
        """Return how many of the next tokens precede the constrained part. The next tokens are the draft tokens and the
        one token after them."""
        if not (begin := self._pending_begin):
            return 0
        last_token_ids = self._last_token_ids
        for count, token_id in enumerate(draft_token_ids, 1):
            last_token_ids = [*last_token_ids, token_id][-len(begin) :]
            if tuple(last_token_ids) == begin:
                return count
        return len(draft_token_ids) + 1

    def _skip_token(self, token_id: int) -> None:
        """Count a token that precedes the constrained part."""
        begin = self._pending_begin
        self._last_token_ids = [*self._last_token_ids, token_id][-len(begin) :]
        if tuple(self._last_token_ids) == begin:
            self._pending_begin, self._last_token_ids = (), []
