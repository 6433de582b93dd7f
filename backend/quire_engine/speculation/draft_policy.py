# SPDX-License-Identifier: Apache-2.0
"""Draft policy: decides how many draft tokens a sequence gets, from the size of the batch and the acceptance of recent
drafts.

Torch-free.
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from quire_engine.sequence import Sequence

_RIDGE_ROWS = {"cpu": 8, "cuda": 128}
"""For each device type: number of rows from which the policy assumes that a step's time is proportional to its
rows."""
_MIN_ROW_COST = 0.05
"""Minimum cost of a draft row, as a fraction of a step's time. Measured: 0.03 for a 135M model on two Zen 5 cores."""
_FIRST_ACCEPTANCE = 0.6
_SMOOTHING = 0.25
"""Weight of the latest draft in the estimate of a sequence."""
_GLOBAL_SMOOTHING = 0.05
_PROBE_INTERVAL = 64
"""Number of output tokens without drafts after which a sequence gets one draft token again."""


@dataclass(slots=True)
class DraftCounts:
    """Counters of the drafts that an engine has verified since its start."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """Number of accepted draft tokens by their position in the draft."""


class DraftPolicy:
    """Chooses the length of drafts.

    The first token of a draft is accepted with a probability that is estimated for each sequence. A draft whose first
    token is accepted often continues a repeated text. So its later tokens have a separate estimate, which all sequences
    share. A draft ends where the product of these probabilities falls below the cost of a row: max(_MIN_ROW_COST, (rows
    of the step / ridge rows) ** 2).
    """

    def __init__(self, device: str, max_tokens: int) -> None:
        """`max_tokens` is the maximum length of a draft."""
        self._ridge_rows = _RIDGE_ROWS[device]
        self.max_tokens = max_tokens
        self._mean_acceptance = _FIRST_ACCEPTANCE
        self._acceptance: WeakKeyDictionary[Sequence, float] = WeakKeyDictionary()
        """Estimated probability that the first token of a draft is accepted."""
        self._continuation = _FIRST_ACCEPTANCE
        """Estimated probability that a later token is accepted if all draft tokens before it are accepted."""
        self.counts = DraftCounts(accepted_per_position=[0] * max_tokens)

    def draft_length(self, sequence: Sequence, num_rows: int) -> int:
        """Return the number of draft tokens of a sequence in a step of `num_rows` rows; 0 for none."""
        row_cost = max(_MIN_ROW_COST, (num_rows / self._ridge_rows) ** 2)
        if row_cost >= 1.0:
            return 0
        length, usefulness = 0, self._acceptance.get(sequence, self._mean_acceptance)
        while length < self.max_tokens and usefulness >= row_cost:
            length += 1
            usefulness *= self._continuation
        return length or int(len(sequence.output_token_ids) % _PROBE_INTERVAL == 0)

    def max_forced_length(self, num_rows: int) -> int:
        """Return the maximum length of a draft that is certain to be accepted, in a step of `num_rows` rows."""
        return self.max_tokens if num_rows < self._ridge_rows else 0

    def record(
        self, sequence: Sequence, num_draft_tokens: int, num_accepted_tokens: int, *, is_forced: bool = False
    ) -> None:
        """Record the verification of one draft. A draft that a grammar forced does not change the estimates."""
        counts = self.counts
        counts.num_drafts += 1
        counts.num_draft_tokens += num_draft_tokens
        counts.num_accepted_tokens += num_accepted_tokens
        for position in range(num_accepted_tokens):
            counts.accepted_per_position[position] += 1
        if is_forced:
            return
        first = float(num_accepted_tokens > 0)
        previous = self._acceptance.get(sequence, self._mean_acceptance)
        self._acceptance[sequence] = previous + _SMOOTHING * (first - previous)
        self._mean_acceptance += _GLOBAL_SMOOTHING * (first - self._mean_acceptance)
        # Verification stops at the first rejected token, so the tokens after it were not compared.
        num_verified = min(num_accepted_tokens + 1, num_draft_tokens)
        if num_verified > 1:
            latest = (num_accepted_tokens - 1) / (num_verified - 1)
            self._continuation += _GLOBAL_SMOOTHING * (latest - self._continuation)
