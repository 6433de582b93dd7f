# SPDX-License-Identifier: Apache-2.0
"""Limits the reasoning of one sequence: after a number of tokens, only the mark that ends the reasoning can follow.

The grammar of the sequence owns the budget, and advances it with each token. A reasoning that ends within the budget is
not changed, and tokens after the reasoning are not counted.

Source: name and meaning are those of vLLM's thinking_token_budget. As in vLLM, reasoning tokens in the prompt are
counted.
"""

import sys
from collections.abc import Sequence


class ThinkingBudget:
    """The budget of one sequence."""

    __slots__ = ("_end", "_last_token_ids", "_num_forced", "_num_left", "_start", "_state")

    def __init__(
        self,
        num_tokens: int,
        start_token_ids: Sequence[int],
        end_token_ids: Sequence[int],
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """`start_token_ids` and `end_token_ids` are the marks of the reasoning. If `start_token_ids` is empty, the
        output begins inside the reasoning. At most `num_tokens` tokens are allowed between the marks. Reasoning tokens
        of the prompt are counted, too.
        """
        self._start, self._end = tuple(start_token_ids), tuple(end_token_ids)
        self._num_left = num_tokens
        self._num_forced = 0
        """Number of tokens of the end mark that were forced."""
        self._last_token_ids: tuple[int, ...] = ()
        self._state = "before" if self._start else "inside"
        """Position of the next token relative to the reasoning: before, inside or behind."""
        if self._start and (begin := _last_index(prompt_token_ids, self._start)) > _last_index(
            prompt_token_ids, self._end
        ):
            self._state = "inside"
            self._num_left -= len(prompt_token_ids) - begin - len(self._start)

    @property
    def forced_token_id(self) -> int | None:
        """The only token that can come next; None if any token can."""
        return self._end[self._num_forced] if self._state == "inside" and self._num_left <= 0 else None

    @property
    def num_unforced(self) -> int:
        """Minimum number of tokens that come before the next forced token. After the end of the reasoning, it is a very
        large number."""
        return sys.maxsize if self._state == "behind" else max(0, self._num_left)

    def accept_token(self, token_id: int, forced: int | None) -> bool:
        """Advance by a sampled token. `forced` is `forced_token_id`, or None if that token was not forced. Return False
        if another token was forced.
        """
        if self._state == "behind":
            return True
        if forced is not None:
            self._num_forced += 1
            if self._num_forced == len(self._end):
                self._state = "behind"
            return token_id == forced
        mark = self._start if self._state == "before" else self._end
        self._last_token_ids = (*self._last_token_ids, token_id)[-len(mark) :]
        self._num_left -= self._state == "inside"
        if self._last_token_ids == mark:
            self._state = "inside" if self._state == "before" else "behind"
            self._last_token_ids = ()
        return True


def _last_index(token_ids: Sequence[int], mark: tuple[int, ...]) -> int:
    """Return the index of the last occurrence of `mark`; -1 if there is none."""
    starts = range(len(token_ids) - len(mark), -1, -1)
    return next((i for i in starts if tuple(token_ids[i : i + len(mark)]) == mark), -1)
