# SPDX-License-Identifier: Apache-2.0
"""Interface of drafters, which compute the draft of each sequence after a step. The model runner calls it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.step.plan import BlockCopy, ScheduledSpan, SpanOutput


class Drafter(ABC):
    """The weights that compute drafts, and the cached state that these weights need."""

    num_bytes: int
    """Bytes of the weights."""
    block_bytes: int
    """Bytes of the drafter's own KV cache for each KV block of the model."""

    @abstractmethod
    def load(self) -> None:
        """Load the weights. Raises ConfigError if the weights do not fit the model."""

    @abstractmethod
    def allocate(self, num_blocks: int) -> KVCache | None:
        """Allocate and return the drafter's KV cache, which has the same number of blocks as the model's cache; None if
        drafts need no cache."""

    @abstractmethod
    def propose(
        self,
        spans: Sequence[ScheduledSpan],
        outputs: list[SpanOutput],
        copies: Sequence[BlockCopy],
        aux_hidden_states: Tensor | None,
    ) -> list[SpanOutput]:
        """Return the outputs of a step, to which the drafts for the next step were added.

        Args:
            spans: spans of the step, in the order of computation.
            outputs: one per span.
            copies: block copies of this step.
            aux_hidden_states: hidden states of the model, [num_tokens, ...]; None if the drafter reads none.
        """
