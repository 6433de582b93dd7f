# SPDX-License-Identifier: Apache-2.0
"""Drafts with a known acceptance: the right continuation, in which each token is kept with a given probability."""

import random
from collections.abc import Callable

from quire_engine.sequence import Sequence
from quire_engine.speculation.proposer import DraftProposer


class ScriptedProposer(DraftProposer):
    """Proposer of a test. A wrong token follows from the position alone, so that runs are repeatable."""

    def __init__(self, continuation: Callable[[Sequence, int], list[int]], keep_probability: float = 0.7) -> None:
        """`continuation` returns the tokens that follow a sequence, and how many are wanted."""
        self._continuation = continuation
        self._keep_probability = keep_probability

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """See DraftProposer."""
        tokens = self._continuation(sequence, max_tokens)[:max_tokens]
        return [
            token if random.Random(sequence.num_tokens + i).random() < self._keep_probability else token ^ 1
            for i, token in enumerate(tokens)
        ]
