# SPDX-License-Identifier: Apache-2.0
"""Cost model for swapping: decides whether KV blocks are kept in host memory or computed again.

Pure arithmetic. The runner measures the costs when it starts; the block manager uses them."""

from dataclasses import dataclass

COPY_SHARE = 1 / 16
"""Time that a step can spend on copies of blocks that are used by no other sequence of the step, as a share of the time
of the largest step."""


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """Capacity of host memory, and the costs of swapping and computing that were measured for this model on this
    device."""

    num_host_blocks: int = 0
    seconds_per_block: float = 0.0
    """Seconds to copy one block to host memory and back."""
    seconds_per_token: float = 0.0
    """Seconds to compute one prompt token when the step is full. The extra time for long contexts is ignored."""
    num_host_states: int = 0
    """Number of snapshots of states that fit in host memory; 0 if layers have no states."""
    num_blocks_per_state: int = 0
    """Number of blocks that have as many bytes as a state, rounded up."""

    def is_worthwhile(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether copying `num_blocks` blocks out and back is faster than computing `num_tokens` tokens
        again."""
        return num_blocks * self.seconds_per_block < num_tokens * self.seconds_per_token

    def max_copies(self, max_tokens: int) -> int:
        """Return how many blocks a step of at most `max_tokens` tokens can copy in one direction for the cache in host
        memory, so that it takes about COPY_SHARE longer; at least 1."""
        if not self.seconds_per_block:
            return max(1, self.num_host_blocks)
        seconds = COPY_SHARE * max_tokens * self.seconds_per_token
        return max(1, int(2 * seconds / self.seconds_per_block))
