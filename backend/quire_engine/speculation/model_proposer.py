# SPDX-License-Identifier: Apache-2.0
"""Proposer of drafts that the model runner has computed with a draft model. Torch-free."""

from collections.abc import Sequence as TokenSequence
from weakref import WeakKeyDictionary

from quire_engine.sequence import Sequence
from quire_engine.speculation.proposer import DraftProposer


class ModelProposer(DraftProposer):
    """Keeps the draft of each sequence from the end of one step to the plan of the next."""

    def __init__(self) -> None:
        self._drafts: WeakKeyDictionary[Sequence, tuple[int, list[int]]] = WeakKeyDictionary()
        """For each sequence: the number of its tokens before the draft, and the draft."""

    def store(self, sequence: Sequence, draft_token_ids: TokenSequence[int]) -> None:
        """Keep the draft that continues the tokens of a sequence."""
        self._drafts[sequence] = sequence.num_tokens, list(draft_token_ids)

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """See DraftProposer."""
        num_tokens, draft = self._drafts.get(sequence, (0, []))
        return draft[:max_tokens] if num_tokens == sequence.num_tokens else []
