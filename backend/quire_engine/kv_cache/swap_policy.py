# SPDX-License-Identifier: Apache-2.0
"""Cost model for swapping: decides whether the KV blocks of a preempted sequence are kept in host memory or computed
again.

Pure arithmetic. The runner measures the costs when it starts; the block manager uses them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """Capacity of host memory, and the costs of swapping and computing that were measured for this model on this
    device."""

    num_host_blocks: int = 0
    seconds_per_block: float = 0.0
    """Seconds to copy one block to host memory and back."""
    seconds_per_token: float = 0.0
    """Seconds to compute one prompt token when the step is full. The extra time for long contexts is ignored."""

    def is_worthwhile(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether copying `num_blocks` blocks out and back is faster than computing `num_tokens` tokens
        again."""
        return num_blocks * self.seconds_per_block < num_tokens * self.seconds_per_token
