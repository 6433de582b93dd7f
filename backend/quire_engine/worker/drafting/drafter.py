# SPDX-License-Identifier: Apache-2.0
"""Interface of drafters. After a step, a drafter computes the draft of each sequence. The model runner calls it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.step.plan import BlockCopy, ScheduledSpan, SpanOutput


class Drafter(ABC):
    """Computes drafts. A drafter owns the weights that it needs for this, and a KV cache if the weights need one."""

    num_bytes: int
    """Bytes of the weights."""
    block_bytes: int
    """Number of bytes that the drafter's own KV cache needs for each KV block of the model."""

    @abstractmethod
    def load(self) -> None:
        """Load the weights. Raises ConfigError if the weights do not fit the model."""

    @abstractmethod
    def allocate(self, num_blocks: int) -> KVCache | None:
        """Allocate the drafter's KV cache and return it, or return None if drafts do not need a cache.

        The cache has the same number of blocks as the model's cache.
        """

    @abstractmethod
    def propose(
        self,
        spans: Sequence[ScheduledSpan],
        outputs: list[SpanOutput],
        copies: Sequence[BlockCopy],
        aux_hidden_states: Tensor | None,
    ) -> list[SpanOutput]:
        """Compute the drafts for the next step, and return the outputs of this step with the drafts added.

        Args:
            spans: spans of the step, in the order of computation.
            outputs: one per span.
            copies: block copies of this step.
            aux_hidden_states: hidden states of the model, [num_tokens, ...]; None if the drafter reads none.
        """
