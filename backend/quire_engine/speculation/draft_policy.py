# SPDX-License-Identifier: Apache-2.0
"""Draft policy: decides how many draft tokens a sequence gets. Torch-free.

The decision depends on the size of the batch, and on how many draft tokens were accepted recently.
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from quire_engine.sequence import Sequence

_RIDGE_ROWS = {"cpu": 8, "cuda": 128}
"""For each device type: if a step has at least this number of rows, the policy assumes that the time of the step is
proportional to its number of rows."""
_MIN_ROW_COST = 0.05
"""The policy assumes that a draft row costs at least this fraction of a step's time. For a 135M model on two Zen 5
cores, the measured fraction is 0.03."""
_FIRST_ACCEPTANCE = 0.6
_SMOOTHING = 0.25
"""When a draft of a sequence is verified, the result has this weight in the new estimate for this sequence."""
_GLOBAL_SMOOTHING = 0.05
_PROBE_INTERVAL = 64
"""If the estimate for a sequence is so low that the sequence gets no drafts, it nevertheless gets a single draft token
after every _PROBE_INTERVAL output tokens."""


@dataclass(slots=True)
class DraftCounts:
    """Counters of the drafts that an engine has verified since its start."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """For each position in a draft: how many draft tokens at this position were accepted."""


class DraftPolicy:
    """Chooses the length of drafts.

    The policy estimates, for each sequence, the probability that the first token of a draft is accepted. If the first
    token is accepted, the output often repeats an earlier text, and the later tokens are likely to be accepted, too.
    Therefore, the later tokens have a separate estimate, which all sequences share. The product of the probabilities
    decreases with each token. The draft ends where the product falls below the cost of a row, which is
    max(_MIN_ROW_COST, (rows of the step / ridge rows) ** 2).
    """

    def __init__(self, device: str, max_tokens: int) -> None:
        """`max_tokens` is the maximum length of a draft."""
        self._ridge_rows = _RIDGE_ROWS[device]
        self.max_tokens = max_tokens
        self._mean_acceptance = _FIRST_ACCEPTANCE
        self._acceptance: WeakKeyDictionary[Sequence, float] = WeakKeyDictionary()
        """For each sequence: the estimated probability that the first token of a draft is accepted."""
        self._continuation = _FIRST_ACCEPTANCE
        """Estimated probability that a later token is accepted if all draft tokens before it are accepted."""
        self.counts = DraftCounts(accepted_per_position=[0] * max_tokens)

    def draft_length(self, sequence: Sequence, num_rows: int) -> int:
        """Return how many draft tokens a sequence gets in a step of `num_rows` rows."""
        row_cost = max(_MIN_ROW_COST, (num_rows / self._ridge_rows) ** 2)
        if row_cost >= 1.0:
            return 0
        length, usefulness = 0, self._acceptance.get(sequence, self._mean_acceptance)
        while length < self.max_tokens and usefulness >= row_cost:
            length += 1
            usefulness *= self._continuation
        return length or int(len(sequence.output_token_ids) % _PROBE_INTERVAL == 0)

    def max_forced_length(self, num_rows: int) -> int:
        """Return the maximum length of a draft that a grammar forces, in a step of `num_rows` rows.

        All tokens of such a draft are certain to be accepted.
        """
        return self.max_tokens if num_rows < self._ridge_rows else 0

    def record(
        self, sequence: Sequence, num_draft_tokens: int, num_accepted_tokens: int, *, is_forced: bool = False
    ) -> None:
        """Record how many tokens of a verified draft were accepted. A draft that a grammar forced does not change the
        estimates."""
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
